"""POST /v1/completions."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from lmkit.serve.protocol import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from lmkit.serve.response import ResponseBuilder, respond
from lmkit.serve.serving import MIN_LOGPROB
from lmkit.serve.to_request import choices_per_prompt, completion_requests
from lmkit.turbo import request as engine
from lmkit.turbo.transport.output import RequestOutput, TextLogprobs, TokenText

router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    return await respond(request, CompletionRequest, _CompletionResponse)


class _CompletionResponse(ResponseBuilder[CompletionRequest]):
    prefix = "cmpl"

    @property
    def choices_per_prompt(self) -> int:
        return choices_per_prompt(self.body)

    def make_requests(self) -> list[engine.Request]:
        return completion_requests(self.body, self.server.tokenizer, self.server.info, self.id, tenant=self.tenant)

    async def whole(self) -> Completion:
        parts: list[list[CompletionChoice]] = [[] for _ in self.requests]
        logprobs: list[list[float]] = [[] for _ in self.requests]
        async with aclosing(self.server.run(self.requests, self.choices_per_prompt)) as outputs:
            async for idx, output in outputs:
                self.note(idx, output)
                parts[idx].append(self._choice(idx, output, first=not parts[idx]))
                logprobs[idx] += (entry.token.logprob or 0.0 for entry in output.logprobs)
        choices = [_joined(choice_parts) for choice_parts in parts]
        if self.choices_per_prompt > (self.body.n or 1):
            choices = self._best(choices, [math.fsum(row) / max(len(row), 1) for row in logprobs])
        return Completion(**self.head, choices=choices, usage=self.count.usage())

    async def chunks(self) -> AsyncGenerator[str]:
        started = [False] * len(self.requests)
        async with aclosing(self.server.run(self.requests, self.choices_per_prompt)) as outputs:
            async for idx, output in outputs:
                self.note(idx, output)
                choice = self._choice(idx, output, first=not started[idx])
                started[idx] = True
                if choice.text or choice.logprobs or choice.finish_reason is not None:
                    yield self.chunk(Completion(**self.head, choices=[choice]))
        if self.include_usage:
            yield self.chunk(Completion(**self.head, choices=[]), last=True)

    def _best(self, choices: list[CompletionChoice], mean_logprobs: list[float]) -> list[CompletionChoice]:
        """Each prompt's `n` choices with the highest mean log-probability of their tokens, best first."""
        best: list[CompletionChoice] = []
        for start in range(0, len(choices), self.choices_per_prompt):
            mine = range(start, start + self.choices_per_prompt)
            best += (choices[i] for i in sorted(mine, key=lambda i: -mean_logprobs[i])[: self.body.n or 1])
        return [choice.model_copy(update={"index": index}) for index, choice in enumerate(best)]

    def _choice(self, idx: int, output: RequestOutput, *, first: bool) -> CompletionChoice:
        """One step of a choice. The first step includes the prompt if the request asks for `echo`."""
        prompt = self._prompt_text(idx) if self.body.echo else ""
        logprobs = None
        if self.body.logprobs is not None:
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
        prompt = self.body.prompt[idx // self.choices_per_prompt]
        skip = self.body.skip_special_tokens is not False
        return prompt if isinstance(prompt, str) else self.server.tokenizer.decode(prompt, skip)

    def _top(self, entry: TextLogprobs) -> dict[str, float] | None:
        """The most likely tokens and the chosen one. If two tokens have the same text, the likelier one is kept."""
        if entry.token.logprob is None:  # nothing predicts a prompt's first token
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
    """The token's text.

    Bytes that are not text by themselves are spelled out, so that different tokens stay different.
    """
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data) if "\ufffd" in token.text else token.text
