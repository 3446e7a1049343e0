"""How a child process ended, in words. A kill for lack of memory is told from others by the kernel's own counters."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

from lmkit.cores import control_groups

# The file of a control group that counts kills for memory, by the mount of the groups: version 2, version 1.
_FILES = {"": "memory.events", "memory": "memory.oom_control"}


class MemoryKills:
    """The kills for lack of memory since this object was made. Files of Linux are below `root`.

    The counter of the control group of this process is read, which its children share, or of the nearest one around it;
    without such a counter (the root group of version 2 has none) the machine's own.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before = _kills(root)

    def ended(self, status: int) -> str:
        """`ended with status 3`, `was ended by SIGTERM`, `was killed by the kernel for lack of memory`."""
        if self.killed(status):
            return "was killed by the kernel for lack of memory"
        return f"ended with status {status}" if status >= 0 else f"was ended by {_name(-status)}"

    def killed(self, status: int) -> bool:
        """Whether a child of this status was killed for lack of memory."""
        return status == -signal.SIGKILL and _kills(self._root) > self._before


def _kills(root: Path) -> int:
    files = [folder / _FILES[mount] for folder, mount in control_groups(root, "memory")]
    found = (count for file in (*files, root / "proc/vmstat") if (count := _count(file)) is not None)
    return next(found, 0)


def _count(file: Path) -> int | None:
    """The number after `oom_kill` in a file; None if there is none."""
    with suppress(OSError, ValueError, KeyError):
        return int(dict(line.split() for line in file.read_text().splitlines())["oom_kill"])
    return None


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
