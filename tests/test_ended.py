"""How a process ended: kills for lack of memory are told by the kernel's counters, read from trees of files."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from lmkit.ended import MemoryKills
from tests.test_cores import write

V2, V1 = "memory.events", "memory.oom_control"
LACK = "was killed by the kernel for lack of memory"


def count(root: Path, file: str, kills: int) -> None:
    write(root, {file: f"low 0\noom 3\noom_kill {kills}"})


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        ("0::/a/b", f"sys/fs/cgroup/a/b/{V2}"),
        ("0::/", f"sys/fs/cgroup/{V2}"),  # a container sees its own group as the root
        ("4:memory:/docker/1\n0::/", f"sys/fs/cgroup/memory/{V1}"),
        ("0::/", "proc/vmstat"),  # the machine's root group has no counter
        ("", "proc/vmstat"),
    ],
)
def test_a_kill_for_memory_raises_the_counter(tmp_path: Path, groups: str, file: str) -> None:
    write(tmp_path, {"proc/self/cgroup": groups})
    count(tmp_path, file, 2)
    kills = MemoryKills(tmp_path)
    assert kills.ended(-signal.SIGKILL) == "was ended by SIGKILL", "others send this signal, too"
    count(tmp_path, file, 3)
    assert kills.ended(-signal.SIGKILL) == LACK
    assert kills.killed(-signal.SIGKILL)
    assert kills.ended(-signal.SIGTERM) == "was ended by SIGTERM"
    assert kills.ended(9) == "ended with status 9"
    assert MemoryKills(tmp_path).ended(-signal.SIGKILL) == "was ended by SIGKILL", "the kill was before"


def test_kills_in_other_groups_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/a/b"})
    for file in (f"sys/fs/cgroup/a/b/{V2}", f"sys/fs/cgroup/a/{V2}", "proc/vmstat"):
        count(tmp_path, file, 0)
    kills = MemoryKills(tmp_path)
    count(tmp_path, f"sys/fs/cgroup/a/{V2}", 1)
    count(tmp_path, "proc/vmstat", 1)
    assert not kills.killed(-signal.SIGKILL)


def test_a_system_without_counters(tmp_path: Path) -> None:
    assert MemoryKills(tmp_path).ended(-signal.SIGKILL) == "was ended by SIGKILL"
    assert MemoryKills(tmp_path).ended(-40) == "was ended by signal 40"
