"""The bounds of benchmarks.gpu.roofline, against numbers worked out by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.roofline import (
    H200,
    LLAMA_3_2_1B,
    LLAMA_3_8B,
    QWEN_2_5_7B,
    W4_G128,
    Decode,
    Peak,
    prefill_seconds,
)

ROOT = Path(__file__).parents[2]


def test_sizes_of_models() -> None:
    assert LLAMA_3_8B.linear_weights == 6_979_321_856
    assert LLAMA_3_8B.head_weights == 525_336_576
    assert LLAMA_3_8B.products() == {
        "qkv": (6144, 4096), "o": (4096, 4096), "gate+up": (28672, 4096), "down": (4096, 14336),
    }  # fmt: skip
    for shape in (LLAMA_3_8B, QWEN_2_5_7B, LLAMA_3_2_1B):
        assert shape.layers * sum(n * k for n, k in shape.products().values()) == shape.linear_weights
    assert round((LLAMA_3_2_1B.linear_weights + LLAMA_3_2_1B.head_weights) / 1e9, 2) == 1.24
    assert [LLAMA_3_8B.kv_bytes(kind) for kind in ("float16", "int8", "int4")] == [131_072, 67_584, 34_816]
    assert pytest.approx(0.5195, abs=1e-4) == W4_G128


@pytest.mark.parametrize(
    ("batch", "context", "storage", "milliseconds", "phases"),
    [
        (1, 1024, "float16", 1.12, 1.12),
        (1, 1024, "int8", 1.10, 1.10),
        (1, 8192, "float16", 1.34, 1.34),
        (16, 1024, "int8", 1.35, 1.35),
        (16, 8192, "int4", 2.15, 2.15),
        (64, 1024, "float16", 3.09, 3.21),
        (64, 1024, "int8", 2.12, 2.25),
        (256, 1024, "int8", 5.21, 8.98),
        (256, 1024, "int4", 5.04, 6.99),  # computing takes longer than reading
    ],
)
def test_a_decode_step_on_an_h200(batch: int, context: int, storage: str, milliseconds: float, phases: float) -> None:
    step = Decode(LLAMA_3_8B, batch, context, storage)
    assert 1e3 * step.seconds(H200) == pytest.approx(milliseconds, abs=0.006)
    assert 1e3 * step.phase_seconds(H200) == pytest.approx(phases, abs=0.006)
    assert step.tokens_per_s(H200) == pytest.approx(1e3 * batch / phases, rel=0.006)


def test_a_bfloat16_model_reads_more() -> None:
    assert 1e3 * Decode(LLAMA_3_8B, 1, 1024, weight_bytes=2).seconds(H200) == pytest.approx(3.52, abs=0.006)


@pytest.mark.parametrize(("tokens", "milliseconds"), [(128, 2.27), (1024, 18.4), (8192, 167), (32768, 935)])
def test_a_prompt_on_an_h200(tokens: int, milliseconds: float) -> None:
    assert 1e3 * prefill_seconds(LLAMA_3_8B, tokens, H200) == pytest.approx(milliseconds, rel=0.005)


def test_the_longer_of_two() -> None:
    peak = Peak(bytes_per_s=100, flops=1000)
    assert peak.seconds(50, 100) == 0.5
    assert peak.seconds(50, 2000) == 2


def test_needs_no_torch() -> None:
    code = "import sys, benchmarks.gpu.roofline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
