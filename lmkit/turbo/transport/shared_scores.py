"""Requests that only score texts after one prompt, sent to the engine as few.

A token's score comes from the position before it. So a text's last token need not be computed, and texts that begin
alike need one sequence: it shows the scores of all tokens that may follow at its positions. Four answers of one token
are the prompt alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from msgspec.structs import replace

from lmkit.turbo.request import Request, StepOutput, TokenLogprobs

MAX_SHOWN = 128  # tokens whose scores a sequence shows at each position

Steps = Callable[[Request], AsyncGenerator[StepOutput, None]]


@dataclass(eq=False)
class _Path:
    """A sequence, and what the requests that read from it want."""

    like: Request
    ids: list[int]
    start: int  # position after which scores begin
    shown: frozenset[int]  # tokens whose scores are wanted
    task: asyncio.Task[StepOutput] | None = None
    num_readers: int = 0

    @property
    def request(self) -> Request:
        shown = tuple(sorted(self.shown))
        params = replace(self.like.params, temperature=0.0, grammar="", logprobs=0, logprob_token_ids=shown)
        return replace(self.like, prompt_ids=self.ids, logprobs_start=self.start, params=params)

    def read(self, request: Request, step: StepOutput) -> StepOutput:
        """The step of one request, from that of the sequence."""
        if step.finish_reason != "length":
            return replace(step, request_id=request.request_id)
        scores = [*step.prompt_logprobs, *step.logprobs]
        own = [
            TokenLogprobs(token, dict(scores[place].top)[token], [])
            for place, token in enumerate(_scored(request), request.logprobs_start - self.start)
        ]
        cached = min(step.cached_tokens, len(request.prompt_ids) - 1)
        return replace(step, request_id=request.request_id, prompt_logprobs=own, logprobs=[], cached_tokens=cached)


class SharedScores:
    """Gives the steps of requests that ask for the log-probabilities of their last tokens alone: `prompt_logprobs`,
    `prompt_top=0` and `max_tokens=0`.

    They may differ in `prompt_ids`, `logprobs_start` and the seed.
    """

    def __init__(self, requests: Sequence[Request], steps: Steps) -> None:
        """`steps` runs one request."""
        self._steps = steps
        self._paths: dict[str, _Path] = {}  # by the id of a request that reads from it
        paths: list[_Path] = []
        for request in sorted(requests, key=lambda request: -len(request.prompt_ids)):
            before, shown = _computed(request), frozenset(_scored(request))
            for path in paths:
                if path.ids[: len(before)] == before and len(path.shown | shown) <= MAX_SHOWN:
                    break
            else:
                path = _Path(request, before, request.logprobs_start, shown)
                paths.append(path)
            path.start, path.shown = min(path.start, request.logprobs_start), path.shown | shown
            self._paths[request.request_id] = path

    async def steps(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        """The one step of a request. Its sequence is aborted if all of its readers leave early."""
        path = self._paths[request.request_id]
        if path.task is None:
            path.task = asyncio.create_task(self._run(path.request))
        path.num_readers += 1
        try:
            yield path.read(request, await asyncio.shield(path.task))
        finally:
            path.num_readers -= 1
            if not path.num_readers:
                path.task.cancel()
                await asyncio.gather(path.task, return_exceptions=True)

    async def _run(self, request: Request) -> StepOutput:
        async with aclosing(self._steps(request)) as steps:
            return [step async for step in steps][-1]


def _scored(request: Request) -> list[int]:
    return request.prompt_ids[request.logprobs_start + 1 :]


def _computed(request: Request) -> list[int]:
    """The tokens that give the scores: all but the last, unless that is where scores begin."""
    return request.prompt_ids[: max(len(request.prompt_ids) - 1, request.logprobs_start + 1)]
