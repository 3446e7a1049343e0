"""The memory of the host that this process may take, and the format of sizes. No torch."""

from __future__ import annotations

import mmap
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from lmkit.cores import control_groups

# The limit and the use in bytes, by the mount of the control groups: version 2, version 1.
_FILES = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
_CACHE = ("inactive_file", "active_file")  # of memory.stat: pages of files, which the kernel takes back if it must
SHORT_SHARE = 1 / 32  # of a limit: with less of it free, what can be evicted is evicted before more memory is taken


class Room(NamedTuple):
    """One limit on this process' memory, in bytes."""

    limit: int
    free: int


def rooms(root: Path = Path("/")) -> Iterator[Room]:
    """The machine's memory, that of each control group around this process, and the process' own limit of addresses
    (`ulimit -v`). Files of Linux are below `root`."""
    machine = psutil.virtual_memory()
    yield Room(int(machine.total), int(machine.available))
    yield from _groups(root)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        with suppress(OSError):
            yield Room(limit, limit - mmap.PAGESIZE * int((root / "proc/self/statm").read_text().split()[0]))


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: the least that `rooms` have free."""
    return max(0, min(room.free for room in rooms(root)))


def memory_limit(root: Path = Path("/")) -> int:
    """The limit in bytes that ends this process first: that of the room with the least free memory."""
    return min(rooms(root), key=lambda room: room.free).limit


def shortage(root: Path = Path("/")) -> int:
    """Bytes by which the free memory of a room is below its SHORT_SHARE; 0 if there is enough."""
    return max(0, *(int(SHORT_SHARE * room.limit) - room.free for room in rooms(root)))


def _groups(root: Path) -> Iterator[Room]:
    for folder, mount in control_groups(root, "memory"):
        limit, used = (folder / name for name in _FILES[mount])
        with suppress(OSError, ValueError):  # the root has no files, and version 2 writes `max` for no limit
            entries = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            prefix = "total_" if mount else ""  # of version 1: with the groups inside
            cache = sum(int(entries.get(prefix + name, 0)) for name in _CACHE)
            most = int(limit.read_text())
            yield Room(most, most - int(used.read_text()) + cache)


def resident_memory() -> int:
    """Resident bytes of this process."""
    return mmap.PAGESIZE * int(Path("/proc/self/statm").read_text().split()[1])


def gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.1f} MiB"
