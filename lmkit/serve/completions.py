"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response

from lmkit.errors import RequestError
from lmkit.serve.collect import Collected
from lmkit.serve.constraint import is_constrained
from lmkit.serve.fill_in import filled_in
from lmkit.serve.parts import Completion, CompletionChoice, CompletionLogprobs
from lmkit.serve.protocol import CompletionRequest
from lmkit.serve.response import ResponseBuilder, clamped, respond
from lmkit.serve.streaming import DONE
from lmkit.serve.to_request import LIMITS, NO_LIMIT, choices_per_prompt, completion_requests
from lmkit.turbo import request as engine
from lmkit.turbo.transport.output import RequestOutput, TextLogprobs, TokenText

router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    return await respond(request, CompletionRequest, CompletionResponse)


class CompletionResponse(ResponseBuilder[CompletionRequest]):
    prefix = "cmpl-"
    must_fit: ClassVar[bool] = True  # False: an answer whose limit goes beyond the context ends where that does

    @property
    def choices_per_prompt(self) -> int:
        return choices_per_prompt(self.body)

    @property
    def only_tokens(self) -> bool:
        return (
            len(self.body.prompt) == 1 and not (self.body.endings or self.body.suffix) and not is_constrained(self.body)
        )

    @property
    def only_scores(self) -> bool:
        return bool(self.body.endings)

    @property
    def num_chars(self) -> int:
        return sum(map(len, (*self.body.prompt, self.body.prompt_start_ids or (), self.body.suffix or "")))

    def make_requests(self) -> list[engine.Request]:
        body, tokenizer, info = self.body, self.server.tokenizer, self.server.info
        body = filled_in(body, body.suffix, tokenizer, info) if body.suffix else body
        try:
            return completion_requests(body, tokenizer, info, self.id, owner=self.owner)
        except RequestError as error:
            if self.must_fit or error.code != "context_length_exceeded":
                raise
            body = body.model_copy(update=dict.fromkeys(LIMITS) | {"max_tokens": NO_LIMIT})
            return completion_requests(body, tokenizer, info, self.id, owner=self.owner)

    async def whole(self) -> Any:
        chosen = await self.chosen()
        choices = map(self._whole_choice, range(len(chosen)), chosen)
        answer = {**self.head, "object": "text_completion", "choices": choices, "usage": self.count.usage()}
        return answer | self.times(chosen[0])

    async def chosen(self) -> list[Collected]:
        """The choices at their end: each prompt's `n`."""
        prompts = [self._prompt_text(idx) if self.body.echo else "" for idx in range(len(self.requests))]
        choices = await self.collect(prompts)
        return self._best(choices) if self.choices_per_prompt > (self.body.n or 1) else choices

    def _whole_choice(self, index: int, choice: Collected) -> dict[str, Any]:
        shown = choice.logprobs if self.body.echo else choice.answer_logprobs
        logprobs = {
            "tokens": (self._shown(entry.token) for entry in shown()),
            "token_logprobs": (clamped(entry.token.logprob) for entry in shown()),
            "top_logprobs": (self._top(entry) for entry in shown()),
            "text_offset": (entry.text_offset for entry in shown()),
        }
        about = self.own_ids(choice) | self.about_prompt(index // (self.body.n or 1) * self.choices_per_prompt, choice)
        return {
            "index": index,
            "text": choice.text,
            "logprobs": None if self.body.logprobs is None else logprobs,
            "finish_reason": choice.last.finish_reason,
            "stop_reason": choice.last.end,
        } | about

    async def chunks(self) -> AsyncGenerator[str]:
        started = [False] * len(self.requests)
        async with aclosing(self.outputs()) as outputs:
            async for idx, output in outputs:
                self.note(idx, output)
                for report in self.progress(output):
                    yield self.chunk(Completion(**self.head, choices=[], prompt_progress=report))
                if output.num_computed is not None:
                    continue
                choice = self._choice(idx, output, first=not started[idx])
                started[idx] = True
                if choice.text or choice.logprobs or choice.token_ids or choice.finish_reason is not None:
                    yield self.chunk(Completion(**self.head, choices=[choice]))
        if self.include_usage:
            yield self.chunk(Completion(**self.head, choices=[]), last=True)
        yield DONE

    def _best(self, choices: list[Collected]) -> list[Collected]:
        """Each prompt's `n` choices with the highest mean log-probability of their tokens, best first."""
        best: list[Collected] = []
        for start in range(0, len(choices), self.choices_per_prompt):
            mine = choices[start : start + self.choices_per_prompt]
            best += sorted(mine, key=lambda choice: -choice.mean_logprob)[: self.body.n or 1]
        return best

    def _choice(self, idx: int, output: RequestOutput, *, first: bool) -> CompletionChoice:
        """One step of a choice. The first step includes the prompt if the request asks for `echo`."""
        prompt = self._prompt_text(idx) if self.body.echo else ""
        logprobs = None
        if self.body.logprobs is not None:
            entries = [*output.prompt_logprobs, *output.logprobs]
            num_prompt = len(output.prompt_logprobs)
            logprobs = CompletionLogprobs(
                tokens=[self._shown(entry.token) for entry in entries],
                token_logprobs=[clamped(entry.token.logprob) for entry in entries],
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
            stop_reason=output.end,
            token_ids=self.asked(output.token_ids),
            prompt_token_ids=self.asked(self.prompt_ids(idx) if first else None),
        )

    def _prompt_text(self, idx: int) -> str:
        is_cut = self.body.truncate_prompt_tokens is not None
        prompt = self.requests[idx].prompt_ids if is_cut else self.body.prompt[idx // self.choices_per_prompt]
        skip = self.body.skip_special_tokens is not False
        return prompt if isinstance(prompt, str) else self.server.tokenizer.decode(prompt, skip)

    def _top(self, entry: TextLogprobs) -> dict[str, float] | None:
        """The most likely tokens and the chosen one. If two tokens have the same text, the likelier one is kept."""
        if entry.token.logprob is None:  # nothing predicts a prompt's first token
            return None
        top = entry.top[: self.num_top(self.body.logprobs)]
        tokens = sorted([entry.token, *top], key=lambda token: token.logprob or 0.0)
        return {self._shown(token): clamped(token.logprob) or 0.0 for token in tokens}

    def _shown(self, token: TokenText) -> str:
        """The token's text, or its id if the body asks for that.

        Bytes that are not text by themselves are spelled out, so that different tokens stay different.
        """
        if self.body.return_tokens_as_token_ids:
            return token.as_id
        if "\ufffd" in token.text:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)
        return token.text
