"""Families on device "cuda", emulated: log-probabilities are those of transformers, however a sequence is computed."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lmkit.formats.hub import DEMO_FOLDER
from lmkit.kernels import ops
from lmkit.kernels.cuda.switches import parse
from lmkit.layers import latent_cost, latent_prompts
from lmkit.turbo.request import StepOutput
from lmkit.turbo.runners import cuda as cuda_runner
from lmkit.turbo.runners.cuda_device import CudaDevice
from tests.models import tiny
from tests.turbo.engine.test_cuda_engine import device, emulated, on_gpu, requests, tokens  # noqa: F401
from tests.turbo.engine.test_engine import propose_drafts, run

pytestmark = pytest.mark.slow
LENGTH = 96


def assert_right(model: Any, prompts: dict[str, list[int]], outputs: dict[str, list[StepOutput]], most: float) -> None:
    """Each token's log-probability is the one of a forward pass of the whole text, within `most` and that share of
    its logit."""
    for name, prompt in prompts.items():
        parts = [part for output in outputs[name] for part in output.logprobs]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + [part.token_id for part in parts]])).logits[0].float()
        wanted = logits[len(prompt) - 1 :]
        assert parts
        for part, of_token, log_softmax in zip(parts, wanted, wanted.log_softmax(-1), strict=False):
            for token_id, logprob in part.top:
                slack = most * (1 + abs(of_token[token_id].item()))
                assert logprob == pytest.approx(log_softmax[token_id].item(), abs=slack), name


def saved(path: Path, family: str, *, half: bool = True, **changes: Any) -> Any:
    """Write a model with a tokenizer, in float16 if `half`. Returns transformers' model in float32."""
    made = tiny.make(path, family, max_position_embeddings=LENGTH, **changes)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_FOLDER / file, path / file)
    if not half:
        return made
    made.half().save_pretrained(path)
    kind = transformers.AutoModelForImageTextToText if family in tiny.VISION else transformers.AutoModelForCausalLM
    return kind.from_pretrained(path, dtype=torch.float32)


@pytest.mark.exhaustive
@emulated
def test_prompts_over_plain_heads(
    tmp_path: Path,
    device: CudaDevice,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every chunk of two tokens or more, beside new tokens and after a prefix that is found again, two heads at a
    time. Other steps are captured."""
    for where in (latent_cost, latent_prompts):
        monkeypatch.setattr(where, "heads_at_once", lambda *_: 2)
    monkeypatch.setattr(latent_cost, "FIXED", -math.inf)
    chunks, attend = [], latent_prompts.PlainHeads._attend_chunk

    def count(*args: Any) -> None:
        chunks.append((args[5].tokens, args[5].length))
        attend(*args)

    monkeypatch.setattr(latent_prompts.PlainHeads, "_attend_chunk", count)
    model = saved(
        tmp_path, "deepseek-v2-lite", num_hidden_layers=2, first_k_dense_replace=2, qk_nope_head_dim=24, v_head_dim=16
    )
    wanted = requests(max_tokens=6)[1:3]
    prompts = {request.request_id: request.prompt_ids for request in wanted}
    engine = on_gpu(tmp_path, device, max_model_len=LENGTH)
    assert "decode steps of 3 sizes" in engine.info.captured
    for _ in range(2):
        assert_right(model, prompts, run(engine, wanted), 0.02)
    assert {(24, 24), (11, 35), (11, 11)} <= set(chunks)
    assert engine.stats().prefix_hits > 0
    runner = engine.runner
    assert cuda_runner.plain_heads(runner.decoder, runner.kv) is not None
    monkeypatch.setattr(cuda_runner, "switches", lambda: parse("plain_heads=off"))
    assert cuda_runner.plain_heads(runner.decoder, runner.kv) is None


# Their parts have tests of their own, so these are run with the exhaustive tests.
ALIKE = ("arcee", "cohere2", "dots1", "ernie4.5", "ernie4.5-moe", "exaone4", "gemma", "gemma2", "gemma3", "glm", "glm4",
         "glm4-moe", "glm4-moe-lite", "gpt-oss", "granite", "granite-moe", "granite-swa", "hy-v3", "internlm2",
         "internlm3", "llama4", "minimax-m2", "ministral3", "mistral-window", "mixtral", "olmo2", "olmo3", "olmoe",
         "phi3", "qwen3", "qwen3-moe", "qwen2.5-vl", "qwen3-vl", "seed-oss", "smollm3", "solar-open")  # fmt: skip


@emulated
@pytest.mark.parametrize(
    ("family", "layers", "dtype", "most"),
    [
        *(pytest.param(name, 2, "float32", 1e-4, marks=pytest.mark.exhaustive) for name in ALIKE),
        ("deepseek-v3", 2, "float32", 1e-4),
        pytest.param("deepseek-v2-lite", 2, "auto", 0.02, marks=pytest.mark.exhaustive),
        pytest.param("gemma4", 7, "float32", 1e-4, marks=pytest.mark.exhaustive),
        pytest.param("gemma4", 7, "auto", 0.02, marks=pytest.mark.exhaustive),
        pytest.param("gemma4-values", 3, "auto", 0.02, marks=pytest.mark.exhaustive),
        pytest.param("opt", 2, "float32", 1e-4, marks=pytest.mark.exhaustive),
        pytest.param("opt", 2, "auto", 0.02, marks=pytest.mark.exhaustive),
        pytest.param("opt-350m", 2, "float32", 1e-4, marks=pytest.mark.exhaustive),
        pytest.param("opt-350m", 2, "auto", 0.02, marks=pytest.mark.exhaustive),
        ("qwen3-next", 2, "float32", 1e-4),
        ("kimi-linear", 2, "auto", 0.02),
        pytest.param("kimi-linear", 2, "float32", 1e-4, marks=pytest.mark.exhaustive),
        pytest.param("bailing-hybrid", 3, "auto", 0.02, marks=pytest.mark.exhaustive),
        ("bailing-hybrid", 3, "float32", 1e-4),
        pytest.param("qwen3.5-vl", 3, "float32", 1e-4, marks=pytest.mark.exhaustive),
        ("granite-hybrid", 3, "auto", 0.02),
        pytest.param("bamba", 3, "auto", 0.02, marks=pytest.mark.exhaustive),
        pytest.param("cohere2", 4, "auto", 0.02, marks=pytest.mark.exhaustive),
        pytest.param("falcon-h1", 2, "float32", 1e-4, marks=pytest.mark.exhaustive),
        pytest.param("falcon-h1", 2, "auto", 0.02, marks=pytest.mark.exhaustive),
        pytest.param("ministral3", 2, "auto", 0.02, marks=pytest.mark.exhaustive),
        pytest.param("zamba2", 3, "float32", 1e-4, marks=pytest.mark.exhaustive),
        ("zamba2-plain", 3, "auto", 0.02),
        pytest.param("nemotron-h", 4, "auto", 0.02, marks=pytest.mark.exhaustive),
        pytest.param("nemotron-3", 5, "float32", 1e-4, marks=pytest.mark.exhaustive),
        ("lfm2", 3, "auto", 0.02),
        pytest.param("lfm2", 3, "float32", 1e-4, marks=pytest.mark.exhaustive),
        pytest.param("lfm2-moe", 3, "float32", 1e-4, marks=pytest.mark.exhaustive),
        ("qwen3.5", 3, "auto", 0.05),  # transformers in float16 is as far from float32
    ],
)
def test_log_probabilities_are_those_of_transformers(
    tmp_path: Path,
    device: CudaDevice,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    layers: int,
    dtype: Any,
    most: float,
) -> None:
    """Whole prompts, chunks beside new tokens, after a preemption, and after a prefix that is found again. float32 is
    computed by torch. In 16 bits kernels compute, and steps are captured: without experts, whose choice turns on the
    last bit."""
    monkeypatch.setattr(ops.paged_attention, "fallbacks", Counter())
    changes = {"num_hidden_layers": layers}
    if family.startswith(("deepseek", "kimi", "bailing")):
        changes["first_k_dense_replace"] = layers if dtype == "auto" else 1
    if family.startswith(("opt", "cohere2")):
        changes |= {"num_attention_heads": 3, "num_key_value_heads": 3}  # of 16 elements: a multiple of 16 has kernels
    model = saved(tmp_path, family, half=dtype == "auto", **changes)
    wanted = requests(max_tokens=16)[1:3]
    prompts = {request.request_id: request.prompt_ids for request in wanted}
    whole = on_gpu(tmp_path, device, dtype=dtype, max_model_len=LENGTH, max_step_tokens=64)
    block_bytes = whole.info.memory["kv"] // whole.info.num_blocks
    cut = on_gpu(tmp_path, device, dtype=dtype, max_model_len=None, kv_memory=5 * block_bytes)
    is_captured = dtype == "auto" and family not in ("opt-350m", "zamba2-plain")
    assert ("decode steps of 3 sizes" in whole.info.captured) == is_captured
    for engine in (whole, whole, cut):
        assert_right(model, prompts, run(engine, wanted), most)
    assert cut.stats().preemptions > 0
    assert whole.stats().prefix_hits > 0
    assert dtype != "auto" or not ops.paged_attention.fallbacks


@emulated
def test_drafts_do_not_reach_states(
    tmp_path: Path,
    device: CudaDevice,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Right ones are taken by the next step, wrong ones are not. Both change no token."""
    saved(tmp_path, "qwen3.5", half=False, num_hidden_layers=2)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": LENGTH}
    wanted = requests(max_tokens=12)[1:3]
    want = tokens(run(on_gpu(tmp_path, device, **options), wanted))
    engine = on_gpu(tmp_path, device, **options, overlap=False, speculate="ngram")
    lengths = propose_drafts(engine, want, monkeypatch)
    assert tokens(run(engine, wanted)) == want
    assert max(lengths) == 4
