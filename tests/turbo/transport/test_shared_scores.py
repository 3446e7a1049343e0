"""Requests that score texts after one prompt share sequences, and get the scores that they would get alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from lmkit.errors import RequestError
from lmkit.turbo.request import FinishReason, Request, SamplingParams, StepOutput, TokenLogprobs
from lmkit.turbo.transport.shared_scores import MAX_SHOWN, SharedScores

PROMPT = [3, 1, 4, 1, 5]


def logprob(before: list[int], token: int) -> float:
    return -random.Random(repr((before, token))).random()


def of_endings(endings: list[list[int]], *, same: int = len(PROMPT)) -> list[Request]:
    """Requests as the server makes them. The first `same` tokens of the prompt are kept."""
    params = SamplingParams(max_tokens=0, seed=1)
    fields: dict[str, Any] = {"params": params, "prompt_logprobs": True, "logprobs_start": same - 1}
    return [Request(request_id=f"r{i}", prompt_ids=PROMPT[:same] + end, **fields) for i, end in enumerate(endings)]


class Engine:
    """An engine whose scores depend on all tokens before."""

    def __init__(
        self, *, reason: FinishReason = "length", error: RequestError | None = None, waits: bool = False
    ) -> None:
        self.requests: list[Request] = []
        self.aborted = 0
        self._reason, self._error, self._waits = reason, error, waits

    async def steps(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        self.requests.append(request)
        try:
            await (asyncio.Event().wait() if self._waits else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        if self._error is not None:
            raise self._error
        ids, shown = request.prompt_ids, request.params.logprob_token_ids
        assert request.params.max_tokens == 0
        assert 0 < len(shown) <= MAX_SHOWN
        scores = [
            TokenLogprobs(0, -9.0, [(token, logprob(ids[: place + 1], token)) for token in shown])
            for place in range(request.logprobs_start, len(ids))
        ]
        yield StepOutput(
            request_id=request.request_id,
            token_ids=[],
            finish_reason=self._reason,
            prompt_logprobs=scores[:-1],
            logprobs=scores[-1:],
            cached_tokens=len(ids) - 1,
        )


async def scored(engine: Engine, requests: list[Request]) -> list[StepOutput]:
    shared = SharedScores(requests, engine.steps)

    async def one(request: Request) -> StepOutput:
        async with aclosing(shared.steps(request)) as steps:
            (step,) = [step async for step in steps]
            return step

    return list(await asyncio.gather(*map(one, requests)))


@pytest.mark.parametrize(
    ("endings", "sequences"),
    [
        ([[9], [8], [7], [9]], [[]]),  # the prompt alone
        ([[9]], [[]]),
        ([[9, 2, 6], [9, 2, 7], [9, 5], [8]], [[9, 2]]),  # all lie on the way to the longest
        ([[9, 2, 6], [8, 2, 6], [8, 3]], [[9, 2], [8, 2]]),
        ([[9, 2], []], [[9]]),  # nothing is asked about the second
    ],
)
def test_texts_that_begin_alike_are_one_sequence(endings: list[list[int]], sequences: list[list[int]]) -> None:
    engine = Engine()
    requests = of_endings(endings)
    steps = asyncio.run(scored(engine, requests))
    assert [request.prompt_ids for request in engine.requests] == [PROMPT + ids for ids in sequences]
    for request, step in zip(requests, steps, strict=True):
        ids, first = request.prompt_ids, len(PROMPT)
        want = [TokenLogprobs(ids[i], logprob(ids[:i], ids[i]), []) for i in range(first, len(ids))]
        assert step.prompt_logprobs == want
        assert (step.request_id, step.logprobs, step.finish_reason) == (request.request_id, [], "length")
        assert step.cached_tokens < len(ids)


def test_any_texts_have_their_own_scores() -> None:
    rng = random.Random(0)
    for _ in range(50):
        endings = [[rng.randrange(3) for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(1, 12))]
        requests = of_endings(endings, same=rng.randint(1, len(PROMPT)))
        engine = Engine()
        for request, step in zip(requests, asyncio.run(scored(engine, requests)), strict=True):
            ids, first = request.prompt_ids, request.logprobs_start + 1
            want = [TokenLogprobs(ids[i], logprob(ids[:i], ids[i]), []) for i in range(first, len(ids))]
            assert step.prompt_logprobs == want
        assert len(engine.requests) <= len({tuple(ids[:-1]) for ids in endings})


def test_a_sequence_shows_a_limited_number_of_tokens() -> None:
    engine = Engine()
    asyncio.run(scored(engine, of_endings([[token] for token in range(MAX_SHOWN + 1)])))
    assert len(engine.requests) == 2


def test_an_error_reaches_all_readers() -> None:
    requests = of_endings([[9], [8]])
    steps = asyncio.run(scored(Engine(reason="error"), requests))
    assert [(step.request_id, step.finish_reason) for step in steps] == [("r0", "error"), ("r1", "error")]
    shared = SharedScores(requests, Engine(error=RequestError("queue_full", "full")).steps)

    async def both() -> list[StepOutput | BaseException]:
        running = (anext(shared.steps(request)) for request in requests)
        return list(await asyncio.gather(*running, return_exceptions=True))

    for error in asyncio.run(both()):
        assert isinstance(error, RequestError)
        assert error.code == "queue_full"


def test_a_sequence_ends_when_all_its_readers_have_left() -> None:
    engine = Engine(waits=True)
    requests = of_endings([[9], [8]])

    async def leave() -> list[int]:
        shared = SharedScores(requests, engine.steps)
        readers = [asyncio.ensure_future(anext(shared.steps(request))) for request in requests]
        aborted = []
        for reader in readers:
            await asyncio.sleep(0.01)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            aborted.append(engine.aborted)
        return aborted

    assert asyncio.run(leave()) == [0, 1]
