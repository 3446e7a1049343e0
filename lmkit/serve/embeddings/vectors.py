"""From texts to embeddings. They pass through the engine like other requests, some of a body at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import Request as HttpRequest

from lmkit.errors import RequestError
from lmkit.serve.auth import owner
from lmkit.serve.embeddings.protocol import InputRequest, Text, TextsRequest
from lmkit.serve.serving import Serving, new_id
from lmkit.serve.to_request import check_ids, placement
from lmkit.serve.truncate import room
from lmkit.text import Tokenizer
from lmkit.text.cut import cut, cut_text
from lmkit.text.tokenizer import EncodedPair
from lmkit.turbo.request import Classes, EngineInfo, Request, SamplingParams
from lmkit.turbo.transport.output import RequestOutput
from lmkit.turbo.transport.vectors import matrix, through
from lmkit.web.prompt_limit import check_prompts
from lmkit.web.receive import while_connected

if TYPE_CHECKING:
    from lmkit.turbo.transport.vectors import Vectors
# Of one body, the requests that are with the engine at a time: enough for full steps, and a small part of the queue.
AT_ONCE, TOKENS_AT_ONCE = 128, 1 << 17


class Embedder:
    """Computes the embeddings of one body's texts, and counts their tokens."""

    def __init__(self, request: HttpRequest, server: Serving, body: TextsRequest, prefix: str) -> None:
        self.request, self._body = request, body
        self.server = server
        self._share = request.state.held.enter_context(self.server.answers.share())
        self.id = new_id(prefix)
        self._num_tokens = self._num_cached = 0

    async def vectors(
        self, texts: Sequence[Text], param: str, *, prompt: str = "", normalize: bool = True, size: int = 0
    ) -> Vectors:
        """Embeddings float32 [texts, size], by default of unit length; size 0 = the model's. `prompt` stands before
        each text that is not given as token ids.

        Raises RequestError, which names the field `param`.
        """
        texts = [prompt + text if isinstance(text, str) else text for text in texts] if prompt else texts
        rows = await self._states(sum(map(_num_chars, texts)), lambda: self._requests(texts, param))
        work = partial(matrix, rows, size, normalize=normalize, layers=self.server.info.vector_layers)
        return await self.server.texts.run(self.request.receive, 0, work)

    async def pair_scores(self, pairs: Sequence[tuple[str, str]], classes: Classes, param: str) -> list[float]:
        """The score of each pair of texts, by a model that reads both together. Raises RequestError."""
        num_chars = sum(len(first) + len(second) for first, second in pairs)
        rows = await self._states(num_chars, lambda: self._pair_requests(pairs, param))

        def work() -> list[float]:
            found: list[float] = scores(matrix(rows, normalize=False), classes, raw=False)[:, 0].tolist()
            return found

        return await self.server.texts.run(self.request.receive, 0, work)

    async def _states(self, num_chars: int, make: Callable[[], list[Request]]) -> list[bytes]:
        """What the engine gives for each of the requests, which are made of texts with so many characters."""
        requests = await self.server.texts.run(self.request.receive, num_chars, make)
        ends = await while_connected(self.request.receive, self.ends(requests, requests))
        return [end.embedding for end in ends]

    async def conversation(self, body: InputRequest) -> list[int]:
        """The tokens of the body's messages, as the chat template writes them. Raises RequestError."""
        messages, tokenizer = body.messages or [], self.server.tokenizer

        def work() -> list[int]:
            text = self.server.style.write(
                messages,
                variables=body.chat_template_kwargs,
                add_generation_prompt=bool(body.add_generation_prompt),
                continue_final=bool(body.continue_final_message),
            )
            if body.truncate_prompt_tokens is None:
                tokenizer.check_length(text, self.server.info.max_model_len, "messages")
            return tokenizer.encode(text, bool(body.add_special_tokens))

        num_chars = sum(message.num_chars for message in messages)
        return await self.server.texts.run(self.request.receive, num_chars, work)

    @property
    def usage(self) -> dict[str, Any]:
        total = {"prompt_tokens": self._num_tokens, "total_tokens": self._num_tokens}
        return total | {"prompt_tokens_details": {"cached_tokens": self._num_cached}}

    def _requests(self, texts: Sequence[Text], param: str) -> list[Request]:
        server, placed = self.server, placement(self._body, owner(self.request))
        fields: dict[str, Any] = {"params": SamplingParams(max_tokens=0), "pooling": server.info.pooling}
        return [
            Request(
                request_id=f"{self.id}-{i}",
                prompt_ids=token_ids(text, server.tokenizer, server.info, self._body, param),
                **fields,
                **placed,
            )
            for i, text in enumerate(texts)
        ]

    def _pair_requests(self, pairs: Sequence[tuple[str, str]], param: str) -> list[Request]:
        server, placed = self.server, placement(self._body, owner(self.request))
        fields: dict[str, Any] = {"params": SamplingParams(max_tokens=0), "pooling": server.info.pooling}
        requests = []
        for i, (first, second) in enumerate(pairs):
            pair = pair_ids(first, second, server.tokenizer, server.info, self._body, param)
            fields |= {"prompt_ids": pair.ids, "second_start": pair.second_start}
            requests.append(Request(request_id=f"{self.id}-{i}", **fields, **placed))
        return requests

    async def ends(
        self, requests: list[Request], counted: Sequence[Request], *, shares_scores: bool = False
    ) -> list[RequestOutput]:
        """The last output of each request. The tokens of the `counted` ones are those of the body. `shares_scores`: see
        Serving.run.
        """
        check_prompts(sum(len(request.prompt_ids) for request in counted))
        ends = []
        for part in _parts(requests):
            done: dict[int, RequestOutput] = {}
            async with aclosing(self.server.run(part, 1, self._share, shares_scores=shares_scores)) as outputs:
                async for idx, output in outputs:
                    self._share.add(len(output.embedding))
                    done[idx] = output
            ends += [done[idx] for idx in range(len(part))]
        names = {request.request_id for request in counted}
        self._num_tokens += sum(len(request.prompt_ids) for request in counted)
        self._num_cached += sum(end.num_cached_tokens for end in ends if end.request_id in names)
        return ends


def scores(states: Vectors, classes: Classes, *, raw: bool) -> Vectors:
    """float32 [texts, labels]: probabilities, or `raw` logits. A text's do not depend on the others."""
    import numpy as np

    weight = np.frombuffer(classes.weight, np.float32).reshape(len(classes.labels), -1)
    bias = np.frombuffer(classes.bias, np.float32)
    inner = through(classes.layers, states)
    rows = [(weight * state).sum(axis=1, dtype=np.float64) + bias for state in inner]
    logits = np.stack(rows)
    if raw or classes.activation == "none":
        return logits.astype(np.float32)
    if classes.activation == "sigmoid":
        probabilities = 0.5 + 0.5 * np.tanh(0.5 * logits)
    else:
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = powers / powers.sum(axis=1, keepdims=True)
    shown: Vectors = probabilities.astype(np.float32)
    return shown


def check_dimensions(asked: int | None, info: EngineInfo) -> None:
    """Raise RequestError unless embeddings may have this size."""
    most, known = info.hidden_size, info.dimensions
    if known and asked not in (None, most, *known):
        message = f"dimensions={asked}: this model was trained for {', '.join(map(str, known))}"
        raise RequestError("invalid_request", message, "dimensions")
    if asked is not None and asked > most:
        message = f"dimensions={asked}: this model's embeddings have {most}; ask for at most as many"
        raise RequestError("invalid_request", message, "dimensions")


def _parts(requests: list[Request]) -> Iterator[list[Request]]:
    part: list[Request] = []
    num_tokens = 0
    for request in requests:
        if part and (len(part) == AT_ONCE or num_tokens + len(request.prompt_ids) > TOKENS_AT_ONCE):
            yield part
            part, num_tokens = [], 0
        part.append(request)
        num_tokens += len(request.prompt_ids)
    yield part


def token_ids(text: Text, tokenizer: Tokenizer, info: EngineInfo, body: TextsRequest, param: str) -> list[int]:
    """The tokens of a text, cut as the body says. Raises RequestError for a text that the model cannot take."""
    context = info.max_model_len
    longest = info.sentences.max_tokens
    most = room(body.truncate_prompt_tokens, min(longest or context, context))
    _check_side(body, most)
    if most is None and 0 < longest <= context:
        most = longest  # as sentence-transformers does
    keep_end, special = body.truncation_side == "left", body.add_special_tokens is not False
    if isinstance(text, list):
        ids = list(_joined(text, tokenizer, context, param))
        check_ids(ids, info.vocab_size, param)
        ids = ids if most is None else cut(ids, most, keep_end=keep_end)
    elif most is None:
        tokenizer.check_length(text, context, param)
        ids = tokenizer.encode(text, special)
    else:
        ids = cut_text(text, tokenizer, most, special=special, keep_end=keep_end)
    if not ids:
        raise RequestError("invalid_request", f"{param}: no tokens; a text is empty", param)
    if len(ids) > context:
        raise _too_long(len(ids), context, f"a text of {param}", param)
    return ids


def pair_ids(
    first: str, second: str, tokenizer: Tokenizer, info: EngineInfo, body: TextsRequest, param: str
) -> EncodedPair:
    """The tokens of two texts; the second is cut as the body says. Raises RequestError for a pair that is too long."""
    most = room(body.truncate_prompt_tokens, info.max_model_len)
    _check_side(body, most)
    pair = tokenizer.encode_pair(first, second, special=body.add_special_tokens is not False)
    fitting = pair if most is None else pair.cut(most, keep_end=body.truncation_side == "left")
    if fitting is None or len(fitting.ids) > info.max_model_len:
        raise _too_long(len(pair.ids), info.max_model_len, f"a pair of {param}", param)
    return fitting


def _check_side(body: TextsRequest, most: int | None) -> None:
    if body.truncation_side is not None and most is None:
        raise RequestError("invalid_request", "truncation_side needs truncate_prompt_tokens", "truncation_side")


def _too_long(num_tokens: int, context: int, what: str, param: str) -> RequestError:
    message = (  # clients look for the first words, which are OpenAI's
        f"this model's maximum context length is {context} tokens, but {what} has {num_tokens}; shorten it, or send "
        "truncate_prompt_tokens: -1"
    )
    return RequestError("context_length_exceeded", message, param, n_prompt_tokens=num_tokens, n_ctx=context)


def _num_chars(text: Text) -> int:
    return len(text) if isinstance(text, str) else sum(len(part) if isinstance(part, str) else 1 for part in text)


def _joined(parts: Sequence[int | str], tokenizer: Tokenizer, context: int, param: str) -> Iterator[int]:
    """Token ids, with the tokens of the texts between them. A client that writes ids writes the special ones, too."""
    for part in parts:
        if isinstance(part, int):
            yield part
        else:
            tokenizer.check_length(part, context, param)
            yield from tokenizer.encode(part, False)
