"""Which layers stay in memory and which are read: as many stay as the memory holds, and the sums are right."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from lmkit.errors import ConfigError
from lmkit.models.stream_plan import Forecast, Parts, StreamPlan, plan_stream

LINEARS = (3, 2, 10, 5)  # of a layer in parts


@pytest.mark.parametrize(
    "layers",
    [
        [(10,)] * 12,
        [(10,)] * 7,
        [(30,), (10,), (10,), (10,), (10,), (20,)],
        [(5,), (50,)] * 5,
        [LINEARS] * 9,
        [LINEARS, (40,)] * 4,
    ],
)
def test_every_budget_is_kept_and_used(layers: list[Parts]) -> None:
    fixed, whole = 7, sum(map(sum, layers))
    plan, largest = StreamPlan(tuple(layers), fixed), max(map(sum, layers))
    least = replace(plan, streamed=tuple(range(len(layers)))).memory
    read = None
    for budget in range(least, fixed + whole + 1):
        plan = plan_stream(layers, fixed, budget)
        assert plan.memory <= budget
        assert plan.memory > budget - 3 * largest or not plan.streamed
        assert all(turn.end <= plan.room for turn in plan.turns)
        assert read is None or plan.step_bytes <= read
        read = plan.step_bytes
    assert read == 0
    with pytest.raises(ConfigError, match=r"weights_memory .* is too little .* set \d+M or more"):
        plan_stream(layers, fixed, least - 1)


def test_layers_of_one_part_take_turns_in_room_for_two() -> None:
    plan = plan_stream([(10,)] * 8, 1, 51)
    assert (plan.streamed, plan.step_bytes) == ((1, 3, 4, 6, 7), 50)
    assert [(turn.start, turn.end) for turn in plan.turns] == [(0, 10), (10, 20), (0, 10), (10, 20), (0, 10)]
    assert plan.behind == [1, 3, 2, 2, 2]  # the first one comes after the last one of the step before
    three = plan_stream([(10,)] * 8, 1, 71)
    assert (three.behind, three.step_bytes) == ([1, 0, 2], 20)  # the middle one of three stays where it is


@pytest.mark.parametrize("layers", [[(9,), (9,), (10,)] * 3, [(3,), (10,), (10,), (10,)], [(30,), (10,)] * 3])
def test_a_layer_of_one_part_is_read_while_the_one_before_it_is_computed(layers: list[Parts]) -> None:
    turns = StreamPlan(tuple(layers), 1, tuple(range(len(layers)))).turns
    assert not any(turn.overlaps(after) for turn, after in pairwise(turns))


def test_layers_of_many_parts_take_turns_in_room_for_one() -> None:
    plan = plan_stream([LINEARS] * 4, 1, 61)
    assert (plan.streamed, plan.room, plan.step_bytes) == ((1, 3), 20, 40)
    assert [turn.start for turn in plan.turns] == [0, 3, 5, 15] * 2
    assert plan.behind == [4] * 8


def test_one_layer_in_a_room_of_its_own_saves_nothing() -> None:
    assert plan_stream([LINEARS] * 2, 1, 41).streamed == ()
    assert plan_stream([LINEARS] * 2, 1, 40).streamed == (0, 1)
    with pytest.raises(ConfigError, match="set 1M or more"):
        plan_stream([(10,), (10,)], 1, 20)


def test_what_to_expect() -> None:
    plan = plan_stream([(100 << 20,)] * 10, 50 << 20, 600 << 20)
    forecast = Forecast(plan, 1e9, 0.01)
    assert forecast.expected(8)["tokens_per_second"] == round(1e9 / plan.step_bytes, 4)
    lines = forecast.lines(64)
    assert lines[0] == "weights: 7 of 10 layers from the disk"
    assert lines[1] == "disk: 0.73 GB a step at 1.00 GB/s, 0.73 s"
    assert lines[2] == "computing: 100 tokens/s, 74 while the disk reads"
    assert lines[3] == "at most 1.36 tokens/s, 87.2 for 64 sequences"
    assert forecast.rate(73) < forecast.rate(74) == forecast.rate(75) == pytest.approx(100)
    assert max(map(len, replace(forecast, bandwidth=12.34e9, token_seconds=123.4).lines(4096))) <= 55
    assert max(map(len, replace(forecast, token_seconds=1.234e-3).lines(4096))) <= 55
    assert replace(forecast, plan=plan_stream(plan.layers, plan.fixed, 1 << 40)).hiding == 0
