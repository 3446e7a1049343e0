"""Large reads past the page cache give the file's bytes, or one clear error."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from lmkit.errors import CheckpointError
from lmkit.formats import direct_file
from lmkit.formats.direct_file import PAGE, DirectFile, span

SIZE = 3 * PAGE + 100


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    return path


def read(file: DirectFile, start: int, end: int) -> bytes:
    first, last = span(start, end)
    memory = memoryview(mmap.mmap(-1, max(1, last - first)))[: last - first]
    file.begin(start, end, memory).wait()
    return bytes(memory[start - first : end - first])


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("start", "end"), [(0, SIZE), (70, 90), (PAGE, 2 * PAGE), (PAGE - 1, SIZE), (SIZE, SIZE)])
def test_it_reads_any_part(file: Path, direct: bool, start: int, end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_file, "_PIECE", PAGE)
    if not direct:
        refuse_direct(monkeypatch)
    opened = DirectFile(file)
    assert opened.is_direct <= direct
    assert read(opened, start, end) == file.read_bytes()[start:end]
    assert opened.bandwidth() > 0


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system without O_DIRECT does."""
    plain = os.open

    def refusing(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)


def test_a_file_that_shrank_is_one_line(file: Path) -> None:
    opened = DirectFile(file)
    os.truncate(file, PAGE + 10)
    with pytest.raises(CheckpointError, match=rf"file: ends at byte {PAGE + 10}, but {SIZE} bytes were there before"):
        read(opened, 0, SIZE)


def test_a_disk_s_error_is_one_line(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    opened = DirectFile(file)
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError, match="file: cannot be read: Input/output error"):
        read(opened, 0, SIZE)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing: No such file"):
        DirectFile(tmp_path / "nothing")
