"""The free memory of the host, and the format of sizes. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from lmkit.cores import control_groups

# The limit and the use in bytes, by the mount of the control groups: version 2, version 1.
_FILES = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
_CACHE = ("inactive_file", "active_file")  # of memory.stat: pages of files, which the kernel takes back if it must


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: the machine's free memory, or that of a control group around it if that
    is less. Files of the control groups are below `root`."""
    return max(0, min([int(psutil.virtual_memory().available), *_free_in_groups(root)]))


def _free_in_groups(root: Path) -> Iterator[int]:
    for folder, mount in control_groups(root, "memory"):
        limit, used = (folder / name for name in _FILES[mount])
        with suppress(OSError, ValueError):  # the root has no files, and version 2 writes `max` for no limit
            entries = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            prefix = "total_" if mount else ""  # of version 1: with the groups inside
            cache = sum(int(entries.get(prefix + name, 0)) for name in _CACHE)
            yield int(limit.read_text()) - int(used.read_text()) + cache


def gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.1f} MiB"
