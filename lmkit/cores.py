"""The processor that this process may use: physical cores, NUMA nodes, and the quota of its control groups.

Everything is read from the files of Linux. A file that is missing limits nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# The quota and its period in microseconds, by the mount of the control groups: version 2, version 1.
_QUOTA_FILES = {"": ("cpu.max",), "cpu": ("cpu.cfs_quota_us", "cpu.cfs_period_us")}


@dataclass(frozen=True)
class Cores:
    """What the scheduler may give this process."""

    cpus: int  # hardware threads
    physical: int  # cores that these belong to
    nodes: tuple[int, ...]  # NUMA nodes that these belong to, ascending; none if the kernel does not say
    quota: float  # CPUs' worth of time

    @property
    def usable(self) -> int:
        """Threads that each have a physical core to themselves, within the quota. One more thread would only share a
        core's arithmetic, or use up the quota early and wait for the rest of each period."""
        return max(1, min(self.physical, math.floor(min(self.quota, self.cpus))))

    def describe(self) -> str:
        """`16 cores of 32 CPUs on 2 NUMA nodes, quota 2.5 CPUs`."""
        nodes = f" on {len(self.nodes)} NUMA nodes" if len(self.nodes) > 1 else ""
        quota = f", quota {self.quota:g} CPUs" if self.quota < self.cpus else ""
        return f"{_number(self.physical, 'core')} of {_number(self.cpus, 'CPU')}{nodes}{quota}"


def available(root: Path = Path("/"), cpus: Iterable[int] | None = None) -> Cores:
    """The cores of the CPUs that this process may run on (`taskset`, cpusets), or of `cpus`. Files are below `root`."""
    allowed = os.sched_getaffinity(0) if cpus is None else set(cpus)
    physical = {_siblings(root / f"sys/devices/system/cpu/cpu{cpu}/topology") or str(cpu) for cpu in allowed}
    nodes = {
        int(folder.name.removeprefix("node"))
        for folder in (root / "sys/devices/system/node").glob("node[0-9]*")
        if allowed & set(_numbers(_text(folder / "cpulist")))
    }
    return Cores(len(allowed), len(physical), tuple(sorted(nodes)), min(_quotas(root), default=math.inf))


def _siblings(topology: Path) -> str:
    """The CPUs of a core, the same text for each of them. Older kernels have the second name only."""
    return _text(topology / "core_cpus_list") or _text(topology / "thread_siblings_list")


def _numbers(text: str) -> Iterator[int]:
    """`0-2,8` -> 0 1 2 8"""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _quotas(root: Path) -> Iterator[float]:
    """The quota of each control group around this process that has one. A container sees its own group as the root."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        mount = "cpu" if "cpu" in controllers.split(",") else controllers
        for group in (Path(path), *Path(path).parents):
            folder = root / "sys/fs/cgroup" / mount / group.relative_to("/")
            numbers = " ".join(_text(folder / file) for file in _QUOTA_FILES.get(mount, ())).split()
            if len(numbers) == 2 and all(map(str.isdecimal, numbers)):  # without a quota: max, or -1
                yield int(numbers[0]) / int(numbers[1])


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
