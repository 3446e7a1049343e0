"""Kernels: compiled at first use, launched on torch's current stream, on memory that torch owns.

    kernel = Kernel("gemm.cu", "gemm", GROUP=128, TILES=2)     # one entry point of one file, for one set of defines
    kernel((grid_x, grid_y), 128, [x, packed, y, 4096, 1e-5], shared=65536)

Arguments follow C's rules and nothing converts them, so the Python type decides: a tensor is the address of its first
element, None is a null pointer, an int is `int`, a float is `float`. A numpy scalar has its own type (np.int64 for
`long long`).

For tensors on a GPU, NVRTC compiles through CuPy, which keeps compiled code in its cache folder. Tensors on the CPU
have a backend only if one was put into BACKENDS, as the tests' emulator does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lmkit.devices import DEVICES
from lmkit.errors import UnsupportedError
from lmkit.kernels.cuda.cubin import cubin, first_error
from lmkit.kernels.cuda.gpus import EARLY_CAPABILITY, MIN_CAPABILITY, Capability, gpu_of, version
from lmkit.kernels.cuda.launcher import DriverLaunch, launcher_problem
from lmkit.kernels.cuda.source import kernel_source, options
from lmkit.kernels.cuda.switches import ASKED, switches, turn_off, turned_off
from lmkit.log import get_logger

log = get_logger(__name__)

Dim = int | tuple[int, ...]
Launch = Callable[[tuple[int, ...], tuple[int, ...], Sequence[Any], int], None]  # grid, block, arguments, shared bytes

NUM_COUNTERS = 1 << 16
EXACT = ("gemm_wide.cu",)  # have instructions that exist on one architecture only
HALVES = (torch.float16, torch.bfloat16)  # dtypes of activations


class Backend(Protocol):
    """A device, or an emulator of one, that runs kernels."""

    def load(self, source: str, name: str, defines: dict[str, int]) -> Launch:
        """Compile an entry point of a file in csrc. Raises UnsupportedError if that is not possible."""

    def device_name(self) -> str:
        """The device's product name."""

    def num_sms(self) -> int:
        """The number of streaming multiprocessors."""

    def capability(self) -> Capability:
        """Compute capability."""

    def overlaps(self) -> bool:
        """Whether kernels begin while the one before them ends."""


BACKENDS: dict[str, Backend] = {}  # by type of device; "cuda" appears with its first kernel


class Kernel:
    """`name` of csrc/`source`, compiled with `defines`. The same arguments give the same compiled code."""

    def __init__(self, source: str, name: str, **defines: int) -> None:
        self.source, self.name, self.defines = source, name, defines
        self._launch: dict[Backend, Launch] = {}

    def __call__(self, grid: Dim, block: Dim, args: Sequence[Any], *, shared: int = 0) -> None:
        """Launch. `shared`: bytes of dynamic shared memory. An empty grid launches nothing."""
        grid_size, block_size = _three(grid), _three(block)
        if 0 in grid_size:
            return
        device = next(arg for arg in args if isinstance(arg, Tensor)).device.type
        launch = self._launch.get(where := backend(device)) or self._load(where)
        launch(grid_size, block_size, args, shared)

    def compile(self, device: str) -> None:
        """Compile now, not at the first launch: a captured step must not compile. Any thread may call this."""
        if (where := backend(device)) not in self._launch:
            self._load(where)

    def _load(self, where: Backend) -> Launch:
        self._launch[where] = launch = where.load(self.source, self.name, self.defines)
        return launch


def compile_all(kernels: Iterable[Kernel], device: str) -> None:
    """Compile each kernel once, several at a time. NVRTC takes a second or two for one."""
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        list(pool.map(lambda kernel: kernel.compile(device), set(kernels)))


def _three(dim: Dim) -> tuple[int, ...]:
    return (dim, 1, 1) if isinstance(dim, int) else (*dim, 1, 1)[:3]


def backend(device: str) -> Backend:
    """The backend of a type of device. Raises UnsupportedError if kernels cannot run on it."""
    if device not in BACKENDS:
        if (problem := missing()) is not None:
            raise UnsupportedError(f"CUDA kernels: {problem}")
        BACKENDS["cuda"] = CupyBackend()
    return BACKENDS[device]


def missing() -> str | None:
    """Why CUDA kernels do not run here, or None."""
    if not switches().kernels:
        return f"CUDA kernels are turned off: {turned_off().get('kernels', ASKED)}"
    return _missing()


@cache
def _missing() -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        return f"the GPU has compute capability {version(capability)}; {version(MIN_CAPABILITY)} is the least"
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except ImportError:
        return "CuPy is missing: pip install 'lmkit[cuda]' (CUDA 13) or 'lmkit[cuda12]'"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy finds no GPU: {error}"
    return None


TORCH = "torch:"


def tensor_device(device: str) -> str:
    """The device of tensors. Those of an emulated GPU are on the CPU, and those of `torch:cuda:1`, where torch's own
    operations compute instead of kernels, on `cuda:1`."""
    if device.startswith(TORCH):
        return device.removeprefix(TORCH)
    if "cpu" in BACKENDS:
        return "cpu"
    return DEVICES[device].tensors if device in DEVICES else device


def is_available() -> bool:
    """Whether kernels can run, on a GPU or emulated."""
    return switches().kernels and (bool(BACKENDS) or missing() is None)


def load_anew() -> None:
    """Load the kernels of a GPU anew when they are launched next: switches have changed."""
    BACKENDS.pop("cuda", None)


def software() -> str:
    """The GPU and what compiles and launches its kernels, with versions."""
    import cupy
    from cupy.cuda import nvrtc

    versions = {
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "NVRTC": ".".join(map(str, nvrtc.getVersion())),
        "CuPy": cupy.__version__,
        "torch": torch.__version__,
    }
    return ", ".join([torch.cuda.get_device_name(), *(f"{name} {version}" for name, version in versions.items())])


@cache
def counters(device: str) -> Tensor:
    """int32 [NUM_COUNTERS], zero between kernels. The last block of a kernel that counts with them resets them."""
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


class CupyBackend:
    """NVRTC through CuPy, and launches by the driver or by CuPy, on torch's current device and stream."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        # Otherwise cuBLAS, which multiplies beside our kernels, may add 16-bit parts of a sum in 16 bits.
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def device_name(self) -> str:
        return torch.cuda.get_device_name()

    def num_sms(self) -> int:
        return int(torch.cuda.get_device_properties().multi_processor_count)

    def capability(self) -> Capability:
        major, minor = torch.cuda.get_device_capability()
        return major, minor

    def load(self, source: str, name: str, defines: dict[str, int]) -> Launch:
        try:
            function = self._compiled(source, defines).get_function(name)
            limit = function.max_dynamic_shared_size_bytes
        except (RuntimeError, ImportError, self._cupy.cuda.compiler.CompileException) as error:
            log.debug("%s: %s", source, error)
            raise UnsupportedError(
                f"{source} cannot be compiled: {first_error(str(error))}; {without(source)}"
            ) from error
        start = self._by_driver(name, function) if self._has_launcher() else self._by_cupy(function)

        def launch(grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared: int) -> None:
            nonlocal limit
            if shared > limit:
                function.max_dynamic_shared_size_bytes = limit = shared
            start(grid, block, args, shared)

        return launch

    def _compiled(self, source: str, defines: dict[str, int]) -> Any:
        text, cupy = kernel_source(source), self._cupy
        if source not in EXACT:
            return cupy.RawModule(code=text, options=options(defines), backend="nvrtc")
        from cupy.cuda import nvrtc

        arch = gpu_of(self.capability()).arch
        return cupy.RawModule(path=str(cubin(nvrtc, text, options(defines), arch)))

    def overlaps(self) -> bool:
        return self._has_launcher() and switches().overlap and self.capability() >= EARLY_CAPABILITY

    def _has_launcher(self) -> bool:
        """Whether launches are the driver's."""
        if switches().launcher and (reason := launcher_problem()) is not None:
            turn_off("launcher", reason)
        return switches().launcher

    def _by_driver(self, name: str, function: Any) -> Launch:
        start = DriverLaunch(name, function.kernel.ptr, early=self.overlaps())
        return lambda grid, block, args, shared: start(
            grid, block, args, shared, torch.cuda.current_stream().cuda_stream
        )

    def _by_cupy(self, function: Any) -> Launch:
        streams: dict[int, Any] = {}

        def launch(grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared: int) -> None:
            handle = torch.cuda.current_stream().cuda_stream
            if handle not in streams:
                streams[handle] = self._cupy.cuda.Stream.from_external(torch.cuda.current_stream())
            with streams[handle]:
                function(grid, block, tuple(map(_argument, args)), shared_mem=shared)

        return launch


def without(source: str) -> str:
    """How to go on without the kernels of a file."""
    return f"{ASKED}={source}=off goes on without it"


def _argument(value: Any) -> Any:
    """The value as CuPy passes it on. CuPy's own rule is 64 bits for a Python int and double for a float."""
    if isinstance(value, Tensor):
        return np.uint64(value.data_ptr())
    if value is None:
        return np.uint64(0)
    if isinstance(value, bool | int):
        return np.int32(value)
    return np.float32(value) if isinstance(value, float) else value
