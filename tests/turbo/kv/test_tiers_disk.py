"""The disk tier: what was written is found again, whatever is wrong is a miss, the bound holds."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmkit.errors import ConfigError
from lmkit.formats import direct_file
from lmkit.turbo.kv.tiers import disk as disk_module
from lmkit.turbo.kv.tiers import files, folder, record
from lmkit.turbo.kv.tiers.disk import DiskTier
from tests.turbo.kv.tier_helpers import BLOCK, KV_IDENTITY, chain, content, disk, path_of


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "WAIT_SECONDS", 0.0)


def write(tier: DiskTier, key: bytes) -> bool:
    data = content(key).data
    return tier.write(key, data, record.checksum(key, data))


def read(tier: DiskTier, key: bytes) -> bool:
    """Whether the block is there; it is right then."""
    out = np.empty(BLOCK, np.uint8)
    crc = tier.read(key, out.data)
    assert crc is None or ((out == content(key)).all() and crc == record.checksum(key, out.data))
    return crc is not None


def used(path: Path) -> int:
    """What blocks take below a path, in pages."""
    return sum(-(-p.stat().st_size // 4096) * 4096 for p in path.rglob("*.kv"))


def test_blocks_survive_a_restart(tmp_path: Path) -> None:
    keys = chain(30)
    tier = disk(tmp_path)
    assert all(write(tier, key) for key in keys[:20])
    assert [read(tier, key) for key in keys] == [True] * 20 + [False] * 10
    assert tier.num_bytes == used(tmp_path) == 20 * 4096
    tier.close()
    again = disk(tmp_path)
    assert [key in again for key in keys] == [True] * 20 + [False] * 10
    assert [read(again, key) for key in keys] == [True] * 20 + [False] * 10
    assert (again.num_damaged, again.failures.count) == (0, 0)


def test_files_and_folders_are_private(tmp_path: Path) -> None:
    os.umask(os.umask(0))
    tier = disk(tmp_path / "a" / "b")
    (key,) = chain(1)
    write(tier, key)
    modes = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "a").rglob("*")}
    assert modes[path_of(tier, key).name] == 0o600
    assert modes[key.hex()[:2]] == modes[KV_IDENTITY.hex()[:16]] == 0o700
    tier.close()
    os.chmod(tier.folder, 0o755)
    disk(tmp_path / "a" / "b").close()
    assert os.stat(tier.folder).st_mode & 0o777 == 0o700


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, BLOCK // 2)


def zero_tail(path: Path) -> None:
    """What a loss of power leaves of a file whose size was written before its data."""
    path.write_bytes(path.read_bytes()[:1024].ljust(64 + BLOCK, b"\0"))


def link(path: Path) -> None:
    shutil.copy(path, path.with_name("elsewhere"))
    path.unlink()
    path.symlink_to(path.with_name("elsewhere"))


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": truncate,
    "too long": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "torn": zero_tail,
    "all zero": lambda path: path.write_bytes(bytes(64 + BLOCK)),
    "link": link,
    "fifo": lambda path: (path.unlink(), os.mkfifo(path)),
} | {f"bit flipped at {at}": lambda path, at=at: flip(path, at) for at in (0, 8, 13, 20, 30, 57, 62, 64, 63 + BLOCK)}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("restart", [False, True])
def test_damage_is_a_miss_and_is_removed(tmp_path: Path, damage: str, restart: bool) -> None:
    keys, tier = chain(3), disk(tmp_path)
    for key in keys:
        write(tier, key)
    path = path_of(tier, keys[1])
    DAMAGE[damage](path)
    if restart:
        tier.close()
        tier = disk(tmp_path)
    assert [read(tier, key) for key in keys] == [True, False, True]
    assert keys[1] not in tier
    assert not path.exists()
    assert not path.is_symlink()
    assert write(tier, keys[1])  # and it can come back
    assert read(tier, keys[1])


def test_a_file_under_a_wrong_name_is_a_miss(tmp_path: Path) -> None:
    tier, (first, second) = disk(tmp_path), chain(2)
    write(tier, first)
    write(tier, second)
    shutil.copy(path_of(tier, second), path_of(tier, first))
    assert not read(tier, first)
    assert tier.num_damaged == 1
    assert not path_of(tier, first).exists()
    assert read(tier, second)


def test_strange_files_are_left_alone(tmp_path: Path) -> None:
    tier, (key,) = disk(tmp_path), chain(1)
    write(tier, key)
    tier.close()
    fan = path_of(tier, key).parent
    strange = [
        tmp_path / "notes", Path(tier.folder) / "notes", fan / "notes", fan / ("g" * 64 + ".kv"),
        fan / (key.hex().upper() + ".kv"), fan / ("00" * 16 + ".kv"),
        tmp_path / ("0" * 16) / "ab" / ("ab" * 32 + ".kv"),
    ]  # fmt: skip
    for path in strange:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    partial = fan / files.PARTIAL
    partial.write_text("left by a killed process")
    again = disk(tmp_path, blocks=1)
    assert again.num_blocks == 1
    assert write(again, chain(2)[1])  # something has to leave
    assert all(path.read_text() == "mine" for path in strange)
    assert not partial.exists()


def test_the_bound_holds_and_the_least_recently_used_leave(tmp_path: Path) -> None:
    rng, keys, tier = random.Random(1), chain(40), disk(tmp_path, blocks=12)
    model: list[bytes] = []  # oldest first
    for _ in range(600):
        key = rng.choice(keys)
        if rng.random() < 0.4:
            assert read(tier, key) == (key in model)
            tier.touch([key])
        elif tier.wants(key):
            assert key not in model
            assert write(tier, key)
            model = model[-11:] if len(model) == 12 else model
            model.append(key)
        else:
            tier.touch([key])
        if key in model:
            model.remove(key)
            model.append(key)
        assert {key for key in keys if key in tier} == set(model)
        assert tier.num_bytes == used(tmp_path) <= 12 * 4096
    assert tier.num_evicted > 100
    tier.close()
    for age, key in enumerate(reversed(model)):  # as if a second had passed between uses
        os.utime(path_of(tier, key), (2e9 - age, 2e9 - age))
    smaller = disk(tmp_path, blocks=5)
    assert {key for key in keys if key in smaller} == set(model[-5:])
    assert used(tmp_path) <= 5 * 4096


def test_use_is_remembered_by_the_file(tmp_path: Path) -> None:
    tier, keys = disk(tmp_path), chain(3)
    for key in keys:
        write(tier, key)
        os.utime(path_of(tier, key), (1e9, 1e9))
    tier.close()
    tier = disk(tmp_path)
    tier.remember(keys[:2])
    assert [abs(path_of(tier, key).stat().st_mtime - time.time()) < 100 for key in keys] == [True, True, False]


def test_other_identities_leave_first_the_oldest_before(tmp_path: Path) -> None:
    keys, others = chain(8), [bytes([n]) * 32 for n in (1, 2)]
    for age, other in zip((3e8, 2e8), others, strict=True):  # the second is older
        tier = disk(tmp_path, identity=other)
        for index, key in enumerate(keys[:3]):
            write(tier, key)
            os.utime(path_of(tier, key), (age + index, age + index))
        tier.close()
    tier = disk(tmp_path, blocks=8)
    left = {other: tmp_path / other.hex()[:16] for other in others}
    counts = []
    for key in keys:
        assert write(tier, key)
        assert used(tmp_path) <= 8 * 4096
        counts.append([len(list(left[other].rglob("*.kv"))) for other in others])
    assert counts == [[3, 3], [3, 3], [3, 2], [3, 1], [3, 0], [2, 0], [1, 0], [0, 0]]
    assert not left[others[1]].exists()  # nothing is left of it but its lock
    assert all(read(tier, key) for key in keys)


def test_a_running_neighbour_is_not_touched(tmp_path: Path) -> None:
    keys, other = chain(6), disk(tmp_path, identity=bytes(32))
    for key in keys:
        write(other, key)
    tier = disk(tmp_path, blocks=2)
    assert all(write(tier, key) for key in keys)
    assert tier.num_blocks == 2
    assert all(read(other, key) for key in keys)
    other.close()
    tier.close()
    tier = disk(tmp_path, blocks=4)  # the neighbour has ended: its blocks count now
    assert used(tmp_path) <= 4 * 4096
    assert all(key in tier for key in keys[-2:])
    late = disk(tmp_path, identity=bytes(32))  # and comes back while we know its blocks
    assert late.num_blocks == 2
    assert all(write(tier, key) for key in keys)
    assert late.num_blocks == sum(read(late, key) for key in keys) == 2


def test_one_engine_a_folder(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    with pytest.raises(ConfigError, match=f"{tier.folder}: another engine keeps its KV there; stop it or choose"):
        disk(tmp_path)
    disk(tmp_path, identity=bytes(32)).close()
    tier.close()
    disk(tmp_path).close()


def test_a_start_waits_for_an_engine_that_is_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk(tmp_path)
    monkeypatch.setattr(folder, "WAIT_SECONDS", 10.0)
    monkeypatch.setattr(folder.time, "sleep", lambda seconds: tier.close())
    disk(tmp_path).close()


def test_paths_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"file.*choose another kv_disk_path"):
            disk(path)
    name = KV_IDENTITY.hex()[:16]
    (tmp_path / "real").mkdir()
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / name).symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="is not a folder of this user"):
        disk(tmp_path / "links")
    assert list((tmp_path / "real").iterdir()) == []
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / f"{name}.lock").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="cannot keep KV"):
        disk(tmp_path / "locks")
    assert not (tmp_path / "target").exists()
    with pytest.raises(ConfigError, match="kv_disk_memory 4095 holds no block of 4096 bytes; raise it"):
        DiskTier(tmp_path, KV_IDENTITY, block_bytes=BLOCK, max_bytes=4095)


def test_a_path_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(folder.os, "mkdir", refuse)
    with pytest.raises(ConfigError, match=f"{tmp_path}: cannot keep KV: Permission denied; choose another"):
        disk(tmp_path)
    monkeypatch.undo()
    disk(tmp_path).close()  # the lock was let go


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EMFILE])
@pytest.mark.parametrize("call", ["open", "writev", "rename"])
def test_a_failed_write_is_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    tier, keys = disk(tmp_path), chain(2)
    write(tier, keys[0])

    def fail(*args: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(files.os, call, fail)
        assert not write(tier, keys[1])
    assert tier.failures.count == 1
    assert [key in tier for key in keys] == [True, False]
    assert [p.name for p in Path(tier.folder).rglob("*") if p.is_file()] == [path_of(tier, keys[0]).name]
    assert write(tier, keys[1])
    assert read(tier, keys[1])


def test_a_write_in_part_is_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, (key,), whole = disk(tmp_path), chain(1), os.writev
    with monkeypatch.context() as patched:
        patched.setattr(files.os, "writev", lambda fd, parts: whole(fd, [parts[0], parts[1][:1000]]))
        assert not write(tier, key)
    assert not read(tier, key)
    assert not path_of(tier, key).exists()


@pytest.mark.parametrize("call", ["open", "fstat", "readv"])
def test_a_failed_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    tier, keys = disk(tmp_path), chain(2)
    for key in keys:
        write(tier, key)

    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patched:
        patched.setattr(files.os, call, fail)
        assert not read(tier, keys[0])
    assert (tier.failures.count, tier.num_damaged) == (1, 0)
    assert keys[0] not in tier  # nobody is sent to a bad place twice
    assert read(tier, keys[1])


def test_writing_rests_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, keys = disk(tmp_path), chain(20)
    with monkeypatch.context() as patched:
        patched.setattr(files.os, "writev", lambda fd, parts: 0)
        tried = [tier.wants(key) and not write(tier, key) for key in keys]
    assert tried == [True] * 5 + [False] * 15


def test_a_folder_that_vanished(tmp_path: Path) -> None:
    tier, keys = disk(tmp_path / "kv"), chain(2)
    write(tier, keys[0])
    shutil.rmtree(tmp_path / "kv")
    assert not read(tier, keys[0])
    assert not write(tier, keys[1])
    assert not (tmp_path / "kv").exists()  # what was mounted there may be gone: nothing is written beneath
    assert tier.num_blocks == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", tmp_path], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("cannot mount here")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_disk_that_is_full(small_disk: Path) -> None:
    tier, keys = disk(small_disk), chain(100)
    kept = [key for key in keys if tier.wants(key) and write(tier, key)]
    assert 10 < len(kept) <= 64
    assert tier.failures.count == 5
    assert [key for key in keys if read(tier, key)] == kept
    tier.close()
    again = disk(small_disk, blocks=20)
    assert all(write(again, key) for key in chain(30, "another"))


KILLED = """
import sys
from pathlib import Path
from lmkit.turbo.kv.tiers import record
from tests.turbo.kv.tier_helpers import chain, content, disk
tier, keys = disk(Path(sys.argv[1]), blocks=20), chain(60)
blocks = [content(key).data for key in keys]
print("begins", flush=True)
while True:
    for key, data in zip(keys, blocks):
        tier.wants(key) and tier.write(key, data, record.checksum(key, data))
"""


def test_kill_at_any_moment(tmp_path: Path) -> None:
    rng, found = random.Random(2), 0
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"begins\n"
        time.sleep(rng.uniform(0.002, 0.03))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        tier = disk(tmp_path, blocks=20)
        found += sum(read(tier, key) for key in chain(60))  # `read` compares
        assert (tier.num_damaged, tier.failures.count) == (0, 0)
        assert used(tmp_path) <= 20 * 4096
        tier.close()
    assert found > 20


def test_the_time_of_a_start_is_that_of_a_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is opened: 100,000 of them would take seconds."""
    tier, keys = disk(tmp_path), chain(50)
    for key in keys:
        write(tier, key)
    tier.close()
    opened: list[str] = []
    whole = os.open
    monkeypatch.setattr(
        disk_module.files.os, "open", lambda path, *a, **k: (opened.append(path), whole(path, *a, **k))[1]
    )
    assert disk(tmp_path).num_blocks == 50
    assert not [path for path in opened if str(path).endswith(".kv")]


class Gate(threading.Semaphore):
    """No request passes at first. `asked` counts those that want to."""

    def __init__(self) -> None:
        super().__init__(0)
        self.asked = threading.Semaphore(0)

    def __enter__(self) -> bool:
        self.asked.release()
        return self.acquire()


def test_blocks_and_weights_share_the_requests_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert files.REQUESTS is direct_file.REQUESTS
    tier, (key,), begun = disk(tmp_path), chain(1), []
    assert write(tier, key)
    for name in ("preadv", "readv"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, call=call, name=name: (begun.append(name), call(*args))[1])
    gate = Gate()
    for module in (files, direct_file):
        monkeypatch.setattr(module, "REQUESTS", gate)
    weights = direct_file.DirectFile(Path(path_of(tier, key)))
    size = direct_file.span(0, BLOCK)[1]
    reading = weights.begin(0, BLOCK, direct_file.memory_for_reads(size))
    block = threading.Thread(target=read, args=(tier, key))
    block.start()
    gate.asked.acquire()
    gate.asked.acquire()
    assert begun == []
    gate.release()
    reading.wait()
    block.join()
    assert sorted(begun) == ["preadv", "readv"]
