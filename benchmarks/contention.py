"""The share of the machine that others used during a measurement: other processes, and time taken by the hypervisor."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TypeVar

import psutil

OTHERS_LIMIT = 0.04  # of the cores; a measurement with a larger share is dropped
REPEATS = 3  # of a disturbed measurement
T = TypeVar("T")


@dataclass(frozen=True)
class Reading:
    """The clock, and CPU time summed over the cores. All are seconds from a fixed moment."""

    clock: float
    busy: float  # of every process
    steal: float  # the hypervisor gave a core to another guest
    own: float  # of the measured processes

    @classmethod
    def take(cls, processes: list[psutil.Process]) -> Self:
        """Read the counters. `processes` are counted with their children."""
        times = psutil.cpu_times()
        busy = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
        return cls(time.perf_counter(), busy, getattr(times, "steal", 0.0), sum(map(_cpu_seconds, processes)))

    def others_until(self, later: Reading, cores: int) -> float:
        """Share of `cores` cores, 0 to 1, that went to others between two readings.

        A kernel may count time stolen from a process as the process's own, so that `own` grows more than `busy`. This
        difference must not hide the stolen time.
        """
        others = max(0.0, (later.busy - self.busy) - (later.own - self.own)) + (later.steal - self.steal)
        return others / (cores * (later.clock - self.clock))


def undisturbed(measure: Callable[[], T]) -> tuple[T, float]:
    """(result, others' share) of a measurement in this process.

    The measurement is repeated up to REPEATS times while others use more than OTHERS_LIMIT. If they always do, the
    measurement with the smallest share of others is returned.
    """
    processes, taken = [psutil.Process()], []
    for _ in range(1 + REPEATS):
        before = Reading.take(processes)
        result = measure()
        others = before.others_until(Reading.take(processes), psutil.cpu_count() or 1)
        taken.append((result, others))
        if others <= OTHERS_LIMIT:
            break
    return min(taken, key=lambda pair: pair[1])


def _cpu_seconds(process: psutil.Process) -> float:
    total = 0.0
    for each in [process, *process.children(recursive=True)]:
        times = each.cpu_times()
        total += times.user + times.system
    return total
