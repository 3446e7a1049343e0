"""The memory that a process may take, read from trees of files like those of Linux."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from lmkit.turbo.host_memory import available_memory, memory_limit, shortage
from tests.test_cores import write

MIB = 1 << 20
V2 = {"memory.max": 500 * MIB, "memory.current": 400 * MIB, "memory.stat": "inactive_file 50\nactive_file 7\nanon 9"}
V1 = {
    "memory.limit_in_bytes": 500 * MIB,
    "memory.usage_in_bytes": 400 * MIB,
    "memory.stat": "inactive_file 1\ntotal_inactive_file 50\ntotal_active_file 7",
}


@pytest.mark.parametrize(
    ("groups", "folder", "files"),
    [
        ("0::/", "", V2),
        ("0::/a/b", "a", V2),  # the group around this process' own has the limit
        ("4:memory:/\n0::/", "memory", V1),
        ("4:memory:/docker/1\n1:cpu:/", "memory", V1),  # a container sees its own group as the root
        ("4:memory:/a\n0::/", "memory/a", V1),
    ],
)
def test_pages_of_files_are_free(tmp_path: Path, groups: str, folder: str, files: dict[str, object]) -> None:
    write(tmp_path, {"proc/self/cgroup": groups})
    write(tmp_path / "sys/fs/cgroup" / folder, {name: str(content) for name, content in files.items()})
    assert available_memory(tmp_path) == 100 * MIB + 57


@pytest.mark.parametrize("limit", ["max", str(1 << 62)])
def test_without_a_limit_the_machine_has_one(tmp_path: Path, limit: str) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/"})
    write(tmp_path / "sys/fs/cgroup", {"memory.max": limit, "memory.current": "1", "memory.stat": ""})
    assert 0 < available_memory(tmp_path) < 1 << 60


def test_a_group_that_is_full_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/"})
    write(tmp_path / "sys/fs/cgroup", {name: str(content) for name, content in V2.items()} | {"memory.max": "5"})
    assert available_memory(tmp_path) == 0


def test_the_limit_of_addresses_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"proc/self/statm": "1000 10 5 1 0 50 0"})
    monkeypatch.setattr("resource.getrlimit", lambda which: (1000 * mmap.PAGESIZE + 77, -1))
    assert available_memory(tmp_path) == 77
    assert memory_limit(tmp_path) == 1000 * mmap.PAGESIZE + 77


def test_memory_is_short_below_a_share_of_the_limit(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/"})
    files = {"memory.max": 320 * MIB, "memory.current": 310 * MIB, "memory.stat": "anon 9"}
    write(tmp_path / "sys/fs/cgroup", {name: str(content) for name, content in files.items()})
    assert shortage(tmp_path) == 0
    write(tmp_path / "sys/fs/cgroup", {"memory.current": str(313 * MIB)})
    assert shortage(tmp_path) == 3 * MIB
    assert memory_limit(tmp_path) == 320 * MIB
