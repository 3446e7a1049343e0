"""Without a kernel, a switch or a capture that fails, an engine on a GPU computes the same another way."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit.errors import ConfigError, EngineLostError
from lmkit.kernels.cuda import gemm_table, module
from lmkit.kernels.cuda import switches as switches_module
from lmkit.kernels.cuda.launcher import LaunchError
from lmkit.kernels.cuda.source import FOLDER
from lmkit.kernels.cuda.switches import switches, turn_off, turned_off
from lmkit.turbo.runners.gpu_sampler import GpuSampler
from tests import emulator
from tests.emulator import EmulatedBackend
from tests.emulator.device import EmulatedDevice
from tests.turbo.engine.test_cuda_engine import assert_alike, on_cpu, on_gpu, quantized, requests, tokens
from tests.turbo.engine.test_cuda_engine import checkpoint as checkpoint
from tests.turbo.engine.test_engine import run

pytestmark = pytest.mark.slow
__all__ = ["checkpoint", "quantized"]
# Each name with the kernels that still run, and those that do not.
RUNGS = {
    "kernels": ((), ("gemm", "decode_attention", "sample", "known_tokens")),
    "capture": (("gemm", "decode_attention"), ()),
    "argmax": (("sample",), ("argmax",)),
    "sampling.cu": (("gemm", "decode_attention"), ("sample", "argmax", "score")),
    "gemm_wide.cu": (("gemm", "dequantize"), ("arrange", "gemm_wide", "merge")),
    "gemm.cu": (("dequantize", "decode_attention"), ("gemm",)),
    "dequantize.cu": (("decode_attention",), ("dequantize", "gemm")),
    "decode_attention.cu": (("prefill_attention", "append", "gemm"), ("decode_attention",)),
    "prefill_attention.cu": (("decode_attention", "gemm"), ("prefill_attention",)),
    "append.cu": (("decode_attention", "gemm"), ("append",)),
    "norm.cu": (("decode_attention", "gemm"), ("norm_rows",)),
    "elementwise.cu": (("decode_attention", "gemm"), ("embedding", "rope_angles", "gated_activation")),
    "epilogue.cu": (("decode_attention", "gemm"), ("epilogue",)),
    "gemv.cu": (("decode_attention", "gemm"), ("gemv",)),
    "tokens.cu": (("decode_attention", "gemm"), ("known_tokens",)),
}
OPTIONS: dict[str, Any] = {"max_batch_size": 8, "max_step_tokens": 300, "max_model_len": 128}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedBackend]:
    """An emulated GPU, and a process in which nothing is turned off."""
    if shutil.which("g++") is None:
        pytest.skip("kernels are emulated with g++")
    monkeypatch.setattr(switches_module, "_TURNED_OFF", {})
    switches_module.read_anew()
    yield emulator.install(seed=3)
    module.BACKENDS.pop("cpu", None)
    module.counters.cache_clear()
    gemm_table.table.cache_clear()
    switches_module.read_anew()


def entries(file: str) -> set[str]:
    text = (FOLDER / file).read_text()
    return set(re.findall(r'extern "C" __global__ void (?:__launch_bounds__\(.*\)\s)?\s*(\w+)\(', text))


@pytest.fixture(scope="module")
def expected(quantized: Path) -> dict[str, Any]:
    return run(on_cpu(quantized, **OPTIONS), requests(max_tokens=4))


USUAL = "kernels", "sampling.cu", "gemm.cu", "decode_attention.cu"  # the others take other ways to the same results


@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.exhaustive) for name in RUNGS]
)
def test_each_rung_gives_the_tokens_of_the_cpu(
    quantized: Path, gpu: EmulatedBackend, expected: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMKIT_CUDA", f"{name}=off")
    switches_module.read_anew()
    engine = on_gpu(quantized, EmulatedDevice(), **OPTIONS)
    got = run(engine, requests(max_tokens=4))
    assert assert_alike(got, expected, 0.02) == 1
    plain = run(engine, requests(max_tokens=4, logprobs=None))  # greedy: `argmax` may choose them
    assert tokens(plain) == tokens(got)
    launched, (others, gone) = set(gpu.launches), RUNGS[name]
    assert set(others) <= launched
    assert launched.isdisjoint(gone)
    if name.endswith(".cu"):
        assert launched.isdisjoint(entries(name))


def test_every_file_has_entries() -> None:
    assert all(entries(path.name) for path in FOLDER.glob("*.cu"))


def test_what_is_turned_off_has_a_reason(gpu: EmulatedBackend) -> None:
    turn_off("gemm.cu", "wrong numbers")
    turn_off("overlap", "a fault")
    assert turned_off() == {"gemm.cu": "wrong numbers", "overlap": "a fault"}
    assert switches_module.off("norm.cu", "gemm.cu") == "gemm.cu is turned off: wrong numbers"
    assert not switches().overlap


class Capturing(EmulatedDevice):
    """Its kernels overlap, if they may, and captures fail as `fails` says."""

    def __init__(self, fails: Callable[[], Exception | None]) -> None:
        super().__init__()
        self.fails = fails

    def overlaps(self) -> bool:
        return switches().overlap

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        if (error := self.fails()) is not None:
            raise error
        return super().capture(launch)


def test_a_capture_that_fails_is_tried_without_programmatic_launch(quantized: Path, gpu: EmulatedBackend) -> None:
    device = Capturing(lambda: RuntimeError("programmatic launch in a graph") if switches().overlap else None)
    engine = on_gpu(quantized, device)
    assert engine.info.captured.startswith("decode steps of 3 sizes")
    assert turned_off() == {"overlap": "decode steps could not be captured: programmatic launch in a graph"}


def test_a_capture_that_always_fails_leaves_steps_without(
    quantized: Path, gpu: EmulatedBackend, expected: dict[str, Any]
) -> None:
    engine = on_gpu(quantized, Capturing(lambda: RuntimeError("no graphs here")), **OPTIONS)
    assert engine.info.captured.startswith("no decode steps: no graphs here; no mixed steps")
    assert assert_alike(run(engine, requests(max_tokens=4)), expected, 0.02) == 1
    assert isinstance(engine.runner._sampler, GpuSampler)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        LaunchError("gemm", 2, "out of memory"),
    ],
)
def test_no_room_for_graphs_is_one_line(quantized: Path, gpu: EmulatedBackend, error: Exception) -> None:
    with pytest.raises(ConfigError, match=r"^captured decode steps found no room in memory; lower .*: GPU: .+$"):
        on_gpu(quantized, Capturing(lambda: error))
    assert not turned_off()


def test_a_fault_in_the_first_steps_is_one_line(quantized: Path, gpu: EmulatedBackend) -> None:
    with pytest.raises(EngineLostError, match=r"the GPU refuses to go on after decode steps \(gemm: .*700\)"):
        on_gpu(quantized, Capturing(lambda: LaunchError("gemm", 700, "an illegal address")))
