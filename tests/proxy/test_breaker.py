"""The breaker of a node under a virtual clock."""

from __future__ import annotations

from random import Random

import pytest

from lmkit.proxy.breaker import CALM, JITTER, MAX_REST, WINDOW, Breaker

SECONDS = 10.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(3, SECONDS, clock, Random(0))


def rest(breaker: Breaker, clock: Clock) -> float:
    """How long an open breaker rests, in rests of the first length, to a hundredth."""
    start = clock.now
    while breaker.state == "open":
        clock.now += SECONDS / 100
    return (clock.now - start) / SECONDS


def test_a_node_that_is_there_again_begins_anew(breaker: Breaker, clock: Clock) -> None:
    """Its streams broke one after the other when it was killed. The new process has broken none."""
    for _ in range(3):
        for _ in range(3):
            breaker.record(good=False)
        assert not breaker.admits
        breaker.reset()
        assert (breaker.admits, breaker.state, breaker.failed_share) == (True, "closed", 0.0)
    for _ in range(3):
        breaker.record(good=False)
    assert 1 <= rest(breaker, clock) <= 1 + JITTER + 0.01  # the first rest again


def test_rests_grow_while_the_node_stays_bad(breaker: Breaker, clock: Clock) -> None:
    assert [breaker.record(good=False) for _ in range(3)] == [False, False, True]
    for times in (1, 2, 4, 8, 16, MAX_REST):
        assert times - 0.01 <= rest(breaker, clock) <= times * (1 + JITTER) + 0.02
        assert breaker.record(good=False)  # the trial
    assert breaker.opened == 7


def test_a_node_that_is_good_for_long_rests_shortly_again(breaker: Breaker, clock: Clock) -> None:
    for good, calm, longest in ((WINDOW - 1, 999, 2), (WINDOW, CALM, 8), (WINDOW, CALM * 25, 1)):
        while not breaker.record(good=False):
            pass
        rest(breaker, clock)
        breaker.record(good=True)
        clock.now += calm * SECONDS
        for _ in range(good - 1):
            breaker.record(good=True)
        while not breaker.record(good=False):
            pass
        assert longest - 0.01 <= rest(breaker, clock) <= longest * (1 + JITTER) + 0.02
        for _ in range(WINDOW):
            breaker.record(good=True)


def test_a_node_that_fails_every_other_request_rests(breaker: Breaker) -> None:
    opened = [breaker.record(good=bool(i % 2)) for i in range(WINDOW)]
    assert sum(opened) == 1
    assert not any(opened[: WINDOW - 2])


def test_a_node_that_fails_now_and_then_does_not(breaker: Breaker) -> None:
    assert not any(breaker.record(good=i % 3 != 0) for i in range(10 * WINDOW))


def test_one_request_at_a_time_is_the_trial(breaker: Breaker, clock: Clock) -> None:
    while not breaker.record(good=False):
        pass
    assert not breaker.admits
    rest(breaker, clock)
    assert breaker.admits
    breaker.begin()
    assert not breaker.admits
    breaker.end()
    assert breaker.admits


def test_a_request_from_before_a_rest_does_not_end_it(breaker: Breaker, clock: Clock) -> None:
    breaker.eject("slow")
    breaker.record(good=True)
    assert breaker.state == "open"
    rest(breaker, clock)
    breaker.record(good=True)
    assert breaker.state == "closed"
