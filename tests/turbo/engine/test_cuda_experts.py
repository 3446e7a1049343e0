"""Mixtures of experts on device "cuda", emulated: captured steps, whichever experts the tokens have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.random_llama import make_awq
from lmkit.config import EngineConfig
from lmkit.kernels import ops
from lmkit.kernels.cuda import gemm_experts
from lmkit.kernels.cuda.switches import parse
from lmkit.models.loader import load_model
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.runners.captured_sizes import Size
from lmkit.turbo.runners.cuda import CudaRunner
from lmkit.turbo.runners.cuda_captured import capturable, mixtures
from lmkit.turbo.runners.cuda_device import CudaDevice
from lmkit.turbo.runners.staging import StagedInputs
from tests import emulator
from tests.models import tiny
from tests.turbo.engine.test_cuda_engine import (  # noqa: F401  (device: a fixture)
    SMALL,
    assert_alike,
    device,
    emulated,
    requests,
)
from tests.turbo.engine.test_engine import run

pytestmark = pytest.mark.slow
READS = {"_local_scalar_dense", "unique_consecutive", "unique_dim", "nonzero", "item"}  # the host waits for the device
F16 = torch.float16
SHAPE = {"hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 32, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """W4 in groups of 32: qwen2-moe has a shared expert and a layer without experts."""
    path = tmp_path_factory.mktemp("models")
    sizes = SHAPE | {"shared_expert_intermediate_size": 64, "intermediate_size": 96}
    tiny.make(path / "dense", "qwen2-moe", **sizes).half().save_pretrained(path / "dense")
    make_awq(path / "dense", path / "w4", group=32)
    return path / "w4"


def on_gpu(path: Path, device: CudaDevice, activations: Any = "auto", **options: Any) -> Engine:  # noqa: F811
    config = EngineConfig(**(SMALL | {"max_model_len": 96} | options))
    return Engine.of(load_model(path, device="cuda", activations=activations), config, device=device)


class Watching(TorchDispatchMode):
    """Collects the names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.exhaustive
def test_steps_with_experts_are_captured(
    experts: Path,
    device: CudaDevice,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A captured step never reads on the host which experts its tokens have."""
    engine, watching = on_gpu(experts, device), Watching()
    assert engine.info.captured.startswith("decode steps of ")
    assert isinstance(engine.runner, CudaRunner)
    captured = engine.runner.captured
    forward = captured._forward

    def watched(inputs: Any) -> torch.Tensor:
        with watching:
            return forward(inputs)

    monkeypatch.setattr(captured, "_forward", watched)
    apart = []
    for mixture in mixtures(engine.runner.decoder):
        monkeypatch.setattr(mixture, "_computed_apart", lambda *x: apart.append(x))
    got = run(engine, requests(max_tokens=6))
    if device.tensors == "cpu":
        assert watching.names
    assert not watching.names & READS
    assert not apart
    exact = EngineConfig(**(SMALL | {"max_model_len": 96, "device": "cpu"}))
    want = run(Engine.of(load_model(experts, activations="exact"), exact), requests(max_tokens=6))
    assert_alike(got, want, 0.05)

    monkeypatch.setattr(gemm_experts, "switches", lambda: parse("experts=off"))
    engine = on_gpu(experts, device)
    assert engine.info.captured == "no steps: each expert is called by itself"
    assert_alike(run(engine, requests(max_tokens=6)), want, 0.05)


def test_int8_inputs(
    experts: Path,
    device: CudaDevice,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps are captured as with exact inputs, and results are those of each expert by itself."""
    engine = on_gpu(experts, device, "int8", max_batch_size=2)
    assert engine.info.captured.startswith("decode steps of ")
    tables = [each.table for mixture in mixtures(engine.runner.decoder) for each in mixture.together(1, F16) or ()]
    assert [table.packed.int8 for table in tables] == [True, True]
    got = run(engine, requests(max_tokens=5)[:2])
    monkeypatch.setattr(gemm_experts, "switches", lambda: parse("experts=off"))
    apart = on_gpu(experts, device, "int8", max_batch_size=2)
    assert apart.info.captured == "no steps: each expert is called by itself"
    assert_alike(got, run(apart, requests(max_tokens=5)[:2]), 0.02)


@pytest.mark.exhaustive
@emulated
def test_kernels_that_overlap_wait_for_each_other(
    experts: Path,
    device: CudaDevice,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in test_cuda_engine.py. Every op of the mixtures has a kernel."""
    gpu, put = emulator.install(seed=6, overlap=True), StagedInputs.put

    def behind_a_barrier(*args: Any, **options: Any) -> Any:
        gpu.barrier()
        return put(*args, **options)

    monkeypatch.setattr(StagedInputs, "put", behind_a_barrier)
    engine = on_gpu(experts, device, max_batch_size=2)
    before = {op.name: sum(op.fallbacks.values()) for op in (ops.route, ops.expert_places, ops.sum_places)}
    outputs = run(engine, requests(max_tokens=3)[:2])
    assert all(sum(len(part.token_ids) for part in parts) == 3 for parts in outputs.values())
    assert engine.stats().failed_steps == 0
    assert {"route", "expert_places", "sum_places", "add_shared", "gemm"} <= set(gpu.launches)
    assert before == {op.name: sum(op.fallbacks.values()) for op in (ops.route, ops.expert_places, ops.sum_places)}


@emulated
def test_steps_with_many_tokens_for_an_expert_are_not_captured(experts: Path, device: CudaDevice) -> None:  # noqa: F811
    """They call each expert, whose tokens only the host knows. 3 of 7 experts have 1024 tokens here."""
    sizes = [Size(4, 4), Size(512, 4), Size(1024, 4)]
    assert capturable(sizes, on_gpu(experts, device).runner.decoder) == sizes[:2]
