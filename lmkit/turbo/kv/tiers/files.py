"""File system operations of the disk tier. Each function does one thing to one file, or raises OSError."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from lmkit.formats.direct_file import REQUESTS
from lmkit.turbo.kv.tiers.keys import KEY_BYTES

SUFFIX = ".kv"
PARTIAL = "partial"  # being written
PAGE = 4096


class Stored(NamedTuple):
    """A block's file as a listing shows it."""

    modified: int  # seconds since 1970
    key: bytes
    size: int


def file_of(folder: str, key: bytes) -> str:
    """<folder>/ab/abcdef....kv"""
    name = key.hex()
    return f"{folder}/{name[:2]}/{name}{SUFFIX}"


def disk_bytes(size: int) -> int:
    """Bytes that a file takes on disk: whole pages."""
    return -(-size // PAGE) * PAGE


def read(path: str, head: bytearray, out: memoryview) -> None:
    """Fill `head` and then `out` from the file. Raises EBADMSG if the file does not have exactly their size."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not hold us up
    try:
        found, size = os.fstat(fd).st_size, len(head) + out.nbytes
        with REQUESTS:
            is_whole = found == size and os.readv(fd, [head, out]) == size
        if not is_whole:
            raise OSError(errno.EBADMSG, f"{found} bytes, not {size}", path)
    finally:
        os.close(fd)


def write(folder: str, key: bytes, head: bytes, data: memoryview) -> None:
    """Make the block's file, whole or not at all. It does not wait for the disk, so a loss of power may tear it."""
    path = file_of(folder, key)
    partial = f"{os.path.dirname(path)}/{PARTIAL}"  # ext4 makes inodes faster in many folders than in one
    fd = _create(partial)
    try:
        try:
            with REQUESTS:
                count = os.writev(fd, [head, data])
            if count != len(head) + data.nbytes:
                raise OSError(errno.ENOSPC, "written in part", partial)
        finally:
            os.close(fd)
        os.rename(partial, path)
    except OSError:
        with suppress(OSError):
            remove(partial)
        raise


def _create(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        os.mkdir(os.path.dirname(path), 0o700)
        return os.open(path, flags, 0o600)


def remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def listing(folder: str) -> Iterator[Stored]:
    """Blocks in a folder, in no order. Partial files of killed processes are removed, other files are left alone."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _fan(entry)


def _fan(folder: os.DirEntry[str]) -> Iterator[Stored]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                continue
            key = _key(entry.name)
            if entry.name == PARTIAL:
                remove(entry.path)
            elif key is not None and entry.name.startswith(folder.name):
                state = entry.stat(follow_symlinks=False)
                yield Stored(int(state.st_mtime), key, state.st_size)


def _key(name: str) -> bytes | None:
    try:
        key = bytes.fromhex(name.removesuffix(SUFFIX))
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES and name == key.hex() + SUFFIX else None
