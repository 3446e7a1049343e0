"""The folder of what a server keeps for its clients: files, batches, responses."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from lmkit.errors import ConfigError


class DataFolder:
    """`path` is for this user alone and for one server at a time. Without it, a temporary folder is made when it is
    first needed, and removed at the end of the process."""

    def __init__(self, path: str | None) -> None:
        """Raises ConfigError if the folder cannot be used, or another server uses it."""
        self._path = None if path is None else Path(path).absolute()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._lock = -1  # the open folder, which holds the lock
        if self._path is not None:
            self._lock = _locked(self._path)

    @property
    def lasts(self) -> bool:
        """Whether what it holds is there after a restart of the server."""
        return self._path is not None

    def folder(self, name: str) -> Path:
        """A private folder in it, made if need be."""
        if self._path is not None:
            parent = self._path
        else:
            self._temporary = self._temporary or tempfile.TemporaryDirectory(prefix="lmkit-data-")
            parent = Path(self._temporary.name)
        (parent / name).mkdir(mode=0o700, exist_ok=True)
        return parent / name

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None


def _locked(path: Path) -> int:
    """An open descriptor of the folder, which holds its lock. A new folder is private; another one must be.

    Nothing in it is changed. Raises ConfigError.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"--data-dir {path}: {error.strerror}") from None
    try:
        state = os.fstat(descriptor)
        if state.st_uid != os.geteuid() or state.st_mode & 0o077:
            raise ConfigError(f"--data-dir {path}: must be a folder that only this user may read: chmod 700 it")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ConfigError, OSError) as error:
        os.close(descriptor)
        if isinstance(error, ConfigError):
            raise
        used = "another server uses it; give each server a folder of its own"
        reason = used if isinstance(error, BlockingIOError) else f"it cannot be locked: {error.strerror}"
        raise ConfigError(f"--data-dir {path}: {reason}") from None
    return descriptor
