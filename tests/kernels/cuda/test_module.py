"""Launches as CuPy would see them: nothing here needs it, or a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lmkit.errors import UnsupportedError
from lmkit.kernels.cuda import module
from lmkit.kernels.cuda import switches as switches_module
from lmkit.kernels.cuda.cubin import cubin
from lmkit.kernels.cuda.module import CupyBackend, Kernel
from lmkit.kernels.cuda.source import FOLDER, kernel_source, options
from lmkit.kernels.cuda.switches import Switches, switches, turned_off


class FakeFunction:
    def __init__(self) -> None:
        self.max_dynamic_shared_size_bytes = 49152
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int) -> None:
        self.calls.append((grid, block, args, shared_mem, self.max_dynamic_shared_size_bytes))


class CompileError(Exception):
    pass


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    function = FakeFunction()

    def raw_module(*, code: str, options: tuple[str, ...], backend: str) -> SimpleNamespace:
        fake.modules.append((code, options, backend))
        return SimpleNamespace(get_function=lambda name: function)

    fake = SimpleNamespace(modules=[], function=function, RawModule=raw_module)
    fake.cuda = SimpleNamespace(
        Stream=SimpleNamespace(from_external=lambda stream: nullcontext()),
        compiler=SimpleNamespace(CompileException=CompileError),
    )
    monkeypatch.setitem(__import__("sys").modules, "cupy", fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setitem(module.BACKENDS, "cpu", CupyBackend())
    monkeypatch.setattr(module, "switches", lambda: Switches(launcher=False))
    return fake


def test_arguments_have_the_sizes_of_c(cupy: SimpleNamespace) -> None:
    x = torch.zeros(4)
    kernel = Kernel("ptx.cuh", "any", LM_BF16=1)
    kernel((2, 3), 64, [x, None, 5, True, 1.5, np.int64(6), x[1:]], shared=50000)
    ((grid, block, args, shared, limit),) = cupy.function.calls
    assert (grid, block, shared, limit) == ((2, 3, 1), (64, 1, 1), 50000, 50000)
    assert [type(arg) for arg in args] == [np.uint64, np.uint64, np.int32, np.int32, np.float32, np.int64, np.uint64]
    assert (args[0], args[1], args[6]) == (x.data_ptr(), 0, x.data_ptr() + 4)
    kernel(1, 32, [x])
    assert len(cupy.modules) == 1, "compiled once"
    assert cupy.modules[0][1] == options({"LM_BF16": 1})
    assert cupy.function.calls[1][4] == 50000, "the limit is not lowered again"


@pytest.mark.parametrize(("capability", "overlap"), [((9, 0), True), ((9, 0), False), ((8, 9), True)])
def test_the_driver_launches_early_where_it_can(
    cupy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], overlap: bool
) -> None:
    launches: list[tuple[Any, ...]] = []

    def by_driver(name: str, function: int, *, early: bool) -> Any:
        return lambda *given: launches.append((name, function, early, *given))

    cupy.function.kernel = SimpleNamespace(ptr=99)
    monkeypatch.setattr(module, "DriverLaunch", by_driver)
    monkeypatch.setattr(module, "launcher_problem", lambda: None)
    monkeypatch.setattr(module, "switches", lambda: Switches(overlap=overlap))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    args = [torch.zeros(1), 3]
    Kernel("ptx.cuh", "any")(2, 64, args, shared=50000)
    early = capability == (9, 0) and overlap
    assert launches == [("any", 99, early, (2, 1, 1), (64, 1, 1), args, 50000, 7)]
    assert cupy.function.max_dynamic_shared_size_bytes == 50000
    assert module.backend("cpu").overlaps() == early


class FakeNvrtc:
    """NVRTC as CuPy has it. Text with an error in it does not compile."""

    class NVRTCError(Exception):
        pass

    def __init__(self) -> None:
        self.compiled: list[tuple[str, ...]] = []

    def getVersion(self) -> tuple[int, int]:
        return 13, 0

    def createProgram(self, text: str, name: str, headers: Any, names: Any) -> str:
        return text

    def compileProgram(self, program: str, flags: tuple[str, ...]) -> None:
        self.compiled.append(flags)
        if "error" in program:
            raise self.NVRTCError

    def getCUBIN(self, program: str) -> bytes:
        return program.encode()

    def getProgramLog(self, program: str) -> str:
        return "a warning\nkernel.cu(3): error: no such thing\nmore"

    def destroyProgram(self, program: str) -> None:
        pass


def test_code_for_one_architecture_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LMKIT_CACHE_DIR", str(tmp_path))
    nvrtc = FakeNvrtc()
    path = cubin(nvrtc, "text", options({"A": 1}), "90a")
    assert path.read_bytes() == b"text"
    assert path == cubin(nvrtc, "text", options({"A": 1}), "90a")
    assert path != cubin(nvrtc, "text", options({"A": 2}), "90a")
    assert len(nvrtc.compiled) == 2
    assert {"--gpu-architecture=sm_90a", "-ftz=true", "-DA=1"} <= set(nvrtc.compiled[0])
    with pytest.raises(UnsupportedError, match=r"NVRTC: kernel.cu\(3\): error: no such thing$"):
        cubin(nvrtc, "an error", (), "90a")
    assert len(list(path.parent.iterdir())) == 2, "nothing is left of the failure"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (CompileError("2 lines\nx.cu(7): error: expected a ;"), r"x.cu\(7\): error: expected a ;"),
        (RuntimeError("CUDA_ERROR_NOT_FOUND: named symbol not found"), "CUDA_ERROR_NOT_FOUND: named symbol not found"),
    ],
)
def test_what_cannot_be_compiled_is_one_line(cupy: SimpleNamespace, error: Exception, said: str) -> None:
    def fail(**given: Any) -> Any:
        raise error

    cupy.RawModule = fail
    with pytest.raises(UnsupportedError, match=f"^gemv.cu cannot be compiled: {said}; LMKIT_CUDA=gemv.cu=off goes on"):
        Kernel("gemv.cu", "gemv")(1, 32, [torch.zeros(1)])


def test_without_the_drivers_launch_cupy_launches(cupy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches_module, "_TURNED_OFF", {})
    monkeypatch.setattr(module, "switches", switches)
    monkeypatch.setattr(module, "launcher_problem", lambda: "no such launch")
    switches_module.read_anew()
    Kernel("ptx.cuh", "any")(1, 32, [torch.zeros(1)])
    assert len(cupy.function.calls) == 1
    assert turned_off() == {"launcher": "no such launch"}
    switches_module.read_anew()


def test_an_empty_grid_is_no_launch(cupy: SimpleNamespace) -> None:
    Kernel("ptx.cuh", "any")((0, 3), 64, [torch.zeros(1)])
    assert not cupy.modules


def test_a_source_holds_all_that_it_includes() -> None:
    for path in FOLDER.glob("*.cu"):
        assert '#include "' not in kernel_source(path.name), path


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_said() -> None:
    with pytest.raises(UnsupportedError, match="CUDA kernels: torch finds no NVIDIA GPU"):
        module.backend("cuda")
