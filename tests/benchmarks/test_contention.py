from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from benchmarks.contention import Reading


def test_share_of_others() -> None:
    before = Reading(clock=100.0, busy=50.0, steal=1.0, own=7.0)
    after = Reading(clock=110.0, busy=66.0, steal=1.5, own=21.0)
    # 16 s of CPU, 14 of them ours, and 0.5 s taken away, of 2 * 10
    assert before.others_until(after, cores=2) == pytest.approx(0.125)


def test_share_is_never_negative() -> None:
    """Ticks of the two counters fall at different moments."""
    before, after = Reading(0.0, 0.0, 0.0, 0.0), Reading(1.0, 0.99, 0.0, 1.0)
    assert before.others_until(after, cores=1) == 0


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
    assert after.own - before.own >= used.user + used.system > 0
    assert after.busy > before.busy
    assert after.clock > before.clock
