"""Linux keeps the tile registers, 8 KB of a thread's state, from a process until it asks for them."""

from __future__ import annotations

import ctypes
import errno
import functools
import os

_ARCH_PRCTL, _REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18  # x86_64


@functools.cache
def refused() -> str | None:
    """Ask for the tile registers, once, for all threads of this process. None, or the reason why not. The processor
    must have AMX."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.syscall(_ARCH_PRCTL, _REQ_XCOMP_PERM, _XTILEDATA):
        return None
    number = ctypes.get_errno()
    needed = "; Linux 5.16 or later is needed" if number in (errno.EINVAL, errno.ENOSYS) else ""
    return f"the kernel refuses the tile registers ({os.strerror(number)}{needed})"
