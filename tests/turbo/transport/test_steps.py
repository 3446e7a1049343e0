"""Steps of one request on their way to a reader that rests."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkit.errors import RequestError
from lmkit.turbo.request import FinishReason, StepOutput
from lmkit.turbo.transport.steps import TICK_SECONDS, Rest, Steps, end_of_rest

pytestmark = pytest.mark.anyio
LONG = 3600.0


def step(*token_ids: int, end: FinishReason | None = None, computed: int | None = None, cached: int = 0) -> StepOutput:
    return StepOutput(
        request_id="r", token_ids=list(token_ids), finish_reason=end, num_computed=computed, cached_tokens=cached
    )


def long() -> float:
    return LONG


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=12), st.data())
def test_nothing_is_lost_whenever_the_reader_comes(parts: list[list[int]], data: st.DataObject) -> None:
    async def read() -> list[StepOutput]:
        steps, found = Steps(), []
        for idx, ids in enumerate(parts):
            steps.put(step(*ids, end="length" if idx == len(parts) - 1 else None))
            if data.draw(st.booleans()):
                found += await available(steps)
        while not found or found[-1].finish_reason is None:
            found.append(await steps.get(lambda: 0.0))
        return found

    async def available(steps: Steps) -> list[StepOutput]:
        try:
            return [await asyncio.wait_for(steps.get(lambda: 0.0), 0.001)]
        except TimeoutError:
            return []

    found = asyncio.run(read())
    assert [token for one in found for token in one.token_ids] == [token for ids in parts for token in ids]
    assert sum(one.num_steps for one in found if one.token_ids) == sum(map(bool, parts))
    assert [one.finish_reason for one in found] == [None] * (len(found) - 1) + ["length"]


async def test_what_comes_in_a_rest_becomes_one_and_the_end_does_not_wait() -> None:
    steps = Steps()
    for one in (step(1, cached=5), step(2), step(3)):
        steps.put(one)
    first = await steps.get(long)
    assert (first.token_ids, first.cached_tokens, first.num_steps) == ([1, 2, 3], 5, 3)
    steps.put(step(4))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(steps.get(long), 0.05)
    steps.put(step(5, end="stop"))
    last = await asyncio.wait_for(steps.get(long), 5)
    assert (last.token_ids, last.finish_reason, last.num_steps) == ([4, 5], "stop", 2)


async def test_a_reader_without_rest_gets_each_step() -> None:
    steps = Steps()
    for one in (step(1), step(2), step(3, end="stop")):
        steps.put(one)
    assert [(await steps.get()).token_ids for _ in range(3)] == [[1], [2], [3]]


@pytest.mark.parametrize("rest", [None, long])
async def test_an_error_comes_at_once_behind_what_came_before(rest: Rest) -> None:
    steps = Steps()
    steps.put(step(1))
    assert (await steps.get(rest)).token_ids == [1]
    steps.put(step(2))
    steps.put(RequestError("engine_unavailable", "gone"))
    assert (await asyncio.wait_for(steps.get(rest), 5)).token_ids == [2]
    with pytest.raises(RequestError, match="gone"):
        await asyncio.wait_for(steps.get(rest), 5)


async def test_the_way_through_the_prompt_is_told_step_by_step() -> None:
    steps = Steps()
    for one in (step(computed=3), step(computed=6), step(1), step(2)):
        steps.put(one)
    found = [await steps.get(long) for _ in range(3)]
    assert [(one.num_computed, one.token_ids) for one in found] == [(3, []), (6, []), (None, [1, 2])]


@given(st.floats(0, 1e6), st.floats(0, 1))
def test_rests_end_at_ticks_and_are_not_longer(now: float, rest: float) -> None:
    end = end_of_rest(now, rest)
    assert now <= end <= now + rest
    if rest > 2 * TICK_SECONDS:
        assert end > now + rest - 1.001 * TICK_SECONDS
        assert abs(end / TICK_SECONDS - round(end / TICK_SECONDS)) < 1e-6
