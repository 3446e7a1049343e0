"""The self-test finds every kind of fault of every kernel, names it, and the engine goes on without it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmkit.errors import LMKitError, UnsupportedError
from lmkit.kernels.cuda.switches import turned_off
from lmkit.turbo.engine import self_test
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.engine.self_test_process import Time
from lmkit.turbo.request import SelfTest
from tests.emulator import EmulatedBackend, faults
from tests.emulator.faults import FaultyDevice
from tests.turbo.engine.test_cuda_engine import assert_alike, on_cpu, on_gpu, quantized, requests
from tests.turbo.engine.test_cuda_engine import checkpoint as checkpoint
from tests.turbo.engine.test_cuda_ladder import gpu
from tests.turbo.engine.test_engine import run

pytestmark = pytest.mark.slow
__all__ = ["checkpoint", "gpu", "quantized"]
OPTIONS: dict[str, Any] = {"max_batch_size": 2, "max_step_tokens": 8, "max_model_len": 64, "selftest": "auto"}
FAULTS = {
    "gemm=wrong": ("gemm.cu", "errors of"),
    "decode_attention=unsteady": ("decode_attention.cu", "another result the second time"),
    "norm_rows=refused": ("norm.cu", "invalid argument"),
    "prefill_attention=uncompiled": ("prefill_attention.cu", "planted"),
    "rope_angles=faults": ("elementwise.cu", "an illegal memory access"),
    "gemm=dies@7": ("gemm.cu", "SIGKILL"),
    "argmax=wrong": ("argmax", "greedy tokens are not those of sampling"),
    "sample=wrong": ("sampling.cu", "sampled tokens are not the host's"),
    "gemm=wrong/early": ("overlap", "steps with programmatic launch give something else"),
    "decode_attention=dies/early": ("overlap", "SIGKILL"),
    "gemm=wrong/replayed": ("capture", "captured steps give something else than their launches"),
    "rope_angles=faults/replayed": ("capture", "an illegal memory access"),
}

USUAL = "gemm=wrong", "gemm=dies@7", "gemm=wrong/replayed"


class OfTests(FaultyDevice):
    self_test = "tests.emulator.self_test_process"


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(self_test, "folder", lambda: tmp_path)
    monkeypatch.setattr(self_test, "SECONDS", None)  # emulated kernels are slow
    return tmp_path


@pytest.fixture(scope="module")
def expected(quantized: Path) -> dict[str, Any]:
    return run(on_cpu(quantized, **OPTIONS), requests(max_tokens=3))


def started(path: Path, gpu: EmulatedBackend, monkeypatch: pytest.MonkeyPatch, planted: str, **options: Any) -> Engine:
    """An engine on a GPU with faults, and its self-test on the same GPU."""
    monkeypatch.setenv(faults.VARIABLE, planted)
    monkeypatch.setattr(gpu, "load", gpu.load)  # what is planted ends with the test
    device = OfTests(planted)
    faults.plant(gpu, planted, device)
    return on_gpu(path, device, **(OPTIONS | options))


def result(engine: Engine) -> SelfTest:
    assert engine.info.selftest is not None
    return engine.info.selftest


def test_without_faults_nothing_is_turned_off(
    quantized: Path, gpu: EmulatedBackend, monkeypatch: pytest.MonkeyPatch, kept: Path
) -> None:
    engine = started(quantized, gpu, monkeypatch, "")
    found = result(engine)
    assert (found.off, found.problem, turned_off()) == ({}, "", {})
    assert found.checks > 100
    assert self_test.results() == [found]
    monkeypatch.setattr(self_test, "_tested", None)  # the result is kept
    assert result(on_gpu(quantized, OfTests(), **(OPTIONS | {"selftest": "require"}))) == found
    assert on_gpu(quantized, OfTests(), **(OPTIONS | {"selftest": "off"})).info.selftest is None


@pytest.mark.parametrize(
    "planted",
    [name if name in USUAL else pytest.param(name, marks=pytest.mark.exhaustive) for name in FAULTS],
)
def test_a_fault_is_named_and_the_engine_goes_on_without_the_kernel(
    quantized: Path, gpu: EmulatedBackend, expected: dict[str, Any], planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = started(quantized, gpu, monkeypatch, planted)
    name, reason = FAULTS[planted]
    assert list(result(engine).off) == [name]
    assert reason in result(engine).off[name]
    assert turned_off() == result(engine).off
    assert assert_alike(run(engine, requests(max_tokens=3)), expected, 0.02) == 1


def test_with_require_a_fault_refuses_the_start(
    quantized: Path, gpu: EmulatedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedError, match=r"^--selftest require: norm.cu is turned off: norm_rows: invalid"):
        started(quantized, gpu, monkeypatch, "norm_rows=refused", selftest="require")


def test_what_there_is_no_time_for_is_said_and_tested_at_the_next_start(
    quantized: Path, gpu: EmulatedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "SECONDS", 0.0)
    found = result(started(quantized, gpu, monkeypatch, "gemm=wrong"))
    assert (found.off, found.problem, found.checks) == ({}, "", 0)
    assert found.untested[-3:] == ("each call of steps", "sampling", "captured steps, and programmatic launch")
    assert "no time for products of 1 tokens, products of " in found.text
    complete, given = msgspec.structs.replace(found, untested=()), list[float | None]()
    monkeypatch.setattr(self_test, "_tested", lambda query, device: given.append(query.seconds) or complete)
    for mode in ("auto", "auto", "require"):
        assert result(on_gpu(quantized, OfTests(), **(OPTIONS | {"selftest": mode}))) == complete
    assert given == [0.0]  # what is complete is not tested again


def test_time_ends_before_what_is_tested_last() -> None:
    time = Time(1000.0)
    assert time.allows("one", 0.5)
    assert not time.allows("two", 0.0)
    assert Time(None).allows("three", 0.0)
    assert time.lacked == ["two"]


@pytest.mark.exhaustive
def test_a_kernel_that_hangs_is_killed(quantized: Path, gpu: EmulatedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "HANG_SECONDS", 30.0)
    assert result(started(quantized, gpu, monkeypatch, "embedding=hangs")).off == {
        "elementwise.cu": "the process that tested it hung"
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(64))
def test_with_random_faults_tokens_are_right_or_what_is_broken_is_said(
    quantized: Path, gpu: EmulatedBackend, expected: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    names = (
        "gemm", "decode_attention", "prefill_attention", "norm_rows", "embedding", "rope_angles", "append", "sample",
        "argmax", "known_tokens", "gemv", "dequantize", "gated_activation",
    )  # fmt: skip
    kinds = [kind for kind in faults.KINDS if kind != "hangs"]
    planted = f"{draw.choice(names)}={draw.choice(kinds)}@{draw.randint(1, 40)}"
    try:
        engine = started(quantized, gpu, monkeypatch, planted)
        got = run(engine, requests(max_tokens=3))  # a fault may come after the self-test's last launch
    except LMKitError:  # its text is what is broken
        return
    if all(not output.error for parts in got.values() for output in parts):
        assert assert_alike(got, expected, 0.02) == 1, planted
