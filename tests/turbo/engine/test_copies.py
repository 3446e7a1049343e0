"""Copies of packed weights in 16 bits on an emulated GPU: what is planned, made and multiplied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit.config import EngineConfig
from lmkit.kernels import ops
from lmkit.kernels.cuda import gemm_pack, gemm_table, linear
from lmkit.kernels.cuda.switches import parse
from lmkit.kv_dtype import FLOAT16
from lmkit.models import load_spec
from lmkit.models.loader import load_model
from lmkit.turbo.engine import copies, describe
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.engine.memory import plan_memory
from lmkit.turbo.runners.cuda import CudaRunner
from lmkit.turbo.runners.cuda_device import CudaDevice
from tests.kernels.cuda.test_linear import F16, F32, weight
from tests.turbo.engine import test_cuda_engine
from tests.turbo.engine.test_cuda_engine import SMALL, assert_alike, emulated, on_cpu, on_gpu, requests
from tests.turbo.engine.test_engine import run
from tests.turbo.engine.test_memory import CONFIG

device, checkpoint, quantized = test_cuda_engine.device, test_cuda_engine.checkpoint, test_cuda_engine.quantized
GIB = 1 << 30


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "switches", lambda: parse("copies=on"))


def kept(engine: Engine) -> list[Any]:
    """The packed weights of the layers that have copies."""
    assert isinstance(engine.runner, CudaRunner)
    linears = [part for layer in engine.runner.decoder.layers for part in layer.linears]
    return [packed.weight for part in linears for packed in part.packed or () if packed.weight.copy is not None]


@emulated
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_copy_gives_the_results_of_the_dequantized_weight(
    activation: str | None, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_table, "COPY_FROM", 4)
    packed = gemm_pack.pack(weight(88, 256), activation)
    copied = gemm_pack.replace(packed, copy=gemm_pack.dequantize(packed, F16))
    assert gemm_table.choose(3, copied, F16) == gemm_table.choose(3, packed, F16) is not None
    assert gemm_table.choose(4, copied, F16) is None
    x, bias, op = torch.randn(5, 256).half(), torch.randn(88), ops.linear_w4a16.named("cuda")
    for dtype in (None, F32):
        assert torch.equal(op(x, copied, bias, dtype=dtype), linear.library(x, packed, bias, dtype))
    streams = torch.ones(2, 5, packed.num_results)
    op(x, copied, bias, residual=streams[0])
    assert torch.equal(streams[0], linear.library(x, packed, bias, residual=streams[1]))


@emulated
def test_inspect_shows_their_memory(quantized: Path, device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they would take, and what a server with these switches gives them."""
    monkeypatch.setattr(describe, "resolve_device", lambda config: device)

    def sizes() -> list[Any]:
        serving = describe.describe_model(str(quantized), EngineConfig(**SMALL))["serving"]
        return [serving["copies_bytes"], serving["possible_copies_bytes"]]

    off, possible = sizes()
    assert off is None
    monkeypatch.setattr(copies, "switches", lambda: parse("copies=on"))
    assert sizes() == [possible, possible]
    assert possible == 2 * 2 * 128 * (2 * 256 + 2 * 128 + 3 * 192)


@emulated
def test_engines_keep_and_multiply_what_was_planned(
    quantized: Path, device: CudaDevice, switched_on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_table, "COPY_FROM", 4)
    multiplied = []
    product = linear._product
    monkeypatch.setattr(linear, "_product", lambda x, w, *rest: multiplied.append(w) or product(x, w, *rest))
    engine = on_gpu(quantized, device)
    weights = kept(engine)
    assert len(weights) == 4 * 2, "q with k and v, o, gate with up, and down of two layers"
    assert engine.info.memory["copies"] == sum(weight.copy.nbytes for weight in weights) > 0
    wanted = requests(max_tokens=4)
    assert assert_alike(run(engine, wanted), run(on_cpu(quantized), wanted), 0.02) == 1
    assert {id(w) for w in multiplied} == {id(weight.copy) for weight in weights}
    decoder = load_model(quantized, device="cuda")
    given = Engine.of(decoder, EngineConfig(**SMALL), device=device)
    assert given.info.memory["copies"] == engine.info.memory["copies"]
    assert len(kept(given)) == len(weights)


@emulated
def test_engines_that_keep_none(checkpoint: Path, quantized: Path, device: CudaDevice, switched_on: None) -> None:
    """Those of dense weights, with adapters, and float32."""
    assert "copies" not in on_gpu(checkpoint, device).info.memory
    assert not kept(on_gpu(quantized, device, adapter_root=str(quantized.parent)))
    assert not kept(on_gpu(quantized, device, dtype="float32"))


@emulated
def test_off_by_default(quantized: Path, device: CudaDevice) -> None:
    engine = on_gpu(quantized, device)
    assert not kept(engine)
    assert "copies" not in engine.info.memory


def test_copies_are_left_out_where_memory_is_short() -> None:
    def planned(available: int, wanted: int, **options: Any) -> tuple[int, int]:
        config = EngineConfig(max_batch_size=3, **options).on("cuda")
        plan = plan_memory(load_spec(CONFIG), config, [(FLOAT16, FLOAT16)] * 4, GIB, available, wanted)
        assert plan.total + plan.runtime <= available
        return plan.copies, plan.kv

    copied, kv = planned(8 * GIB, 2 * GIB)
    assert copied == 2 * GIB
    assert kv == planned(8 * GIB, 0)[1], "there is room for all sequences"
    assert planned(8 * GIB, 4 * GIB)[0] == 0, "more than half of what is left"
    assert planned(8 * GIB, 2 * GIB, kv_memory=3 * GIB) == (2 * GIB, 3 * GIB)
    assert planned(8 * GIB, 2 * GIB, kv_memory=5 * GIB) == (0, 5 * GIB)
