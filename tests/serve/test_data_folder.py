"""The folder of what a server keeps for its clients."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from lmkit.errors import ConfigError
from lmkit.web.data_folder import DataFolder


def test_a_folder_is_private_and_lasts(tmp_path: Path) -> None:
    data = DataFolder(str(tmp_path / "data"))
    kept = data.folder("files")
    assert kept == tmp_path / "data" / "files"
    assert {stat.S_IMODE(path.stat().st_mode) for path in (kept, kept.parent)} == {0o700}
    assert data.lasts
    data.close()
    assert kept.is_dir()


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    first = DataFolder(str(tmp_path))
    with pytest.raises(ConfigError, match="another server uses it"):
        DataFolder(str(tmp_path))
    first.close()
    DataFolder(str(tmp_path)).close()


def test_a_folder_that_others_may_read_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "theirs").touch()
    tmp_path.chmod(0o750)
    with pytest.raises(ConfigError, match="chmod 700"):
        DataFolder(str(tmp_path))
    assert (tmp_path / "theirs").exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^--data-dir \S+/file/data: Not a directory$"):
        DataFolder(str(tmp_path / "file" / "data"))


def test_a_temporary_folder_is_made_when_needed_and_goes_with_the_server() -> None:
    data = DataFolder(None)
    assert not data.lasts
    kept = data.folder("files")
    assert kept.is_dir()
    assert data.folder("batches").parent == kept.parent
    data.close()
    assert not kept.parent.exists()
