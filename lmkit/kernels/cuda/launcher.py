"""Launches through the driver's cuLaunchKernelEx, by ctypes: it can let a kernel begin while the one before it ends.

    early kernel     | reads weights, waits ............ | computes
    kernel before it | computes ...... | leaves the SMs  |

A kernel that is launched early (programmatic stream serialization) begins as soon as all blocks of the kernel before
have executed griddepcontrol.launch_dependents, and waits for its end by griddepcontrol.wait. Every thread of every
kernel does both (ptx.cuh). Kernels that are launched otherwise, and copies, wait for the end of all work before them.

A kernel's arguments are written to the same buffer at every launch, and the driver reads them during the call. One
thread launches.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

WIDE = {"int64": "q", "uint64": "Q", "float64": "d"}  # numpy's types as struct writes them
EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class LaunchError(RuntimeError):
    """The driver refused a launch. `status` is its CUresult."""

    def __init__(self, name: str, status: int, reason: str) -> None:
        super().__init__(f"{name}: {reason} (CUDA error {status})")
        self.status = status


class _Attribute(ctypes.Structure):  # CUlaunchAttribute, with the value of EARLY
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@cache
def driver(path: str = "libcuda.so.1") -> ctypes.CDLL:
    """The driver's library. Raises OSError if it is not there, AttributeError if it is older than CUDA 11.8."""
    library = ctypes.CDLL(path)
    library.cuLaunchKernelEx.argtypes = (ctypes.c_void_p,) * 4
    library.cuGetErrorString.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
    return library


@cache
def launcher_problem() -> str | None:
    """Why the driver cannot launch, or None."""
    try:
        driver()
    except (OSError, AttributeError) as error:
        return f"the driver's library has no such launch: {error}"
    return None


class DriverLaunch:
    """Launches one function (a CUfunction's address)."""

    def __init__(self, name: str, function: int, *, early: bool, library: ctypes.CDLL | None = None) -> None:
        self._name, self._driver = name, library or driver()
        self._function = ctypes.c_void_p(function)
        self._attribute = _Attribute(EARLY, 0, 1)
        self._config = _Config(attributes=ctypes.pointer(self._attribute), count=int(early))
        self._at = ctypes.byref(self._config)
        self._pack: struct.Struct | None = None  # the arguments, 8 bytes each

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared: int, stream: int
    ) -> None:
        """Launch on a stream (a CUstream's address). Raises LaunchError."""
        if self._pack is None:
            self._prepare(args)
        assert self._pack is not None
        self._pack.pack_into(self._values, 0, *map(_number, args))
        config = self._config
        config.grid[:], config.block[:], config.shared, config.stream = grid, block, shared, stream
        if status := self._driver.cuLaunchKernelEx(self._at, self._function, self._addresses, None):
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            raise LaunchError(self._name, status, (text.value or b"an unknown error").decode())

    def _prepare(self, args: Sequence[Any]) -> None:
        """Lay the arguments out by the types of the first launch's. The same types come in every launch."""
        self._pack = struct.Struct("=" + "".join(map(_format, args)))
        self._values = ctypes.create_string_buffer(self._pack.size)
        first = ctypes.addressof(self._values)
        self._addresses = (ctypes.c_void_p * len(args))(*(first + 8 * i for i in range(len(args))))


def _format(value: Any) -> str:
    """How struct writes an argument to 8 bytes. See module.Kernel for the types."""
    if value is None or isinstance(value, Tensor):
        return "Q"
    if isinstance(value, np.generic):
        return WIDE[value.dtype.name]
    return "f4x" if isinstance(value, float) else "i4x"


def _number(value: Any) -> Any:
    return 0 if value is None else value.data_ptr() if isinstance(value, Tensor) else value
