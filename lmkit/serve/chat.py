"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from lmkit.serve.body import read_json
from lmkit.serve.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprob,
    ChatLogprobs,
    TopLogprob,
    Usage,
)
from lmkit.serve.serving import MIN_LOGPROB, Serving, UsageCount, new_id, serving
from lmkit.serve.streaming import EventStream, until_disconnect
from lmkit.serve.to_request import chat_requests
from lmkit.turbo import request as engine
from lmkit.turbo.output import TextLogprobs, TokenText

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    server = serving(request)
    body = await read_json(request, ChatCompletionRequest, server.config.max_body_bytes)
    request.state.user = body.user
    server.check_model(body.model)
    answer = _Answer(server, body, new_id("chatcmpl"))
    requests = await asyncio.to_thread(chat_requests, body, server.tokenizer, server.info, answer.id)
    if body.stream:
        return await EventStream.open(request.receive, answer.chunks(requests))
    completion = await until_disconnect(request.receive, answer.whole(requests))
    return Response(completion.model_dump_json(), media_type="application/json")


class _Answer:
    """One response, whole or in chunks."""

    def __init__(self, server: Serving, body: ChatCompletionRequest, response_id: str) -> None:
        self.id = response_id
        self._server, self._body = server, body
        self._created = int(time.time())
        self._fingerprint = server.fingerprint

    async def whole(self, requests: Sequence[engine.Request]) -> ChatCompletion:
        texts: list[list[str]] = [[] for _ in requests]
        logprobs: list[list[ChatLogprob]] = [[] for _ in requests]
        choices: list[ChatChoice] = []
        count = UsageCount(requests, len(requests))
        async with aclosing(self._server.run(requests)) as outputs:
            async for idx, output in outputs:
                texts[idx].append(output.text)
                logprobs[idx] += map(_logprob, output.logprobs)
                count.add(idx, output)
                if output.finish_reason is not None:
                    choices.append(
                        ChatChoice(
                            index=idx,
                            message=AssistantMessage(content="".join(texts[idx])),
                            logprobs=ChatLogprobs(content=logprobs[idx]) if self._body.logprobs else None,
                            finish_reason=output.finish_reason,
                            stop_reason=output.stop_reason,
                        )
                    )
        return ChatCompletion(
            id=self.id,
            created=self._created,
            model=self._server.model_name,
            system_fingerprint=self._fingerprint,
            choices=sorted(choices, key=lambda choice: choice.index),
            usage=count.usage(),
        )

    async def chunks(self, requests: Sequence[engine.Request]) -> AsyncGenerator[str]:
        """Each choice: a chunk with the role, chunks with text, one with the finish_reason."""
        started = [False] * len(requests)
        count = UsageCount(requests, len(requests))
        async with aclosing(self._server.run(requests)) as outputs:
            async for idx, output in outputs:
                count.add(idx, output)
                if not started[idx]:
                    started[idx] = True
                    yield self._chunk([ChatChunkChoice(index=idx, delta={"role": "assistant", "content": ""})])
                logprobs = ChatLogprobs(content=list(map(_logprob, output.logprobs))) if output.logprobs else None
                if output.text or logprobs:
                    yield self._chunk([ChatChunkChoice(index=idx, delta={"content": output.text}, logprobs=logprobs)])
                if output.finish_reason is not None:
                    end = ChatChunkChoice(
                        index=idx, delta={}, finish_reason=output.finish_reason, stop_reason=output.stop_reason
                    )
                    yield self._chunk([end])
        if self._include_usage:
            yield self._chunk([], count.usage())

    @property
    def _include_usage(self) -> bool:
        return bool(self._body.stream_options and self._body.stream_options.include_usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> str:
        chunk = ChatCompletionChunk(
            id=self.id,
            created=self._created,
            model=self._server.model_name,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage,
        )
        return chunk.model_dump_json(exclude=None if self._include_usage else {"usage"})


def _logprob(entry: TextLogprobs) -> ChatLogprob:
    return ChatLogprob(**_token(entry.token).model_dump(), top_logprobs=[_token(top) for top in entry.top])


def _token(token: TokenText) -> TopLogprob:
    assert token.logprob is not None
    return TopLogprob(token=token.text, logprob=max(token.logprob, MIN_LOGPROB), bytes=list(token.data))
