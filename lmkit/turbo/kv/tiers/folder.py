"""The folder of a disk tier, and the folders beside it.

    <path>/                          the path that the user gives; engines may share it
        0123456789abcdef.lock        held by the engine that uses the folder of this name; never removed
        0123456789abcdef/            0700, the blocks of one identity; its first digits name the folder
            ab/abcd....kv            0600, one block, named by its key
            ab/partial               a block that is being written

Other files in these folders are neither read nor removed.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from lmkit.errors import ConfigError
from lmkit.formats.atomic import lock
from lmkit.private_folder import make_private
from lmkit.turbo.kv.tiers import files
from lmkit.turbo.kv.tiers.files import Stored

NAME = re.compile("[0-9a-f]{16}")
WAIT_SECONDS = 2.0  # time to wait for an engine that is just ending


def claim(path: Path, name: str) -> tuple[str, int]:
    """Make the folder `name` and lock it. Returns (folder, descriptor of the lock). Raises ConfigError."""
    folder = path / name
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = _open_lock(folder, os.O_CREAT)
        try:
            _wait_for(fd, folder)
            _make(folder)
        except BaseException:
            os.close(fd)
            raise
    except FileExistsError:
        raise ConfigError(f"{path}: is a file; choose another kv_disk_path") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot keep KV: {error.strerror}; choose another kv_disk_path") from None
    return str(folder), fd


def _make(folder: Path) -> None:
    """Make a folder that is private to this user, and check that it can be written to."""
    os.close(make_private(folder))
    partial = folder / files.PARTIAL
    partial.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    partial.unlink()


def _open_lock(folder: Path, flags: int = 0) -> int:
    return os.open(f"{folder}.lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)


def _wait_for(fd: int, folder: Path) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            lock(fd)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise ConfigError(
                    f"{folder}: another engine keeps its KV there; stop it or choose another kv_disk_path"
                ) from None
        time.sleep(0.02)


@dataclass
class Neighbour:
    """The folder of another identity: an earlier model or configuration."""

    path: Path
    num_bytes: int
    last_used: int
    stored: list[Stored] = field(default_factory=list)  # newest first; listed before the first eviction from it


class Neighbours:
    """Folders of other identities under the same path. They count against the bound, and are evicted first.

    Folders of running engines are neither counted nor touched.
    """

    def __init__(self, path: Path, own: str) -> None:
        names = [entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
        found = [self._measure(path / name) for name in names if NAME.fullmatch(name) and name != own]
        self._folders = sorted((n for n in found if n is not None), key=lambda n: n.last_used, reverse=True)

    @property
    def num_bytes(self) -> int:
        return sum(folder.num_bytes for folder in self._folders)

    def evict(self) -> bool:
        """Remove the oldest block of the folder that was unused for longest. Returns False if nothing is left."""
        while self._folders:
            folder = self._folders[-1]
            fd = _lock_idle(folder.path)
            if fd is None:
                self._folders.pop()  # an engine runs there by now
                continue
            try:
                if self._evict_from(folder):
                    return True
            finally:
                os.close(fd)
            self._folders.pop()
        return False

    def _evict_from(self, folder: Neighbour) -> bool:
        try:
            if not folder.stored:
                folder.stored = sorted(files.listing(str(folder.path)), reverse=True)
            if not folder.stored:
                _remove_empty(folder.path)
                return False
        except OSError:
            return False
        oldest = folder.stored.pop()
        folder.num_bytes -= files.disk_bytes(oldest.size)
        files.remove(files.file_of(str(folder.path), oldest.key))
        return True

    @staticmethod
    def _measure(path: Path) -> Neighbour | None:
        fd = _lock_idle(path)
        if fd is None:
            return None
        try:
            folder = Neighbour(path, 0, 0)
            for stored in files.listing(str(path)):
                folder.num_bytes += files.disk_bytes(stored.size)
                folder.last_used = max(folder.last_used, stored.modified)
            return folder
        except OSError:
            return None
        finally:
            os.close(fd)


def _lock_idle(folder: Path) -> int | None:
    """Take the lock of a disk tier's folder. Returns None if the folder has no lock, or a running engine holds it."""
    try:
        fd = _open_lock(folder)
    except OSError:
        return None
    try:
        lock(fd)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _remove_empty(folder: Path) -> None:
    for entry in os.scandir(folder):
        os.rmdir(entry.path)
    os.rmdir(folder)
