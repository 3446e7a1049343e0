"""A GPU computes what the CPU does: the same greedy tokens and nearly the same distributions, over bundled text.

Emulated on the CPU, the greedy tokens of some prompts only; on a GPU all of them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import lmkit.demo
from benchmarks.random_llama import make_awq
from lmkit.config import EngineConfig
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.kernels.cuda import module
from lmkit.kv_dtype import kv_dtype
from lmkit.layers.batch import allocate_kv, whole_batch
from lmkit.models.loader import load_model
from lmkit.text import Tokenizer
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from tests.emulator.device import EmulatedDevice

pytestmark = pytest.mark.slow
KL = 1e-4  # nats per token, at most
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 12, 40, 24
BLOCK = 64


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with 4-bit weights, rounded to nearest."""
    out = tmp_path_factory.mktemp("models") / "w4"
    make_awq(DEMO_FOLDER, out)
    return out


@pytest.fixture(params=["dense", pytest.param("w4", marks=pytest.mark.exhaustive)])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue("quantized") if request.param == "w4" else DEMO_FOLDER
    return folder


@cache
def prompts() -> list[list[int]]:
    """Pieces of the held-out text, as token ids."""
    text = (Path(lmkit.demo.__file__).parent / "text" / "heldout.txt").read_text()
    ids = Tokenizer.from_pretrained(DEMO_FOLDER).encode(text[:200_000])
    step = (len(ids) - PROMPT_TOKENS) // NUM_PROMPTS
    return [ids[i * step : i * step + PROMPT_TOKENS - i] for i in range(NUM_PROMPTS)]  # of different lengths


def logits(path: Path, rows: list[list[int]], device: str, dtype: str, tensors: str) -> Tensor:
    """Of every token, float32 [T, vocab], on the CPU."""
    decoder = load_model(path, device=device, dtype=dtype, activations="exact")
    spec = decoder.spec
    batch, blocks = whole_batch(rows, BLOCK, tensors)
    kinds = (kv_dtype(dtype), kv_dtype(dtype))
    kv = [allocate_kv(blocks, layer.num_kv_heads, BLOCK, layer.head_dim, kinds, tensors) for layer in spec.layers]
    return decoder(batch, kv).float().cpu().clone()


def divergence(ours: Tensor, reference: Tensor) -> float:
    """KL of ours from the reference's distributions, the mean over tokens."""
    p, q = reference.double().log_softmax(-1), ours.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("emulated", "float16"),
        ("emulated", "bfloat16"),
        pytest.param("cuda", "float16", marks=pytest.mark.gpu),
        pytest.param("cuda", "bfloat16", marks=pytest.mark.gpu),
    ],
)
def test_distributions_are_the_cpus(checkpoint: Path, device: str, dtype: str, request: pytest.FixtureRequest) -> None:
    rows = prompts()
    if device == "emulated":
        request.getfixturevalue("emulated")
    tensors = "cpu" if device == "emulated" else "cuda"
    ours = logits(checkpoint, rows, "cuda", dtype, tensors)
    assert ours.isfinite().all()
    module.BACKENDS.pop("cpu", None)  # the CPU's own kernels from here on
    reference = logits(checkpoint, rows, "cpu", "float32", "cpu")
    assert divergence(ours, reference) < KL
    assert divergence(ours.roll(1, -1), reference) > KL


@pytest.mark.parametrize("kv_dtype", ["float16", pytest.param("int8", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "device", [pytest.param("emulated", marks=pytest.mark.exhaustive), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_greedy_tokens_are_the_cpus(
    checkpoint: Path, device: str, kv_dtype: str, request: pytest.FixtureRequest
) -> None:
    common: Any = {"activations": "exact", "packed_cache": False, "max_batch_size": NUM_PROMPTS, "max_model_len": 128}
    wide = "float32" if kv_dtype == "float16" else kv_dtype
    theirs = Engine(str(checkpoint), EngineConfig(device="cpu", dtype="float32", kv_dtype=wide, **common))
    if device == "emulated":
        request.getfixturevalue("emulated")
    count, new_tokens = (2, 4) if device == "emulated" else (NUM_PROMPTS, NEW_TOKENS)
    config = EngineConfig(device="cuda", dtype="float16", kv_dtype=kv_dtype, **common)
    ours = Engine(str(checkpoint), config, device=EmulatedDevice() if device == "emulated" else None)
    assert tokens(ours, count, new_tokens) == tokens(theirs, count, new_tokens)


def tokens(engine: Engine, count: int, new_tokens: int) -> dict[str, list[int]]:
    """What an engine answers to `count` prompts at once, greedily."""
    found: dict[str, list[int]] = {}
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts()[:count]):
        engine.add(Request(request_id=str(index), prompt_ids=prompt, params=params))
        found[str(index)] = []
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            found[output.request_id] += output.token_ids
    engine.close()
    return found
