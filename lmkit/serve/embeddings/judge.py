"""Scores of a reranker that answers yes or no, such as Qwen3-Reranker (arXiv 2506.05176).

The chat template writes the model's own prompt for a query and a document. The score is the probability of "yes" as the
next token, beside that of "no". Both are read as the log-probability of a token after the prompt, whose KV is shared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lmkit.errors import RequestError
from lmkit.serve.auth import owner
from lmkit.serve.embeddings.protocol import PairsRequest
from lmkit.serve.embeddings.vectors import Embedder
from lmkit.serve.to_request import placement
from lmkit.text.chat.conversation import ChatMessage
from lmkit.turbo.request import Request, SamplingParams
from lmkit.web.receive import while_connected

ANSWERS = ("yes", "no")
TASK = "Given a web search query, retrieve relevant passages that answer the query"  # unless the body has another
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
Pairs = Sequence[tuple[str, str]]  # of a query and a document


class Judge:
    """Asks the model about each pair of one body."""

    def __init__(self, embedder: Embedder, body: PairsRequest) -> None:
        """The `embedder` of the body runs the requests and counts their tokens."""
        self._embedder, self._server, self._body = embedder, embedder.server, body

    async def scores(self, pairs: Pairs, param: str) -> list[float]:
        """For each pair a number in [0, 1]. Raises RequestError, which names the field `param`."""
        for name in ("truncate_prompt_tokens", "truncation_side", "add_special_tokens"):
            if getattr(self._body, name) is not None:
                message = f"{name}: the chat template of a reranker writes the whole prompt; leave it out"
                raise RequestError("unsupported_parameter", message, name)
        receive = self._embedder.request.receive
        num_chars = sum(len(query) + len(document) for query, document in pairs)
        requests = await self._server.texts.run(receive, num_chars, lambda: self._requests(pairs, param))
        running = self._embedder.ends(requests, requests[:: len(ANSWERS)], shares_scores=True)
        sums = [
            math.fsum(entry.token.logprob or 0.0 for entry in end.prompt_logprobs[1:])
            for end in await while_connected(receive, running)
        ]
        return [1 / (1 + math.exp(min(no - yes, 700.0))) for yes, no in zip(sums[::2], sums[1::2], strict=True)]

    def _requests(self, pairs: Pairs, param: str) -> list[Request]:
        """A request for each answer to each pair."""
        endings = [self._server.tokenizer.encode(answer, False) for answer in ANSWERS]
        fields: dict[str, Any] = {"params": SamplingParams(max_tokens=0, logprobs=0, seed=0), "prompt_logprobs": True}
        fields |= placement(self._body, owner(self._embedder.request))
        requests: list[Request] = []
        for query, document in pairs:
            ids = self._prompt(query, document, max(map(len, endings)), param)
            for ending in endings:
                name = f"{self._embedder.id}-{len(requests)}"
                requests.append(
                    Request(request_id=name, prompt_ids=ids + ending, logprobs_start=len(ids) - 1, **fields)
                )
        return requests

    def _prompt(self, query: str, document: str, wanted: int, param: str) -> list[int]:
        """The tokens of the question about a pair, after which `wanted` more fit the context. Raises RequestError."""
        tokenizer, context = self._server.tokenizer, self._server.info.max_model_len
        text = f"<Instruct>: {self._body.instruction or TASK}\n<Query>: {query}\n<Document>: {document}"
        messages = [ChatMessage(role="system", content=SYSTEM), ChatMessage(role="user", content=text)]
        prompt = self._server.style.write(messages, variables={"enable_thinking": False})
        tokenizer.check_length(prompt, context, param)
        ids = tokenizer.encode(prompt, False)
        if len(ids) + wanted > context:
            message = f"this model's maximum context length is {context} tokens, but a pair of {param} has {len(ids)}"
            sizes = {"n_prompt_tokens": len(ids), "n_ctx": context}
            raise RequestError("context_length_exceeded", message, param, **sizes)
        return ids
