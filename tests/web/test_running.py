"""Files of running servers: who may read them, which are stale, and that no stranger gets a signal."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from lmkit.errors import LMKitError
from lmkit.web import running
from lmkit.web.running import Entry, admin_key_at, proxy_key_at, registered

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("LMKIT_STATE_DIR", str(tmp_path))
    return tmp_path / "run"


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs for a minute."""
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def of(pid: int, **changes: object) -> Entry:
    """The entry that a process with this id would have written."""
    with registered("serve", "m", 0.0):
        (mine,) = running.running()
    start = running._start(pid)
    assert start is not None
    return msgspec.structs.replace(mine, **{"pid": pid, "start": start, **changes})


def write(folder: Path, entry: Entry) -> Path:
    path = folder / entry.file
    path.write_bytes(msgspec.json.encode(entry))
    return path


def test_a_process_is_found_while_it_runs(folder: Path) -> None:
    with registered("serve", "demo", 30.0) as tell:
        (entry,) = running.running()
        assert (entry.kind, entry.pid, entry.name, entry.url, entry.port) == ("serve", os.getpid(), "demo", None, None)
        tell("http://127.0.0.1:8123")
        (entry,) = running.running()
        assert entry.port == 8123
        assert entry.seconds >= 0
        (file,) = folder.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not running.running()
    assert not list(folder.iterdir())


def test_a_server_hands_its_key_to_proxies_of_its_user_alone(folder: Path) -> None:
    with registered("serve", "m", 0.0, proxy_key="secret") as tell:
        tell("http://127.0.0.1:8123")
        here = running.running()
        (file,) = folder.iterdir()
        assert (b"secret" in file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (True, 0o600)
        for address, key in {
            "http://127.0.0.1:8123": "secret", "http://localhost:8123": "secret", "http://127.0.0.1:8124": None,
            "http://10.0.0.5:8123": None, "http://127.0.0.1:x": None,
        }.items():  # fmt: skip
            assert proxy_key_at(address, here) == key, address
        assert admin_key_at("http://127.0.0.1:8123") is None


def test_a_link_in_the_way_is_not_followed(folder: Path, tmp_path: Path) -> None:
    with registered("serve", "m", 0.0):
        (mine,) = running.running()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (mine.file, f"{mine.file}.new"):
        (folder / name).symlink_to(victim)
    with registered("serve", "m", 0.0) as tell:
        tell("http://127.0.0.1:1")
        assert running.running()[0].port == 1
    assert victim.read_text() == "precious"


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").write_text("a file")
    with registered("serve", "m", 0.0) as tell:
        tell("http://127.0.0.1:1")
    assert "`lmkit ps` does not show this process" in caplog.text


@pytest.mark.parametrize("change", [{"start": 1}, {"boot": "another"}], ids=lambda change: next(iter(change)))
def test_a_stale_file_is_removed_and_its_id_gets_no_signal(
    folder: Path, stranger: subprocess.Popen[bytes], change: dict[str, object]
) -> None:
    path = write(folder, of(stranger.pid, **change))
    assert not running.running()
    assert not path.exists()
    ended: list[Entry] = []
    running.stop([of(stranger.pid, start=1)], ended.append)  # it became stale after the look
    assert len(ended) == 1
    assert stranger.poll() is None


def test_files_of_other_users_are_not_believed(
    folder: Path, stranger: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(folder, of(stranger.pid))
    assert len(running.running()) == 1
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    assert not running.running()
    assert path.exists()


def test_files_of_other_machines_stay(folder: Path, stranger: subprocess.Popen[bytes]) -> None:
    """A home folder may be shared."""
    path = write(folder, of(stranger.pid, boot="another", host="elsewhere"))
    assert not running.running()
    assert path.exists()


def test_a_damaged_file_hides_no_other(folder: Path) -> None:
    with registered("serve", "m", 0.0):
        (folder / "x.json").write_text("{")
        assert len(running.running()) == 1


def test_stop_ends_processes(folder: Path, stranger: subprocess.Popen[bytes]) -> None:
    entry, ended = of(stranger.pid), []
    write(folder, entry)
    running.stop(running.running(), ended.append)
    assert ended == [entry]
    assert stranger.wait(5) == -15
    assert not running.running()


def test_stop_gives_up_on_a_process_that_does_not_end() -> None:
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(LMKitError, match=f"process {process.pid} still runs after 0.05 s; stop it once more"):
            running.stop([of(process.pid)], lambda _: None, extra_seconds=0.05)
        process.kill()
