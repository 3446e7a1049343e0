"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from lmkit.serve.body import read_json
from lmkit.serve.protocol import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, Usage
from lmkit.serve.serving import MIN_LOGPROB, Serving, UsageCount, new_id, serving
from lmkit.serve.streaming import EventStream, until_disconnect
from lmkit.serve.to_request import completion_requests
from lmkit.turbo import request as engine
from lmkit.turbo.output import RequestOutput, TextLogprobs, TokenText

router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    server = serving(request)
    body = await read_json(request, CompletionRequest, server.config.max_body_bytes)
    request.state.user = body.user
    server.check_model(body.model)
    answer = _Answer(server, body, new_id("cmpl"))
    requests = await asyncio.to_thread(completion_requests, body, server.tokenizer, server.info, answer.id)
    if body.stream:
        return await EventStream.open(request.receive, answer.chunks(requests))
    completion = await until_disconnect(request.receive, answer.whole(requests))
    return Response(completion.model_dump_json(), media_type="application/json")


class _Answer:
    """One response, whole or in chunks."""

    def __init__(self, server: Serving, body: CompletionRequest, response_id: str) -> None:
        self.id = response_id
        self._server, self._body = server, body
        self._created = int(time.time())
        self._fingerprint = server.fingerprint

    async def whole(self, requests: Sequence[engine.Request]) -> Completion:
        parts: list[list[CompletionChoice]] = [[] for _ in requests]
        count = UsageCount(requests, self._body.n or 1)
        async with aclosing(self._server.run(requests)) as outputs:
            async for idx, output in outputs:
                parts[idx].append(self._choice(idx, output, first=not parts[idx]))
                count.add(idx, output)
        return self._completion([_joined(choice_parts) for choice_parts in parts], count.usage())

    async def chunks(self, requests: Sequence[engine.Request]) -> AsyncGenerator[str]:
        started = [False] * len(requests)
        count = UsageCount(requests, self._body.n or 1)
        include_usage = bool(self._body.stream_options and self._body.stream_options.include_usage)
        hidden = None if include_usage else {"usage"}
        async with aclosing(self._server.run(requests)) as outputs:
            async for idx, output in outputs:
                choice = self._choice(idx, output, first=not started[idx])
                started[idx] = True
                count.add(idx, output)
                if choice.text or choice.logprobs or choice.finish_reason is not None:
                    yield self._completion([choice]).model_dump_json(exclude=hidden)
        if include_usage:
            yield self._completion([], count.usage()).model_dump_json()

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(
            id=self.id,
            created=self._created,
            model=self._server.model_name,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage,
        )

    def _choice(self, idx: int, output: RequestOutput, *, first: bool) -> CompletionChoice:
        """One step of a choice; the first brings the prompt along if it is to be echoed."""
        prompt = self._prompt_text(idx) if self._body.echo else ""
        logprobs = None
        if self._body.logprobs is not None:
            entries = [*output.prompt_logprobs, *output.logprobs]
            num_prompt = len(output.prompt_logprobs)
            logprobs = CompletionLogprobs(
                tokens=[_shown(entry.token) for entry in entries],
                token_logprobs=[_clamped(entry.token.logprob) for entry in entries],
                top_logprobs=[self._top(entry) for entry in entries],
                text_offset=[
                    entry.text_offset + (len(prompt) if i >= num_prompt else 0) for i, entry in enumerate(entries)
                ],
            )
        return CompletionChoice(
            index=idx,
            text=(prompt if first else "") + output.text,
            logprobs=logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )

    def _prompt_text(self, idx: int) -> str:
        prompt = self._body.prompt[idx // (self._body.n or 1)]
        skip = self._body.skip_special_tokens is not False
        return prompt if isinstance(prompt, str) else self._server.tokenizer.decode(prompt, skip)

    def _top(self, entry: TextLogprobs) -> dict[str, float] | None:
        """The most likely tokens and the chosen one; of two that look the same, the likelier."""
        if not self._body.logprobs or entry.token.logprob is None:  # nothing predicts a prompt's first token
            return None
        tokens = sorted([entry.token, *entry.top], key=lambda token: token.logprob or 0.0)
        return {_shown(token): _clamped(token.logprob) or 0.0 for token in tokens}


def _joined(parts: list[CompletionChoice]) -> CompletionChoice:
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return CompletionChoice(
        index=parts[-1].index,
        text="".join(part.text for part in parts),
        logprobs=CompletionLogprobs(
            tokens=[item for part in logprobs for item in part.tokens],
            token_logprobs=[item for part in logprobs for item in part.token_logprobs],
            top_logprobs=[item for part in logprobs for item in part.top_logprobs],
            text_offset=[item for part in logprobs for item in part.text_offset],
        )
        if logprobs
        else None,
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
    )


def _clamped(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, MIN_LOGPROB)


def _shown(token: TokenText) -> str:
    """Bytes that are not text by themselves are spelled out, so that different tokens stay different."""
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data) if "\ufffd" in token.text else token.text
