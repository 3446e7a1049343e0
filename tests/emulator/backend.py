"""Compiles kernels with g++ and launches them on the CPU: a backend of lmkit.kernels.cuda.module."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import shutil
import subprocess
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, UntypedStorage

from lmkit.environment import environment
from lmkit.errors import UnsupportedError
from lmkit.kernels.cuda.gpus import Capability
from lmkit.kernels.cuda.module import Launch
from lmkit.kernels.cuda.source import kernel_source
from lmkit.kernels.cuda.switches import switches

FLAGS = "-std=c++17", "-march=native", "-fPIC", "-ftls-model=initial-exec", "-shared", "-fno-strict-aliasing", "-w"
RUNTIME, KERNEL = ("-O2",), ("-Og",)  # most kernels run for less time than g++ takes for them
# Calls before every access, which emulator.cpp has: no library of g++ is linked. -Og leaves memcpy, which has none.
WATCHED = "-O2", "-fsanitize=thread"
ASAN = ("-fsanitize=address", "-fno-omit-frame-pointer")
HERE = Path(__file__).parent
HOST = HERE / "host.cuh"  # the header that a kernel includes as LMKIT_HOST
PEERS = ("ranks.cu",)  # blocks wait for the same block of other ranks, so all ranks run them in the same order
NUM_SMS = 3  # few, so that small problems take several waves
_U32x3 = ctypes.c_uint32 * 3


class EmulatedBackend:
    """The emulator. Every launch draws another order of threads and blocks. Each thread of Python has a GPU of its
    own. `overlap`: kernels overlap on the device that it stands for, and what they do before they wait for each other
    is checked."""

    def __init__(self, *, sanitize: bool, capability: Capability, overlap: bool) -> None:
        self._flags = FLAGS + (ASAN if sanitize else ())
        self._capability, self._overlap = capability, overlap
        self._followed = weakref.WeakSet[UntypedStorage]()  # memory that is forgotten when its tensors are gone
        self._runtime = ctypes.CDLL(
            str(self._build(kernel_source(str(HERE / "emulator.cpp")), "emulator", {})), mode=ctypes.RTLD_GLOBAL
        )
        self._runtime.lm_launch.restype = ctypes.c_bool
        self._runtime.lm_prefetched.restype = self._runtime.lm_asked.restype = ctypes.c_uint64
        self.begin(0)

    def begin(self, seed: int) -> None:
        """Draw the orders from `seed` from now on."""
        self.barrier()
        self._runtime.lm_asked()
        self._seed = seed
        self.launches: list[str] = []  # names of the kernels that ran since

    def barrier(self) -> None:
        """All that was launched has ended, as at a copy on the stream."""
        self._runtime.lm_barrier()

    def prefetched(self) -> int:
        """Bytes that kernels have asked L2 for since the last call. All of them were copied later."""
        assert self._runtime.lm_asked() == 0, "L2 was asked for bytes that nothing has copied since"
        return int(self._runtime.lm_prefetched())

    def overlaps(self) -> bool:
        return self._overlap and switches().overlap

    def device_name(self) -> str:
        return "emulated"

    def num_sms(self) -> int:
        return NUM_SMS

    def capability(self) -> Capability:
        return self._capability

    def load(self, source: str, name: str, defines: dict[str, int]) -> Launch:
        return self._launcher(self._library(source, name, defines), source, name)

    def _launcher(self, library: ctypes.CDLL, source: str, name: str) -> Launch:
        apply, sizes = getattr(library, f"{name}_apply"), _argument_sizes(library, name)

        turns = itertools.count()

        def launch(grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared: int) -> None:
            values = [_value(arg) for arg in args]
            given = [value.itemsize for value in values]
            assert given == sizes, f"{name}: arguments of {given} bytes, the kernel has {sizes}"
            addresses = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
            message = ctypes.create_string_buffer(512)
            self._seed += 1
            turn = next(turns)
            self.launches.append(name)
            self._before(library, source, name, args)
            if self.overlaps():
                self._follow(args)
            if not self._runtime.lm_launch(
                apply, addresses, _U32x3(*grid), _U32x3(*block), ctypes.c_uint64(shared),
                ctypes.c_uint64(turn if source in PEERS else self._seed), ctypes.c_uint64(self._seed),
                self.overlaps(), message, ctypes.c_uint64(len(message)),
            ):  # fmt: skip
                raise RuntimeError(
                    f"{source}: {name}: {self._explained(library, source, name, message.value.decode())}"
                )
            self._after(library, source, name, block[0] * block[1] * block[2])

        return launch

    def _library(self, source: str, name: str, defines: dict[str, int]) -> ctypes.CDLL:
        """The compiled kernel."""
        return ctypes.CDLL(str(self._build(kernel_source(source), name, defines, watched=self._overlap)))

    def _before(self, library: ctypes.CDLL, source: str, name: str, args: Sequence[Any]) -> None:
        """Called before each launch, on its thread."""

    def _after(self, library: ctypes.CDLL, source: str, name: str, threads: int) -> None:
        """Called after each launch, on its thread."""

    def _explained(self, library: ctypes.CDLL, source: str, name: str, message: str) -> str:
        """An error of a kernel for its reader."""
        return message

    def _follow(self, args: Sequence[Any]) -> None:
        """See to it that what kernels write is forgotten with its tensor: another one may get the same memory."""
        for arg in args:
            if isinstance(arg, Tensor) and (memory := arg.untyped_storage()) not in self._followed:
                self._followed.add(memory)
                where = ctypes.c_uint64(memory.data_ptr()), ctypes.c_uint64(memory.nbytes())
                weakref.finalize(memory, self._runtime.lm_forget, *where).atexit = False

    def _build(self, text: str, name: str, defines: dict[str, int], *, watched: bool = False) -> Path:
        watch = WATCHED if watched and ASAN[0] not in self._flags else ()  # the two do not go together
        flags = (
            *(RUNTIME if name == "emulator" else KERNEL),
            *self._flags,
            *watch,
            f'-DLMKIT_HOST="{HOST.name}"',
            *(f"-D{k}={v}" for k, v in sorted(defines.items())),
        )
        headers = (path.read_text() for path in sorted(HERE.glob("**/*.*h")) if name == "emulator" or path == HOST)
        digest = hashlib.sha256("\0".join((text, *headers, *flags, processor())).encode())
        folder = environment().cache_dir / "emulated"
        library = folder / f"{name}-{digest.hexdigest()[:24]}.so"
        if not library.exists():
            partial = f"{library}.{os.getpid()}"
            assembler = f"{partial}.s"
            compiled = [compiler(), "-x", "c++", "-", *flags, f"-I{HERE}", "-S", "-o", assembler]
            linked = [compiler(), *self._flags, assembler, "-o", partial]
            build(library, f"{name} {defines}", text, [compiled, linked])
        return library


def build(library: Path, name: str, text: str, commands: Sequence[Sequence[str]]) -> None:
    """Run g++'s commands, which read `text` and end with the files that they write. Raises UnsupportedError."""
    library.parent.mkdir(parents=True, exist_ok=True)
    for command in commands:
        built = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
        if built.returncode:
            raise UnsupportedError(f"{name}: {built.stderr[:4000]}")
    for command in commands[:-1]:
        Path(command[-1]).unlink()
    Path(commands[-1][-1]).replace(library)


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
