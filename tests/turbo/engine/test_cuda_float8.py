"""An engine whose products are of float8 weights in blocks and of inputs rounded to float8, on an emulated GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit.kernels import ops
from lmkit.kernels.cuda.gemm_pack import PackedWeight
from lmkit.kernels.cuda.switches import without
from lmkit.kernels.registry import Implementation
from lmkit.qtensor import float8_scheme, plain, quantize
from lmkit.quant.recipe import load_recipe
from lmkit.quant.run import prepare
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.engine.self_test_checks import Broken, Checks, Wrong
from lmkit.turbo.runners.cuda import CudaRunner
from lmkit.turbo.runners.cuda_device import CudaDevice
from tests.emulator import EmulatedBackend, faults
from tests.turbo.engine.test_cuda_engine import checkpoint as checkpoint
from tests.turbo.engine.test_cuda_engine import device as device
from tests.turbo.engine.test_cuda_engine import on_cpu, on_gpu, request
from tests.turbo.engine.test_cuda_ladder import gpu
from tests.turbo.engine.test_engine import run

__all__ = ["checkpoint", "device", "gpu"]
OPTIONS: dict[str, Any] = {"activations": "fp8", "max_batch_size": 2}


@pytest.fixture(scope="module")
def blocks(checkpoint: Path) -> Path:
    """Weights of 128 x 128 float8 numbers with one scale."""
    out = checkpoint.parent / "blocks"
    prepare(str(checkpoint), load_recipe("fp8_block")).run(str(out))
    return out


def weights(engine: Engine) -> list[PackedWeight]:
    """Of float8."""
    assert isinstance(engine.runner, CudaRunner)
    packed = (each.weight for linear in engine.runner.decoder.linears for each in linear.packed or ())
    return [weight for weight in packed if getattr(weight, "float8", False)]


def test_rounded_inputs_give_nearly_the_logits_of_exact_ones(blocks: Path, device: CudaDevice) -> None:
    """Inputs are exact by default, and rounding costs what it costs on a CPU."""
    engine, exact = on_gpu(blocks, device, **OPTIONS), on_gpu(blocks, device, max_batch_size=2)
    assert len(weights(engine)) == len(weights(exact)) > 4
    assert all(weight.float8_x for weight in weights(engine))
    assert not any(weight.rounds for weight in weights(exact))
    assert engine.info.captured == exact.info.captured
    wanted = request("p", list(range(50)), 4, prompt_logprobs=True)
    engines = exact, engine, on_cpu(blocks), on_cpu(blocks, **OPTIONS)
    exact_gpu, rounded_gpu, exact_cpu, rounded_cpu = (
        torch.tensor([x.logprob for x in run(each, [wanted])["p"][0].prompt_logprobs]) for each in engines
    )

    def spread(x: torch.Tensor, y: torch.Tensor) -> float:
        return float((x - y).abs().mean())

    assert 0 < spread(exact_gpu, rounded_gpu) < 1.5 * spread(exact_cpu, rounded_cpu)
    assert spread(exact_gpu, exact_cpu) < 0.2 * spread(exact_cpu, rounded_cpu)
    assert spread(rounded_gpu, rounded_cpu) < 0.8 * spread(exact_cpu, rounded_cpu)


@pytest.mark.parametrize(("fault", "kind"), [("wrong", Wrong), ("uncompiled", Broken), ("refused", Broken)])
def test_a_fault_of_the_float8_kernel_turns_off_that_alone(
    gpu: EmulatedBackend, fault: str, kind: type[Wrong], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "load", gpu.load)  # what is planted ends with the test
    planted = faults.FaultyDevice()
    faults.plant(gpu, f"gemm[FLOAT8_X]={fault}", planted)
    said: list[str] = []
    checks = Checks(planted, said.append)
    checks.replace_ops()
    try:
        op: Implementation = ops.linear_fp8_a8.select(
            "cuda", bits=8, group_size=128, in_features=256, out_features=32, activation=None
        )
        packed = op.pack(plain(quantize(torch.randn(32, 256), float8_scheme(128, 128))))
        x = torch.randn(3, 256).half()
        with pytest.raises(kind) as caught:
            op(x, packed, None, None)
        assert caught.value.names == ["float8"]
        assert "float8" in said
        with without("float8"):
            assert op(x, packed, None, None).shape == (3, 32)
    finally:
        checks.restore()
