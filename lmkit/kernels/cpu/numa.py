"""Memory of a process that computes on several NUMA nodes: its pages are taken from the nodes in turns.

A page lies on the node of the thread that first writes it. Weights and KV that one thread wrote would lie on one node,
and that node's bandwidth would be the limit for all threads. Any thread reads any page, so turns are as near as any
other place, and every node's bandwidth is used.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence

from lmkit.log import get_logger

log = get_logger(__name__)
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}  # the numbers of set_mempolicy and get_mempolicy
_DEFAULT, _INTERLEAVE = 0, 3
_MAX_NODES = 1024


def interleave(nodes: Sequence[int]) -> bool:
    """Take the pages of the calling thread, and of threads that it starts from now on, from `nodes` in turns.

    A policy that the user gave (`numactl`) stays. Returns whether the pages are taken in turns.
    """
    if platform.machine() not in _CALLS:
        return False
    set_policy, get_policy = _CALLS[platform.machine()]
    call = ctypes.CDLL(None, use_errno=True).syscall
    mode, mask = ctypes.c_int(_DEFAULT), (ctypes.c_uint64 * (_MAX_NODES // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    result = call(get_policy, ctypes.byref(mode), None, 0, None, 0)
    if result == 0 and mode.value == _DEFAULT:
        result = call(set_policy, _INTERLEAVE, ctypes.byref(mask), _MAX_NODES + 1)
        mode.value = _INTERLEAVE
    if result:  # containers often forbid it
        log.info("memory is not spread over the NUMA nodes: %s", os.strerror(ctypes.get_errno()))
    return result == 0 and mode.value == _INTERLEAVE
