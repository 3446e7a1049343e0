"""What a decode step costs the host, counted in calls: times depend on the machine."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from benchmarks.host_cost import decoding

STEPS = 8
MOST = 30  # calls of Python and C functions for each sequence of a step


def calls(batch_size: int) -> float:
    """Calls in a decode step of so many sequences, on average."""
    count = 0

    def note(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with decoding(batch_size) as engine:
        sys.setprofile(note)
        try:
            outputs = [engine.step() for _ in range(STEPS)]
        finally:
            sys.setprofile(None)
    assert [len(given) for given in outputs] == [batch_size] * STEPS
    return count / STEPS


def test_a_decode_step_makes_few_calls_for_each_sequence() -> None:
    few, many = calls(8), calls(40)
    assert (many - few) / 32 < MOST
