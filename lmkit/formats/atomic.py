"""Atomic files and folders: complete, or not there at all."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmkit.errors import CheckpointError, ConfigError
from lmkit.log import get_logger

log = get_logger(__name__)


@contextmanager
def atomic_directory(out: str | Path) -> Iterator[Path]:
    """Yield an empty folder beside `out`. It becomes `out` when the block ends, and is removed if the block raises.

    Ctrl-C and SystemExit count as raising. A killed process leaves its `.{name}.partial-<pid>`, and the next writer of
    the same `out` removes that. Raises ConfigError if `out` is a file, is not empty, cannot be made, or is being
    written by another process.
    """
    target = Path(os.path.realpath(out))
    refuse_occupied(target)
    partial, held = _claim(target)
    try:
        yield partial
        put_in_place(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(held)


def put_in_place(folder: Path, target: Path) -> None:
    """Give a complete folder its final name. Raises ConfigError if the name has been taken."""
    sync_directory(folder)
    try:
        folder.rename(target)  # replaces an empty folder, never a full one
    except OSError as error:
        raise ConfigError(f"{target}: cannot be put in place: {error.strerror}") from None
    sync_directory(target.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it. Raises CheckpointError if it cannot be written."""
    with write_errors(path), path.open("wb") as file:
        file.write(data)
        os.fsync(file.fileno())


def copy_file(source: Path, target: Path) -> None:
    """Copy bytes (not times or permissions) and wait until the disk has them."""
    with write_errors(target), source.open("rb") as reader, target.open("wb") as writer:
        shutil.copyfileobj(reader, writer, 1 << 20)
        os.fsync(writer.fileno())


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn a full disk and similar errors into one line."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from None


def sync_directory(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def refuse_occupied(target: Path) -> None:
    """Raise ConfigError unless a folder can appear here."""
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target}: is a file; choose a folder that does not exist yet")
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"{target}: is not empty; choose another folder or remove it")


def _claim(target: Path) -> tuple[Path, int]:
    """Remove the remains of killed writers, make this process's partial folder and lock it: (folder, lock's
    descriptor).

    The lock lives as long as its process. It therefore distinguishes a dead writer from a living one even across
    containers, where process ids repeat.
    """
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for other in sorted(target.parent.glob(f".{glob.escape(target.name)}.partial-*")):
            if other.is_dir() and not other.is_symlink():
                _remove_stale(other, target)
        partial.mkdir()
        fd = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be made: {error.strerror}") from None
    try:
        lock(fd)
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(f"{target}: another process began to write it at the same moment") from None
    return partial, fd


def _remove_stale(partial: Path, target: Path) -> None:
    fd = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if lock(fd):
            log.warning("removing %s, left by a process that was killed", partial)
            shutil.rmtree(partial)
    except BlockingIOError:
        raise ConfigError(f"{target}: another process is writing it in {partial.name}") from None
    finally:
        os.close(fd)


def lock(fd: int) -> bool:
    """Lock without waiting.

    Raises BlockingIOError if another process holds the lock. False on a file system without locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True
