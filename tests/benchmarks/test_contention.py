from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from benchmarks import contention
from benchmarks.contention import REPEATS, Reading, undisturbed


def test_share_of_others() -> None:
    before = Reading(clock=100.0, busy=50.0, steal=1.0, own=7.0)
    after = Reading(clock=110.0, busy=66.0, steal=1.5, own=21.0)
    # 16 s of CPU, 14 of them ours, and 0.5 s taken away, of 2 * 10
    assert before.others_until(after, cores=2) == pytest.approx(0.125)


def test_share_is_never_negative() -> None:
    """Ticks of the two counters fall at different moments."""
    before, after = Reading(0.0, 0.0, 0.0, 0.0), Reading(1.0, 0.99, 0.0, 1.0)
    assert before.others_until(after, cores=1) == 0


def test_stolen_time_counts_even_if_it_is_charged_to_us() -> None:
    before, after = Reading(0.0, 0.0, 0.0, 0.0), Reading(clock=1.0, busy=1.7, steal=0.3, own=2.0)
    assert before.others_until(after, cores=2) == pytest.approx(0.15)


def test_children_count_as_own() -> None:
    code = "n = sum(range(5_000_000)); print(flush=True); input()"
    me = [psutil.Process()]
    before = Reading.take(me)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout
        child.stdout.readline()
        used = psutil.Process(child.pid).cpu_times()
        after = Reading.take(me)
        child.communicate("\n")
    assert 0 < used.user + used.system <= after.own - before.own + 1e-6
    assert after.busy > before.busy
    assert after.clock > before.clock


@pytest.mark.parametrize(
    ("shares", "chosen", "calls"), [([0.01], 1, 1), ([0.5, 0.0], 2, 2), ([0.5, 0.2, 0.1, 0.3], 3, 1 + REPEATS)]
)
def test_disturbed_measurements_are_repeated(
    shares: list[float], chosen: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores, taken = psutil.cpu_count() or 1, []
    # a second each: before and after; the shares are of CPU time that is not ours
    readings = [r for share in shares for r in (Reading(0, 0, 0, 0), Reading(1, share * cores, 0, 0))]
    monkeypatch.setattr(contention.Reading, "take", lambda processes: readings.pop(0))

    def measure() -> int:
        taken.append(None)
        return len(taken)

    assert undisturbed(measure) == (chosen, pytest.approx(shares[chosen - 1]))
    assert len(taken) == calls
