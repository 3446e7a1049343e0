"""A folder whose files this process trusts, such as the code of kernels: no other user may write to it."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from lmkit.log import get_logger

log = get_logger(__name__)
OTHERS_WRITE = 0o022


def make_private(folder: Path, mode: int = 0o700) -> int:
    """Make a folder that others cannot write to, or make sure that it is one. Returns an open descriptor of it.

    `mode` has the most rights that it may give. A folder of another user than root, or a link in its place, is refused
    (PermissionError). If others could write to it until now, its content may be theirs and is removed. Raises OSError.
    """
    folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(folder, mode)
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise _refused(folder, "it is not a folder of this user") from None
    try:
        _check(fd, folder, mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(fd: int, folder: Path, mode: int) -> None:
    state = os.fstat(fd)
    is_open = bool(state.st_mode & OTHERS_WRITE)
    if state.st_uid != os.geteuid():
        if state.st_uid:
            raise _refused(folder, "it is not a folder of this user")
        if is_open:
            raise _refused(folder, "others may write to it")
        return
    if stat.S_IMODE(state.st_mode) & ~mode:
        os.fchmod(fd, mode)
    if is_open:
        log.warning("%s: others could write to it; its files are removed", folder)
        for name in os.listdir(fd):
            if stat.S_ISDIR(os.lstat(name, dir_fd=fd).st_mode):
                shutil.rmtree(name, dir_fd=fd)
            else:
                os.unlink(name, dir_fd=fd)


def _refused(folder: Path, reason: str) -> PermissionError:
    return PermissionError(errno.EPERM, reason, str(folder))
