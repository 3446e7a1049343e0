"""Which layers stay in memory and which are read: as many stay as the memory holds, and the sums are right."""

from __future__ import annotations

import pytest

from lmkit.errors import ConfigError
from lmkit.models.stream_plan import SLOTS, StreamPlan, plan_stream


@pytest.mark.parametrize("sizes", [[10] * 12, [10] * 7, [30, 10, 10, 10, 10, 10, 10, 20], [5, 50] * 5])
def test_every_budget_is_kept_and_used(sizes: list[int]) -> None:
    fixed, least = 7, StreamPlan(tuple(sizes), 7, tuple(range(len(sizes)))).memory
    read = None
    for budget in range(least, fixed + sum(sizes) + 1):
        plan = plan_stream(sizes, fixed, budget)
        assert plan.memory <= budget
        assert plan.memory > budget - 2 * max(sizes) or not plan.streamed or len(plan.streamed) == SLOTS + 1
        assert read is None or plan.step_bytes <= read
        read = plan.step_bytes
    assert read == 0
    with pytest.raises(ConfigError, match=r"weights_memory .* is too little .* set \d+M or more"):
        plan_stream(sizes, fixed, least - 1)


def test_what_a_step_reads() -> None:
    """Five layers take turns in two slots, and each is read once. Of three the middle one stays where it is."""
    assert plan_stream([10] * 8, 1, 51) == StreamPlan((10,) * 8, 1, (1, 3, 4, 6, 7))
    assert plan_stream([10] * 8, 1, 51).step_bytes == 50
    assert plan_stream([10] * 8, 1, 71).step_bytes == 20


def test_two_layers_cannot_take_turns() -> None:
    assert plan_stream([10, 10], 1, 21).streamed == ()
    with pytest.raises(ConfigError, match="set 1M or more"):
        plan_stream([10, 10], 1, 20)


def test_what_to_expect() -> None:
    plan = plan_stream([100 << 20] * 10, 50 << 20, 600 << 20)
    assert plan.expected(1e9, 8)["tokens_per_second"] == round(1e9 / plan.step_bytes, 4)
    lines = plan.lines(1e9, 64)
    assert lines[0] == "weights: 7 of 10 layers from the disk"
    assert lines[1] == "disk: 0.73 GB a step at 1.00 GB/s, 0.73 s"
    assert max(map(len, plan.lines(12.34e9, 4096))) <= 55
