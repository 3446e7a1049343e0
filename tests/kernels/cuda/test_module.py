"""Launches as CuPy would see them: nothing here needs it, or a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lmkit.errors import UnsupportedError
from lmkit.kernels.cuda import module
from lmkit.kernels.cuda.module import CupyBackend, Kernel
from lmkit.kernels.cuda.source import FOLDER, kernel_source, options
from lmkit.kernels.cuda.switches import Switches


class FakeFunction:
    def __init__(self) -> None:
        self.max_dynamic_shared_size_bytes = 49152
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int) -> None:
        self.calls.append((grid, block, args, shared_mem, self.max_dynamic_shared_size_bytes))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    function = FakeFunction()

    def raw_module(*, code: str, options: tuple[str, ...], backend: str) -> SimpleNamespace:
        fake.modules.append((code, options, backend))
        return SimpleNamespace(get_function=lambda name: function)

    fake = SimpleNamespace(modules=[], function=function, RawModule=raw_module)
    fake.cuda = SimpleNamespace(Stream=SimpleNamespace(from_external=lambda stream: nullcontext()))
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
    monkeypatch.setattr(module, "switches", lambda: Switches(overlap=overlap))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    args = [torch.zeros(1), 3]
    Kernel("ptx.cuh", "any")(2, 64, args, shared=50000)
    early = capability == (9, 0) and overlap
    assert launches == [("any", 99, early, (2, 1, 1), (64, 1, 1), args, 50000, 7)]
    assert cupy.function.max_dynamic_shared_size_bytes == 50000
    assert module.backend("cpu").overlaps() == early


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
