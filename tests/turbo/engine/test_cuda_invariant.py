"""`--deterministic` on an emulated GPU: a request's tokens and log-probabilities, bit for bit, depend on it alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.random_llama import make_awq
from lmkit.config import EngineConfig
from lmkit.errors import ConfigError
from lmkit.kernels import ops
from lmkit.kernels.cuda import gemm_experts, prefill
from lmkit.models.loader import load_model
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams, StepOutput
from lmkit.turbo.runners import processes
from lmkit.turbo.runners.cuda_device import CudaDevice
from tests.models import peft_folder, tiny
from tests.turbo.engine.test_cuda_engine import SIZES, SMALL, checkpoint, device, requests
from tests.turbo.engine.test_engine import propose_drafts, run

__all__ = ["checkpoint", "device"]
pytestmark = pytest.mark.slow
emulated = pytest.mark.parametrize("device", ["emulated"], indirect=True)
KV_BYTES = 16 * 2 * 2 * 2 * 64 * 2  # of a block


def engine(path: Path, device: CudaDevice, **options: Any) -> Engine:
    given = SMALL | {"packed_cache": False, "deterministic": True} | options
    return Engine(str(path), EngineConfig(**given), device=device)


def engine_of(path: Path, device: CudaDevice, **options: Any) -> Engine:
    """Of a model without a tokenizer."""
    config = EngineConfig(**(SMALL | {"deterministic": True} | options))
    return Engine.of(load_model(path, device="cuda"), config, device=device)


def exact(outputs: dict[str, list[StepOutput]]) -> dict[str, list[Any]]:
    """Tokens and log-probabilities, those of the prompt too."""
    return {
        name: [each for part in parts for each in (*part.prompt_logprobs, *part.logprobs)]
        for name, parts in outputs.items()
    }


@emulated
@pytest.mark.parametrize(
    ("weights", "kv_dtype", "temperature"),
    [pytest.param("dense", "float16", 0.0, marks=pytest.mark.exhaustive), ("w4", "int8", 1.0)],
)
def test_a_request_alone_and_among_others(
    checkpoint: Path,
    device: CudaDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weights: str,
    kv_dtype: Any,
    temperature: float,
) -> None:
    """In batches, in small chunks, after prompts that the cache holds, after it gave way, and with drafts."""
    path = checkpoint
    if weights == "w4":
        make_awq(checkpoint, path := tmp_path / "w4", group=32)
    wanted = requests(temperature=temperature, top_p=0.95, max_tokens=9)
    first = engine(path, device, kv_dtype=kv_dtype)
    want = exact({name: parts for request in wanted for name, parts in run(first, [request]).items()})
    again = run(first, wanted)
    assert again["1"][0].cached_tokens > 0
    assert exact(again) == want
    assert exact(run(engine(path, device, kv_dtype=kv_dtype, max_step_tokens=5), wanted)) == want
    if weights == "w4":
        return
    longer = requests(max_tokens=26)[1:3]
    tight = engine(path, device, kv_dtype=kv_dtype, kv_memory=5 * KV_BYTES, max_model_len=None)
    assert exact(run(tight, longer)) == exact({name: parts for x in longer for name, parts in run(first, [x]).items()})
    assert tight.stats().preemptions > 0
    drafting = engine(path, device, kv_dtype=kv_dtype, overlap=False)
    ids = {name: [each.token_id for each in parts] for name, parts in want.items()}
    lengths = propose_drafts(drafting, ids, monkeypatch)
    assert exact(run(drafting, wanted)) == want
    assert max(lengths) == 4


@emulated
def test_what_cannot_hold_is_refused(checkpoint: Path, device: CudaDevice, tmp_path: Path) -> None:
    """By name, and with the way out."""
    for options, reason in (
        ({"dtype": "float32"}, "deterministic does not hold here: float32 .*; leave it out, or use --device cpu"),
        ({"block_size": 8}, r"paged_attention runs through torch \(blocks of 8 tokens"),
    ):
        with pytest.raises(ConfigError, match=reason):
            engine(checkpoint, device, **options)
    for family, reason in (
        ("qwen2-moe", "each expert is called by itself"),
        ("deepseek-v2-lite", "attention is latent"),
    ):
        tiny.make(tmp_path / family, family).half().save_pretrained(tmp_path / family)
        with pytest.raises(ConfigError, match=f"deterministic does not hold here: {reason}"):
            engine_of(tmp_path / family, device, max_model_len=32)


@emulated
def test_without_kernels_it_is_refused(checkpoint: Path, device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(device), "has_kernels", False)
    with pytest.raises(ConfigError, match="deterministic needs kernels of its own on a GPU: install CuPy"):
        engine(checkpoint, device)


@pytest.mark.exhaustive
@emulated
def test_a_model_with_windows(tmp_path: Path, device: CudaDevice) -> None:
    kinds = ["sliding_attention", "full_attention"]
    model = tiny.make(tmp_path, "qwen2-window", **(SIZES | {"sliding_window": 20, "layer_types": kinds}))
    model.half().save_pretrained(tmp_path)
    wanted, alone = requests(max_tokens=6), engine_of(tmp_path, device)
    want = exact({name: parts for x in wanted for name, parts in run(alone, [x]).items()})
    assert exact(run(engine_of(tmp_path, device, max_step_tokens=7), wanted)) == want


@pytest.mark.exhaustive
@emulated
def test_a_long_context(checkpoint: Path, device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys are in ranges, which several blocks of threads have, or one, whatever else is in the step."""
    monkeypatch.setattr(prefill, "PART_KEYS", 32)
    params = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=1)
    prompts = [list(range(3, 103)), list(range(3, 70)), [5, 6, 7]]  # the second one is found in the first
    wanted = [Request(request_id=str(i), prompt_ids=prompt, params=params) for i, prompt in enumerate(prompts)]
    alone = engine(checkpoint, device, prefix_cache=False, max_step_tokens=128)
    want = exact({name: parts for x in wanted for name, parts in run(alone, [x]).items()})
    together = engine(checkpoint, device)
    assert exact(run(together, wanted)) == want
    again = run(together, wanted)
    assert again["1"][0].cached_tokens >= 64
    assert exact(again) == want


@pytest.mark.exhaustive
@emulated
def test_adapters(checkpoint: Path, device: CudaDevice, tmp_path: Path) -> None:
    """Others of a step have another one or none. Inputs of 8-bit weights are rounded after the norm then."""
    shapes = peft_folder.linears(tiny.make(tmp_path / "base", "llama", **SIZES))
    for seed, name in enumerate("ab"):
        peft_folder.write(tmp_path / name, shapes, seed, rank=5, size=0.5, dtype=torch.float16)
    adapters = tuple(f"{name}={tmp_path / name}" for name in "ab")
    model = engine(checkpoint, device, quantize="int8", adapters=adapters, prefix_cache=False)
    wanted = [
        msgspec.structs.replace(one, adapter=name)
        for one, name in zip(requests(max_tokens=5), ["a", "", "b", "a"], strict=True)
    ]
    want = exact({name: parts for x in wanted for name, parts in run(model, [x]).items()})
    assert exact(run(model, wanted)) == want


@pytest.mark.exhaustive
@emulated
def test_a_mixture_of_experts(tmp_path: Path, device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows of an expert than a product has are computed in parts, not expert by expert."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "head_dim": 32}
    sizes |= {"intermediate_size": 96, "num_hidden_layers": 2}
    tiny.make(tmp_path / "dense", "qwen2-moe", **sizes).half().save_pretrained(tmp_path / "dense")
    make_awq(tmp_path / "dense", tmp_path / "w4", group=32)
    for implementation in ops.linear_w4a16.implementations:
        if implementation.of_experts is gemm_experts.OF_EXPERTS:
            monkeypatch.setitem(vars(implementation), "of_experts", replace(gemm_experts.OF_EXPERTS, max_rows=2))
    wanted, alone = requests(max_tokens=5), engine_of(tmp_path / "w4", device, max_model_len=96)
    want = exact({name: parts for x in wanted for name, parts in run(alone, [x]).items()})
    assert exact(run(engine_of(tmp_path / "w4", device, max_model_len=96, max_step_tokens=9), wanted)) == want


@pytest.mark.exhaustive
@emulated
def test_two_ranks(checkpoint: Path, device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """They add up their parts in the order of ranks."""
    monkeypatch.setattr(processes, "PROCESS", "tests.emulator.rank_process")
    model = engine(checkpoint, device, tp=2, kv_memory=1 << 20, max_step_tokens=9)
    try:
        wanted = requests(max_tokens=4)
        want = exact({name: parts for x in wanted for name, parts in run(model, [x]).items()})
        assert exact(run(model, wanted)) == want
    finally:
        model.close()
