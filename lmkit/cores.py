"""The processor that this process may use: physical cores, NUMA nodes, and the quota of its control groups.

Everything is read from the files of Linux. A file that is missing limits nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
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


def shares(count: int, root: Path = Path("/"), cpus: Iterable[int] | None = None) -> list[list[int]]:
    """The CPUs of each of `count` processes that share a model, in whole NUMA nodes, or in equal parts of one. They
    are empty, which binds to nothing, if there is only one node, or if processes and nodes do not go into each other.
    """
    allowed = os.sched_getaffinity(0) if cpus is None else set(cpus)
    nodes = [sorted(own) for own in _nodes(root, allowed).values()]
    if len(nodes) > 1 and len(nodes) % count == 0:
        each = len(nodes) // count
        return [sorted(chain(*nodes[each * i : each * (i + 1)])) for i in range(count)]
    if len(nodes) > 1 and count % len(nodes) == 0 and min(map(len, nodes)) >= (each := count // len(nodes)):
        return [part for node in nodes for part in _parts(root, node, each)]
    return [[] for _ in range(count)]


def _parts(root: Path, cpus: list[int], count: int) -> Iterator[list[int]]:
    """CPUs in `count` parts. The threads of a core stay together."""
    cores = dict[str, list[int]]()
    for cpu in cpus:
        cores.setdefault(_siblings(root / f"sys/devices/system/cpu/cpu{cpu}/topology") or str(cpu), []).append(cpu)
    groups = list(cores.values()) if len(cores) >= count else [[cpu] for cpu in cpus]
    for i in range(count):
        yield sorted(chain(*groups[len(groups) * i // count : len(groups) * (i + 1) // count]))


def bind(cpus: Iterable[int]) -> None:
    """Bind this thread, and threads that it starts, to CPUs. None of them: leave it as it is."""
    if wanted := set(cpus):
        os.sched_setaffinity(0, wanted)


def available(root: Path = Path("/"), cpus: Iterable[int] | None = None) -> Cores:
    """The cores of the CPUs that this process may run on (`taskset`, cpusets), or of `cpus`. Files are below `root`."""
    allowed = os.sched_getaffinity(0) if cpus is None else set(cpus)
    physical = {_siblings(root / f"sys/devices/system/cpu/cpu{cpu}/topology") or str(cpu) for cpu in allowed}
    return Cores(len(allowed), len(physical), tuple(_nodes(root, allowed)), min(_quotas(root), default=math.inf))


def _nodes(root: Path, allowed: set[int]) -> dict[int, set[int]]:
    """The NUMA nodes of these CPUs, ascending, and the CPUs of each."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    nodes = {int(each.name.removeprefix("node")): allowed & {*_numbers(_text(each / "cpulist"))} for each in folders}
    return {node: nodes[node] for node in sorted(nodes) if nodes[node]}


def _siblings(topology: Path) -> str:
    """The CPUs of a core, the same text for each of them. Older kernels have the second name only."""
    return _text(topology / "core_cpus_list") or _text(topology / "thread_siblings_list")


def _numbers(text: str) -> Iterator[int]:
    """`0-2,8` -> 0 1 2 8"""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _quotas(root: Path) -> Iterator[float]:
    """The quota of each control group around this process that has one."""
    for folder, mount in control_groups(root, "cpu"):
        numbers = " ".join(_text(folder / file) for file in _QUOTA_FILES[mount]).split()
        if len(numbers) == 2 and all(map(str.isdecimal, numbers)):  # without a quota: max, or -1
            yield int(numbers[0]) / int(numbers[1])


def control_groups(root: Path, controller: str) -> Iterator[tuple[Path, str]]:
    """The folder of each control group around this process, and its mount: `controller` with version 1, "" with
    version 2. A container sees its own group as the root."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        mount = controller if controller in controllers.split(",") else controllers
        if mount in (controller, ""):
            for group in (Path(path), *Path(path).parents):
                yield root / "sys/fs/cgroup" / mount / group.relative_to("/"), mount


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
