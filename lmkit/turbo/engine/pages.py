"""Taking the memory of the KV cache from the system while the engine serves already.

The system gives a page when it is first written. Until then other processes count its memory as free, and the step that
writes it waits. To take all pages before the first token would be a large part of a short start.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Iterable

from torch import Tensor

from lmkit.log import get_logger

log = get_logger(__name__)
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14: take pages as a write would, but leave their content
_CHUNK = 4 << 20  # bytes; meanwhile the process can map no other memory


def take_in_background(tensors: Iterable[Tensor]) -> threading.Thread:
    """Take the pages of tensors on the CPU, one after the other, as long as they live. Tensors on a GPU are left out.
    An older system gives pages when they are first written."""
    alive = [weakref.ref(tensor) for tensor in tensors if tensor.device.type == "cpu"]
    # The exit waits for the thread, which then stops: one that the exit froze within torch would end the process.
    thread = threading.Thread(target=_take, args=(alive,), name="take-pages")
    thread.start()
    return thread


def _take(alive: list[weakref.ref[Tensor]]) -> None:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for reference in alive:
        at = 0
        while threading.main_thread().is_alive() and (tensor := reference()) is not None and at < tensor.nbytes:
            start, end = tensor.data_ptr() + at, tensor.data_ptr() + min(at + _CHUNK, tensor.nbytes)
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            if madvise(page, end - page, _POPULATE_WRITE):
                log.debug("pages of the KV cache are taken when they are used: %s", os.strerror(ctypes.get_errno()))
                return
            at += _CHUNK
            del tensor  # or it would live on until all its pages are taken
