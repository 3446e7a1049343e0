"""What a cluster decides to do, under a clock of the test."""

from __future__ import annotations

import random

import pytest

from lmkit.cluster.config import Bounds, Scaling
from lmkit.cluster.decide import Autoscaler, Backoff, Seen, State, changes


def seen(*replicas: str) -> list[Seen]:
    """`new ready 2`: a replica of the wanted version with two requests."""
    states: dict[str, State] = {"starting": "starting", "ready": "ready", "lost": "lost", "draining": "draining"}
    words = [replica.split() for replica in replicas]
    return [Seen(str(i), w[0], states[w[1]], int(w[2]) if len(w) > 2 else 0) for i, w in enumerate(words)]


@pytest.mark.parametrize(
    ("want", "replicas", "start", "drain"),
    [
        (2, [], 2, []),
        (2, ["new starting", "new ready"], 0, []),
        (2, ["new draining", "new ready"], 1, []),
        (2, ["new lost", "new ready"], 0, []),  # a silent replica is killed before another takes its place
        (1, ["new ready 3", "new ready 1", "new starting"], 0, ["2", "1"]),
        (0, ["new ready"], 0, ["0"]),
        (2, ["old ready", "old ready"], 1, []),  # one more, so that two stay ready
        (2, ["old ready", "old ready", "new starting"], 0, []),
        (2, ["old ready 5", "old ready 1", "new ready"], 0, ["1"]),
        (2, ["old ready 5", "old draining", "new ready"], 1, []),
        (2, ["old starting", "old ready"], 1, ["0"]),  # no request waits for a replica of an old version
        (1, ["old ready", "new lost"], 0, []),
        (3, ["old ready", "new ready"], 2, []),
        (0, ["old ready", "old ready"], 0, ["0", "1"]),
    ],
)
def test_the_next_step(want: int, replicas: list[str], start: int, drain: list[str]) -> None:
    assert changes("new", want, seen(*replicas)) == (start, drain)


@pytest.mark.parametrize("surge", [0, 1])
@pytest.mark.parametrize("seed", range(20))
def test_a_rolling_update_ends_and_never_takes_the_last_ready_replica(seed: int, surge: int) -> None:
    """Replicas become ready and end at random moments; the wanted number and the version change on the way."""
    rng = random.Random(seed)
    want, version, number = rng.randint(1, 5), 0, 0
    replicas: dict[str, Seen] = {}
    for step in range(400):
        if step < 200 and rng.random() < 0.05:
            version += 1
        if step < 200 and rng.random() < 0.05:
            want = rng.randint(1, 5)
        before = sum(r.state == "ready" for r in replicas.values())
        todo = changes(str(version), want, replicas.values(), surge=surge)
        for id in todo.drain:
            replicas[id] = replicas[id]._replace(state="draining")
        for _ in range(todo.start):
            number += 1
            replicas[str(number)] = Seen(str(number), str(version), "starting")
        live = [r for r in replicas.values() if r.state != "draining"]
        assert sum(r.state == "ready" for r in live) >= min(before, want - 1 + surge)
        assert todo.start == 0 or len(live) <= want + surge
        for id, replica in list(replicas.items()):
            if rng.random() < 0.3:
                if replica.state == "draining":
                    del replicas[id]
                elif replica.state == "starting":
                    replicas[id] = replica._replace(state="ready")
    assert [(r.digest, r.state) for r in replicas.values()] == [(str(version), "ready")] * want


def test_a_version_that_does_not_start_leaves_the_old_one_running() -> None:
    old = seen("old ready", "old ready")
    for _ in range(10):  # each new replica dies before it is ready
        assert changes("new", 2, old) == (1, [])
        assert changes("new", 2, [*old, Seen("9", "new", "starting")]) == (0, [])


def test_more_replicas_at_once_and_fewer_after_a_while() -> None:
    scaler, bounds = Autoscaler(), Bounds(min=0, max=4)
    scaling = Scaling(requests=4, tokens=1000, idle_seconds=60)

    def want(now: float, requests: int = 0, tokens: int = 0) -> int:
        return scaler.want(bounds, scaling, requests, tokens, now)

    assert want(0) == 0
    assert want(1, requests=1) == 1  # from zero, by a request that waits
    assert want(2, requests=4) == 1
    assert want(3, requests=5) == 2
    assert want(4, tokens=2001) == 3
    assert want(5, requests=100) == 4  # the bound
    assert want(6) == 4
    assert want(65, requests=2) == 4  # what was needed within the last minute
    assert want(66, requests=2) == 1
    assert want(125) == 1
    assert want(127) == 0
    assert Autoscaler().want(Bounds(min=2, max=3), scaling, 0, 0, 0.0) == 2


def test_one_failure_is_replaced_at_once_and_more_after_a_growing_wait() -> None:
    backoff = Backoff()
    assert backoff.allows(0)
    waits = []
    now = 0.0
    for _ in range(9):
        backoff.failed(0.0, now)
        wait = next(seconds for seconds in (0, 1, 2, 4, 8, 16, 32, 60) if backoff.allows(now + seconds))
        assert wait == 0 or not backoff.allows(now + wait - 0.01)
        waits.append(wait)
        now += wait
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    backoff.failed(3600.0, now)  # it had run well
    assert backoff.allows(now)
