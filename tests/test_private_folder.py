"""Folders whose files are trusted: nobody else may write to them, and what others may have written is not used."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from lmkit import private_folder
from lmkit.kernels.cpu import kernel_files
from lmkit.kernels.cpu.kernel_files import ObjectCode
from lmkit.private_folder import make_private

CODE = ObjectCode("symbol", b"object code")


def mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


def make(folder: Path, most: int = 0o700) -> None:
    os.close(make_private(folder, most))


def of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:  # root's folders are trusted, so the folder's owner changes and not the user
        os.chown(folder, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    return folder


@pytest.mark.parametrize("most", [0o700, 0o755])
def test_a_new_folder_is_not_for_others(tmp_path: Path, most: int) -> None:
    before = os.umask(0)
    try:
        make(tmp_path / "a" / "b", most)
    finally:
        os.umask(before)
    assert mode(tmp_path / "a" / "b") == most
    assert mode(tmp_path / "a") == 0o755


def test_a_folder_of_this_user_keeps_its_files(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tmp_path.chmod(0o755)
    make(tmp_path)
    assert mode(tmp_path) == 0o700
    assert (tmp_path / "file").exists()


@pytest.mark.parametrize("rights", [0o777, 0o770, 0o1777, 0o720])
def test_what_others_may_have_written_is_removed(
    tmp_path: Path, rights: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("lmkit"), "propagate", True)
    folder, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    (folder / "sub").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    for path in (folder / "file", folder / "sub" / "file"):
        path.touch()
    (folder / "link").symlink_to(elsewhere)
    folder.chmod(rights)
    make(folder)
    assert list(folder.iterdir()) == []
    assert (elsewhere / "kept").exists()
    assert not mode(folder) & 0o077
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}: others could write to it; its files are removed"
    ]
    make(folder)  # once
    assert len(caplog.records) == 1


def test_a_link_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(PermissionError, match="not a folder of this user"):
            make(tmp_path / name)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PermissionError, match="not a folder of this user"):
        make(of_another_user(tmp_path / "folder", monkeypatch))


def test_roots_folder_is_trusted_unless_others_may_write_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = os.stat_result([stat.S_IFDIR | 0o755, *[0] * 9])
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(private_folder.os, "fstat", lambda fd: root)
    make(tmp_path)
    root = os.stat_result([stat.S_IFDIR | 0o777, *[0] * 9])
    with pytest.raises(PermissionError, match="others may write to it"):
        make(tmp_path)


def test_kernels_of_others_are_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Object code is run as it is: neither that of a foreign folder nor a file that others could plant is read."""
    kernel_files.write(tmp_path / "mine" / "a.kernel", CODE)
    assert kernel_files.read(tmp_path / "mine" / "a.kernel") == CODE
    (tmp_path / "mine").chmod(0o777)
    kernel_files._folder.cache_clear()
    assert kernel_files.read(tmp_path / "mine" / "a.kernel") is None

    monkeypatch.setattr(kernel_files, "make_private", lambda folder, most: os.open(folder, os.O_RDONLY))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    kernel_files.write(foreign / "a.kernel", CODE)
    assert kernel_files.read(foreign / "a.kernel") == CODE  # the file itself is in order
    monkeypatch.undo()
    kernel_files._folder.cache_clear()
    of_another_user(foreign, monkeypatch)
    assert kernel_files.read(foreign / "a.kernel") is None
    assert not kernel_files.is_writable(foreign)


def test_a_link_in_place_of_a_kernel_is_not_followed(tmp_path: Path) -> None:
    kernel_files.write(tmp_path / "a" / "a.kernel", CODE)
    (tmp_path / "a" / "b.kernel").symlink_to(tmp_path / "a" / "a.kernel")
    assert kernel_files.read(tmp_path / "a" / "b.kernel") is None


def test_a_foreign_folder_of_kernels_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("lmkit"), "propagate", True)
    folder = of_another_user(tmp_path / "kernels", monkeypatch)
    for _ in range(2):
        assert kernel_files.read(folder / "a.kernel") is None
        kernel_files.write(folder / "a.kernel", CODE)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        f"kernels are compiled anew in every process: {folder}: it is not a folder of this user; "
        "remove it, or set LMKIT_CACHE_DIR to a folder of your own"
    )
