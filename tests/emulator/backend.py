"""Compiles kernels with g++ and launches them on the CPU: a backend of lmkit.kernels.cuda.module."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lmkit.config import environment
from lmkit.errors import UnsupportedError
from lmkit.kernels.cuda import module
from lmkit.kernels.cuda.gpus import Capability
from lmkit.kernels.cuda.module import Launch
from lmkit.kernels.cuda.source import kernel_source

FLAGS = ("-std=c++17", "-O2", "-march=native", "-fPIC", "-shared", "-fno-strict-aliasing", "-w")
ASAN = ("-fsanitize=address", "-fno-omit-frame-pointer")
HERE = Path(__file__).parent
HOST = HERE / "host.cuh"  # the header that a kernel includes as LMKIT_HOST
NUM_SMS = 3  # few, so that small problems take several waves
_U32x3 = ctypes.c_uint32 * 3


class EmulatedBackend:
    """The emulator. Every launch draws another order of threads and blocks."""

    def __init__(self, *, sanitize: bool, capability: Capability) -> None:
        self._flags = FLAGS + (ASAN if sanitize else ())
        self._capability = capability
        self._runtime = ctypes.CDLL(
            str(self._build(kernel_source(str(HERE / "emulator.cpp")), "emulator", {})), mode=ctypes.RTLD_GLOBAL
        )
        self._runtime.lm_launch.restype = ctypes.c_bool
        self.begin(0)

    def begin(self, seed: int) -> None:
        """Draw the orders from `seed` from now on."""
        self._seed = seed
        self.launches: list[str] = []  # names of the kernels that ran since

    def device_name(self) -> str:
        return "emulated"

    def num_sms(self) -> int:
        return NUM_SMS

    def capability(self) -> Capability:
        return self._capability

    def load(self, source: str, name: str, defines: dict[str, int]) -> Launch:
        library = ctypes.CDLL(str(self._build(kernel_source(source), name, defines)))
        apply, sizes = getattr(library, f"{name}_apply"), _argument_sizes(library, name)

        def launch(grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared: int) -> None:
            values = [_value(arg) for arg in args]
            given = [value.itemsize for value in values]
            assert given == sizes, f"{name}: arguments of {given} bytes, the kernel has {sizes}"
            addresses = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
            message = ctypes.create_string_buffer(512)
            self._seed += 1
            self.launches.append(name)
            if not self._runtime.lm_launch(
                apply, addresses, _U32x3(*grid), _U32x3(*block), ctypes.c_uint64(shared), ctypes.c_uint64(self._seed),
                message, ctypes.c_uint64(len(message)),
            ):  # fmt: skip
                raise RuntimeError(f"{source}: {name}: {message.value.decode()}")

        return launch

    def _build(self, text: str, name: str, defines: dict[str, int]) -> Path:
        flags = (*self._flags, f'-DLMKIT_HOST="{HOST.name}"', *(f"-D{k}={v}" for k, v in sorted(defines.items())))
        digest = hashlib.sha256("\0".join((text, HOST.read_text(), *flags, processor())).encode())
        folder = environment().cache_dir / "emulated"
        library = folder / f"{name}-{digest.hexdigest()[:24]}.so"
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            partial = library.with_suffix(f".{os.getpid()}")
            command = [compiler(), "-x", "c++", "-", *flags, f"-I{HERE}", "-o", str(partial)]
            built = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
            if built.returncode:
                raise UnsupportedError(f"{name} {defines}: {built.stderr[:4000]}")
            partial.replace(library)
        return library


def install(seed: int = 0, *, sanitize: bool = False, capability: Capability = (9, 0)) -> EmulatedBackend:
    """Run kernels for tensors on the CPU by an emulator. Raises UnsupportedError without g++."""
    backend = _backend(sanitize, capability)
    backend.begin(seed)
    module.BACKENDS["cpu"] = backend
    return backend


@cache
def _backend(sanitize: bool, capability: Capability) -> EmulatedBackend:
    """The one backend of each kind. There is only one, because kernels keep the code that they have loaded."""
    return EmulatedBackend(sanitize=sanitize, capability=capability)


def compiler() -> str:
    """The path of g++. Raises UnsupportedError if it is not installed."""
    found = shutil.which("g++")
    if found is None:
        raise UnsupportedError("kernels are emulated with g++, which is not installed")
    return found


@cache
def processor() -> str:
    """The processor's flags, which -march=native depends on. With them in the key, a cache on a shared disk does not
    give code of another machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith("flags")), "")


def _argument_sizes(library: ctypes.CDLL, name: str) -> list[int]:
    count = getattr(library, f"{name}_arguments")
    sizes = (ctypes.c_int * count(None))()
    count(sizes)
    return list(sizes)


def _value(arg: Any) -> np.ndarray:
    """The bytes at an argument's address, exactly as many as C reads there."""
    if isinstance(arg, Tensor):
        return np.array(arg.data_ptr(), np.uint64)
    if arg is None:
        return np.array(0, np.uint64)
    if isinstance(arg, bool | int):
        return np.array(arg, np.int32)
    return np.array(arg, np.float32) if isinstance(arg, float) else np.array(arg)
