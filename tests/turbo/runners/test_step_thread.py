"""The thread of a CPU's steps: order, results, errors, and its end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from lmkit.turbo.runners.step_thread import StepThread


def test_calls_run_in_order_in_one_thread() -> None:
    began: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        began.append(threading.current_thread().name)
        yield
        began.append("ended")

    thread = StepThread("steps", around)
    seen: list[tuple[int, str]] = []

    def step(number: int) -> int:
        seen.append((number, threading.current_thread().name))
        return number * number

    tickets = [thread.submit(step, number) for number in range(5)]
    assert [ticket() for ticket in tickets] == [0, 1, 4, 9, 16]
    assert seen == [(number, "steps") for number in range(5)]
    assert began == ["steps"]
    thread.close()
    thread.close()
    assert began == ["steps", "ended"]


def test_a_ticket_raises_what_its_call_raised_and_the_thread_goes_on() -> None:
    thread = StepThread("steps", nullcontext)
    failed, fine = thread.submit(int, "x"), thread.submit(int, "7")
    with pytest.raises(ValueError, match="invalid literal"):
        failed()
    assert fine() == 7
    thread.close()


def test_a_thread_that_nobody_closes_ends() -> None:
    thread = StepThread("steps", nullcontext)
    assert thread.submit(int, "7")() == 7
    inner, gone = thread._thread, weakref.ref(thread)
    del thread
    gc.collect()
    inner.join(60)
    assert gone() is None
    assert not inner.is_alive()
