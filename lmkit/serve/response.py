"""The common part of chat and text completions: from a body to a whole response or a stream of chunks."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from fastapi import Request, Response
from msgspec import UNSET

from lmkit.errors import RequestError
from lmkit.serve.auth import Owner, owner
from lmkit.serve.body import read_json
from lmkit.serve.choose import choose
from lmkit.serve.collect import Collected, check_output
from lmkit.serve.constraint import checks_a_grammar
from lmkit.serve.pair import decoding, part_of, prefill
from lmkit.serve.parts import Asked, ChatCompletionChunk, Completion, PromptProgress, RequestMetrics
from lmkit.serve.protocol import ChatCompletionRequest, CompletionRequest
from lmkit.serve.receipts import Noted, receipts
from lmkit.serve.resume import Resumption
from lmkit.serve.serving import MIN_LOGPROB, Serving, UsageCount, new_id
from lmkit.serve.streaming import COMMENT, EVENTS, EventStream, Failed, WholeAnswer, Wire, counted, event, json_parts
from lmkit.serve.times import request_metrics
from lmkit.serve.times import timings as timings
from lmkit.serve.to_request import with_numbers
from lmkit.turbo import request as engine
from lmkit.turbo.transport.output import RequestOutput, TextLogprobs, TokenText
from lmkit.web.budget import Share
from lmkit.web.errors import error_body
from lmkit.web.prompt_limit import check_prompts
from lmkit.web.receipt import HEADER as RECEIPT_HEADER
from lmkit.web.receive import while_connected
from lmkit.web.resume import STREAM_HEADER, WHOLE_HEADER, Identity

B = TypeVar("B", ChatCompletionRequest, CompletionRequest)


class ResponseBuilder(ABC, Generic[B]):
    """Builds one response: first `prepare`, then either `whole` or `chunks`."""

    prefix: ClassVar[str]  # of its id
    requests: list[engine.Request]
    count: UsageCount
    last: RequestOutput | None = None  # the one that was noted last
    _queue_seconds = 0.0  # as one of the outputs says
    _processed: int | None = None  # tokens of the prompt, as the client knows
    identity: Identity | None = None  # what a proxy chose, the same at each node
    resumption: Resumption | None = None  # another node may take over
    receipt: Noted | None = None  # it gets one
    repeats_logprobs: ClassVar[bool] = False  # the end of a stream has all log-probabilities again

    def __init__(self, server: Serving, body: B, owner: Owner, share: Share) -> None:
        """`share` counts the bytes that the answer holds."""
        self.server, self.owner, self.share = server, owner, share
        self.body: B = body
        self.id = new_id(self.prefix)
        self.head: dict[str, Any] = {  # of the response and of each chunk
            "id": self.id,
            "created": int(time.time()),
            "model": server.model_name,
            "system_fingerprint": server.system_fingerprint,
        }

    async def gather(self) -> None:
        """Get what the body names elsewhere, before `prepare`. Raises RequestError."""

    def prepare(self) -> None:
        """Make the engine's requests. This takes time, so call it in `Serving.texts`. Raises RequestError."""
        self.body = with_numbers(self.body, self.server.config.max_logprobs, self.server.info.vocab_size)
        self.requests = self.make_requests()
        if self.body.timings_per_token and len(self.requests) > 1:
            message = "timings_per_token: it goes with one prompt and one choice"
            raise RequestError("invalid_request", message, "timings_per_token")
        if self.body.return_progress and (len(self.requests) > 1 or not self.body.stream):
            message = "return_progress: it goes with stream, one prompt and one choice"
            raise RequestError("invalid_request", message, "return_progress")
        limit = self.server.answers.each
        check_output(
            self.requests, self.choices_per_prompt, self.server.info, stream=bool(self.body.stream), limit=limit
        )
        self.count = UsageCount(self.requests, self.choices_per_prompt)

    @abstractmethod
    def make_requests(self) -> list[engine.Request]:
        """`choices_per_prompt` requests for each prompt, in the order of the prompts."""

    @property
    @abstractmethod
    def num_chars(self) -> int:
        """The length of the body's texts, or of its token ids."""

    @property
    def guided(self) -> str | None:
        """The tenant, if `prepare` checks a grammar."""
        return self.owner.tenant if checks_a_grammar(self.body) else None

    @property
    def only_tokens(self) -> bool:
        """Whether `prepare` does no more than to tokenize texts of this length."""
        return False

    @property
    def only_scores(self) -> bool:
        """Whether the requests score texts after one prompt."""
        return False

    @abstractmethod
    async def whole(self) -> Any:
        """The answer as JSON. Long lists are iterators, see `streaming.WholeAnswer`."""

    @abstractmethod
    def chunks(self) -> AsyncGenerator[str]:
        """The stream as server-sent events."""

    @property
    def failed(self) -> Failed:
        """What writes the error event of a stream; None: as the route's API has it."""
        return None

    def early(self) -> str:
        """What a stream begins with while its request waits."""
        return COMMENT

    @property
    def wire(self) -> Wire:
        """How the stream is written."""
        return EVENTS

    @property
    def is_movable(self) -> bool:
        """Whether another node can go on with the answer. What it cannot know are times and log-probabilities."""
        body, lost = self.body, self.body.timings_per_token or self.body.return_progress
        if not body.stream:
            lost = (
                lost or self.only_scores or self.choices_per_prompt > (body.n or 1) or body.prompt_logprobs is not None
            )
        if self.repeats_logprobs or not body.stream:
            lost = lost or body.logprobs not in (None, False) or bool(body.logprob_token_ids)
        return not (lost or self.server.hooks.sees_answers)

    @property
    def choices_per_prompt(self) -> int:
        return self.body.n or 1

    def ended(self) -> None:
        """The answer is whole: something may be done for the next one."""
        self.server.ended(self.requests[0], self.last)

    def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """The outputs as they come, each with its choice. Raises RequestError."""
        check_prompts(sum(len(request.prompt_ids) for request in self.requests[:: self.choices_per_prompt]))
        known = self.resumption.known if self.resumption is not None else ()
        shares = self.resumption is None and self.only_scores and not self.requests[0].params.prompt_top
        run = self.server.run(self.requests, self.choices_per_prompt, self.share, known, shares_scores=shares)
        run = run if self.receipt is None else self.receipt.noted(self.requests, known, run)
        return run if self.resumption is None else self.resumption.noted(run)

    def be(self, identity: Identity) -> None:
        """Take ids and seeds from the proxy. Call it before `prepare`. Raises RequestError."""
        if identity.fingerprint not in ("", self.server.system_fingerprint):
            raise RequestError("model_not_found", "another model began this stream")
        self.identity, self.id = identity, self.prefix + identity.key
        self.head |= {"id": self.id, "created": identity.created}
        if self.body.seed is None:
            self.body = self.body.model_copy(update={"seed": identity.seed})

    def num_top(self, asked: int | None) -> int:
        """How many tokens are shown beside each one of the answer; `asked` are the most likely ones."""
        shown = self.body.logprob_token_ids
        return len(shown) + 1 if shown else asked or 0  # the token itself is one of them

    def times(self, choice: Collected) -> dict[str, Any]:
        """The fields of a whole answer with its times, as the body and the server's options ask."""
        fields: dict[str, Any] = {"timings": timings(choice.last)} if self.body.timings_per_token else {}
        return fields | ({"metrics": metrics} if (metrics := self._metrics()) is not None else {})

    def _metrics(self) -> RequestMetrics | None:
        """vLLM's times of an answer with one choice, if the server's option asks for them.

        They are not known of an answer that another node began.
        """
        is_ours = self.resumption is None or not self.resumption.known
        if not (self.server.config.enable_per_request_metrics and len(self.requests) == 1 and self.last and is_ours):
            return None
        return request_metrics(self.last, self._queue_seconds)

    async def collect(self, prompts: list[str]) -> list[Collected]:
        """All choices at their end. `prompts` stand before the texts."""
        choices = [Collected(self.server.tokenizer, self.share, prompt) for prompt in prompts]
        async with aclosing(self.outputs()) as outputs:
            async for idx, output in outputs:
                self.note(idx, output)
                choices[idx].add(output)
        return choices

    def prompt_ids(self, idx: int) -> list[int] | None:
        """The prompt of a request, if the body asks for token ids."""
        return self.requests[idx].prompt_ids if self.body.return_token_ids else None

    def own_ids(self, choice: Collected) -> dict[str, Any]:
        """The field of a choice that vLLM has for its token ids: null unless the body asks for them."""
        return {"token_ids": iter(choice.token_ids) if self.body.return_token_ids else None}

    def about_prompt(self, idx: int, choice: Collected) -> dict[str, Any]:
        """The fields that vLLM has for a request's prompt: its ids and log-probabilities, null unless asked for."""
        ids, asked = self.prompt_ids(idx), self.body.prompt_logprobs is not None
        return {
            "prompt_token_ids": None if ids is None else iter(ids),
            "prompt_logprobs": map(self._prompt_position, choice.prompt_logprobs()) if asked else None,
        }

    def _prompt_position(self, entry: TextLogprobs) -> dict[str, Any] | None:
        """vLLM's entry for one token of a prompt: itself and the most likely ones, by id. None for the first token.

        The rank of a token that is not among the most likely ones is not known.
        """
        if entry.token.logprob is None:
            return None
        top = entry.top[: self.body.prompt_logprobs]
        ranks: list[tuple[TokenText, int | None]] = [(token, rank) for rank, token in enumerate(top, 1)]
        if entry.token.token_id not in {token.token_id for token in top}:
            ranks.insert(0, (entry.token, None))
        return {
            str(token.token_id): {"logprob": clamped(token.logprob), "rank": rank, "decoded_token": token.text}
            for token, rank in ranks
        }

    @property
    def include_usage(self) -> bool:
        options = self.body.stream_options
        return self.server.config.enable_force_include_usage or bool(options and options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the usage so far."""
        options = self.body.stream_options
        asked = bool(options and options.continuous_usage_stats)
        return self.server.config.enable_force_include_usage or (self.include_usage and asked)

    def chunk(self, chunk: ChatCompletionChunk | Completion, *, last: bool = False) -> str:
        """An event. With `include_usage` the last chunk has the usage; others have null or the usage so far."""
        if self.body.timings_per_token and self.last is not None:
            chunk.timings = timings(self.last)
        if self.include_usage:
            chunk.usage = self.count.usage() if last or self.continuous_usage else None
            if last and (metrics := self._metrics()) is not None:
                chunk.metrics = metrics
        return event(msgspec.json.encode(chunk).decode())

    def progress(self, output: RequestOutput) -> Iterator[PromptProgress]:
        """What is new of the prompt's way: first what the cache had, and last the whole prompt."""
        total, cache = output.num_prompt_tokens, output.num_cached_tokens
        now = total if output.num_computed is None else output.num_computed
        if not self.body.return_progress or self._processed == total:
            return
        if self._processed is None:
            self._processed = cache
            yield PromptProgress(total, cache, cache, 0)
        if now > self._processed:
            self._processed = now
            yield PromptProgress(total, cache, now, round(1e3 * output.prompt_seconds))

    def asked(self, token_ids: list[int] | None) -> Asked[list[int] | None]:
        """Token ids of a chunk, if the body asks for them."""
        return token_ids if self.body.return_token_ids else UNSET

    def note(self, idx: int, output: RequestOutput) -> None:
        """Count an output. Call it with each output, before the client gets it."""
        self.count.add(idx, output)
        self.last = output
        self._queue_seconds = max(self._queue_seconds, output.queue_seconds)


def clamped(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, MIN_LOGPROB)


async def respond(
    request: Request,
    body_type: type[B],
    builder_type: Callable[[Serving, B, Owner, Share], ResponseBuilder[B]],
    translate: Callable[[Any], Any] | None = None,
) -> Response:
    """Answer one HTTP request. `translate` makes its plain JSON one of `body_type`. Raises RequestError."""
    body = await read_json(request, body_type, translate)
    request.state.user = body.user or body.safety_identifier
    server = await choose(request, body.model, body.timeout)
    share = request.state.held.enter_context(server.answers.share())
    return await answer(request, builder_type(server, body, owner(request), share))


def is_forwarded(headers: Mapping[str, str]) -> bool:
    """Whether a proxy of lmkit waits for the answer. It reads the status and keeps its client's connection itself."""
    return "lmkit-" in headers.get("via", "")


async def _to_its_end(builder: ResponseBuilder[Any], chunks: AsyncGenerator[str]) -> AsyncGenerator[str]:
    async with aclosing(chunks):
        async for text in chunks:
            yield text
    builder.ended()


async def _in_one(builder: ResponseBuilder[Any]) -> AsyncGenerator[str]:
    """An answer that is no stream as one event, see `web.resume`."""
    value = await builder.whole()
    data = await asyncio.to_thread(lambda: "".join(json_parts(value)))
    builder.share.add(len(data))
    yield event(data)


def _failed_whole(error: RequestError, path: str) -> str:
    return event(error_body(error, path).decode(), str(error.status))


async def answer(request: Request, builder: ResponseBuilder[Any]) -> Response:
    """Run the builder's requests. Raises RequestError."""
    response = await _answer(request, builder)
    if builder.receipt is not None:
        response.headers[RECEIPT_HEADER] = builder.receipt.id
    return response


async def _answer(request: Request, builder: ResponseBuilder[Any]) -> Response:
    engine.check_head(builder.server.info.has_head)
    resumption: Resumption | None = getattr(request.state, "resumption", None)
    part = part_of(request)
    if resumption is not None:
        if (builder.body.stream or resumption.takes_whole) and builder.is_movable:
            builder.resumption, resumption.is_stream = resumption, bool(builder.body.stream)
        elif resumption.identity.fingerprint:
            raise RequestError("invalid_request", "this answer cannot be resumed")
        builder.be(resumption.identity)
    await while_connected(request.receive, builder.gather())
    texts = builder.server.texts
    num_chars, quick = builder.num_chars, builder.only_tokens
    await texts.run(request.receive, num_chars, builder.prepare, only_tokens=quick, guided=builder.guided)
    if part is not None and part.role == "prefill":
        prompts = builder.requests[:: builder.choices_per_prompt]
        return await prefill(request, builder.server, prompts, builder.share, part)
    if part is not None:
        builder.requests = decoding(builder.requests, part)
    builder.receipt = receipts(request).begin(request.headers, builder.id, builder.server, builder.owner)
    if builder.receipt is not None:
        builder.requests = [msgspec.structs.replace(each, tells_kv=True) for each in builder.requests]
    if not builder.body.stream and builder.resumption is None:
        whole = WholeAnswer(await while_connected(request.receive, builder.whole()))
        builder.ended()
        return whole
    failed = builder.failed
    if not builder.body.stream:
        chunks, failed = _in_one(builder), partial(_failed_whole, path=request.url.path)
    else:
        chunks = counted(builder.chunks(), builder.count.so_far, request.headers)
    if part is None:
        chunks = _to_its_end(builder, chunks)
    if builder.resumption is None:
        early = None if is_forwarded(request.headers) else builder.early
        return await EventStream.open(request.receive, chunks, failed, early, builder.wire)
    stream = await EventStream.open(request.receive, builder.resumption.events(chunks), failed)
    stream.headers[STREAM_HEADER.decode()] = builder.server.system_fingerprint
    if not builder.body.stream:
        stream.headers[WHOLE_HEADER.decode()] = "1"
    return stream
