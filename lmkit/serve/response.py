"""The common part of chat and text completions: from a body to a whole response or a stream of chunks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import Request, Response

from lmkit.serve.auth import Owner, owner
from lmkit.serve.body import read_json
from lmkit.serve.collect import Collected, check_output
from lmkit.serve.protocol import ChatCompletionChunk, ChatCompletionRequest, Completion, CompletionRequest
from lmkit.serve.serving import Serving, UsageCount, new_id, serving
from lmkit.serve.streaming import EventStream, Failed, WholeAnswer, event
from lmkit.turbo import request as engine
from lmkit.turbo.transport.output import RequestOutput
from lmkit.web.budget import Share
from lmkit.web.receive import while_connected

B = TypeVar("B", ChatCompletionRequest, CompletionRequest)


class ResponseBuilder(ABC, Generic[B]):
    """Builds one response: first `prepare`, then either `whole` or `chunks`."""

    prefix: ClassVar[str]  # of its id
    requests: list[engine.Request]
    count: UsageCount

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

    def prepare(self) -> None:
        """Make the engine's requests. This takes time, so call it in `Serving.texts`. Raises RequestError."""
        self.requests = self.make_requests()
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

    @abstractmethod
    async def whole(self) -> dict[str, Any]:
        """The answer as JSON. Long lists are iterators, see `streaming.WholeAnswer`."""

    @abstractmethod
    def chunks(self) -> AsyncGenerator[str]:
        """The stream as server-sent events."""

    @property
    def failed(self) -> Failed:
        """What writes the error event of a stream; None: as the route's API has it."""
        return None

    @property
    def choices_per_prompt(self) -> int:
        return self.body.n or 1

    def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        return self.server.run(self.requests, self.choices_per_prompt, self.share)

    async def collect(self, prompts: list[str]) -> list[Collected]:
        """All choices at their end. `prompts` stand before the texts."""
        choices = [Collected(self.server.tokenizer, self.share, prompt) for prompt in prompts]
        async with aclosing(self.outputs()) as outputs:
            async for idx, output in outputs:
                self.note(idx, output)
                choices[idx].add(output)
        return choices

    @property
    def include_usage(self) -> bool:
        return bool(self.body.stream_options and self.body.stream_options.include_usage)

    def chunk(self, chunk: ChatCompletionChunk | Completion, *, last: bool = False) -> str:
        """An event. With `include_usage` the last chunk has the usage; others have null or the usage so far."""
        if not self.include_usage:
            return event(chunk.model_dump_json(exclude={"usage"}))
        assert self.body.stream_options is not None
        if last or self.body.stream_options.continuous_usage_stats:
            chunk.usage = self.count.usage()
        return event(chunk.model_dump_json())

    def note(self, idx: int, output: RequestOutput) -> None:
        """Count an output. Call it with each output, before the client gets it."""
        self.count.add(idx, output)


async def respond(request: Request, body_type: type[B], builder_type: type[ResponseBuilder[B]]) -> Response:
    """Answer one HTTP request. Raises RequestError."""
    server, held = serving(request), request.state.held
    body = await read_json(request, body_type)
    request.state.user = body.user
    server.check_model(body.model)
    builder = builder_type(server, body, owner(request), held.enter_context(server.answers.share()))
    return await answer(request, builder)


async def answer(request: Request, builder: ResponseBuilder[Any]) -> Response:
    """Run the builder's requests. Raises RequestError."""
    await builder.server.texts.run(request.receive, builder.num_chars, builder.prepare)
    if builder.body.stream:
        return await EventStream.open(request.receive, builder.chunks(), builder.failed)
    return WholeAnswer(await while_connected(request.receive, builder.whole()))
