"""Random traffic on tiny pools: results depend on the request alone, everybody ends once, nothing leaks or starves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from lmkit.turbo.kv.tiers import files
from tests.turbo.kv.fake_tiers import full_disk
from tests.turbo.scheduling.traffic import Traffic


def run(
    folder: Path, seeds: range, depth: int, *, disturb: bool, thorough: bool, length: int = 150, drafts: bool = False
) -> Counter[str]:
    """Every other seed has lower tiers."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        tiers = folder / str(seed) if seed % 2 else None
        traffic = Traffic(seed, depth, disturb=disturb, folder=tiers, thorough=thorough, drafts=drafts)
        traffic.run(length)
        traffic.check_results()
        counts.update(traffic.counts)
    return counts


@pytest.mark.parametrize("disturb", [False, True])
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_random_traffic(depth: int, disturb: bool, tmp_path: Path) -> None:
    counts = run(tmp_path, range(24), depth, disturb=disturb, thorough=True)
    assert counts["preemptions"] > 75, "the traffic no longer exercises preemption"
    assert counts["requests"] > 400
    assert counts["hits"] > 250
    assert counts["loaded"] > (30 if disturb else 50)
    assert counts["deadline"] > 10
    assert disturb or depth > 1 or counts["exact"] > 1


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_random_traffic_with_drafts(depth: int, tmp_path: Path) -> None:
    counts = run(tmp_path, range(100, 124), depth, disturb=True, thorough=True, drafts=True)
    assert counts["preemptions"] > 100, "the traffic no longer exercises preemption"
    assert counts["hits"] > 300


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_random_traffic_of_a_model_with_recurrent_states(depth: int, drafts: bool, tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    for seed in range(200, 220):
        folder = tmp_path / str(seed) if seed % 4 < 2 else None
        traffic = Traffic(seed, depth, disturb=seed % 2 > 0, recurrent=True, drafts=drafts, folder=folder)
        traffic.run(150)
        traffic.check_results()
        assert traffic.engine.scheduler.kv.snapshots is not None
        counts.update(traffic.counts, evicted=traffic.engine.scheduler.kv.snapshots.num_evicted)
    assert counts["preemptions"] > 50
    assert counts["hits"] > 150
    assert counts["evicted"] > 50
    assert counts["loaded"] > 30


def test_a_full_disk_costs_nothing_but_the_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "write", full_disk)
    run(tmp_path, range(5000, 5010), 2, disturb=True, thorough=True)


@pytest.mark.parametrize(
    "most", [pytest.param(10_000, id="short"), pytest.param(200_000, id="long", marks=pytest.mark.exhaustive)]
)
def test_many_operations(most: int, tmp_path: Path) -> None:
    operations = group = 0
    while operations < most:
        seeds = range(10_000 + 10 * group, 10_010 + 10 * group)
        counts = run(tmp_path, seeds, 1 + group % 2, disturb=group % 4 > 0, thorough=False, length=300)
        operations += counts["operations"]
        group += 1


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_random_traffic_while_next_turns_are_prepared(depth: int, recurrent: bool, tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    for seed in range(300, 316):
        folder = tmp_path / str(seed) if seed % 4 < 2 else None
        traffic = Traffic(seed, depth, disturb=seed % 2 > 0, recurrent=recurrent, folder=folder, ahead=True)
        traffic.run(150)
        traffic.check_results()
        counts.update(traffic.counts)
    assert counts["prepared"] > 100
    assert counts["prepared ahead"] > 500
    assert counts["used ahead"]
    assert counts["wasted ahead"]
    assert counts["used ahead"] + counts["wasted ahead"] <= counts["prepared ahead"]
