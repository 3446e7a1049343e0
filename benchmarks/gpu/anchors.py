"""Published figures of others, to stand beside ours. They were not measured here, nor on the same machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Anchor:
    figure: str  # the name of our figure that it belongs to
    value: float
    unit: str
    what: str
    source: str


ANCHORS = (
    Anchor(
        "Llama-3-8B decode b1", 231.75, "tok/s",
        "TensorRT-LLM 0.15, INT4-AWQ Llama-3.1-8B, H200, batch 1, 2048 tokens in and 128 out, prompts' time included",
        "TensorRT-Model-Optimizer, examples/benchmark.md",
    ),
    Anchor(
        "Llama-3-8B decode b1", 173.80, "tok/s", "the same in BF16", "TensorRT-Model-Optimizer, examples/benchmark.md"
    ),
    Anchor(
        "Llama-3-8B decode b64", 1392.78, "tok/s", "TensorRT-LLM 0.15, INT4-AWQ, as above, batch 64",
        "TensorRT-Model-Optimizer, examples/benchmark.md",
    ),
    Anchor(
        "Llama-3-8B decode b1", 208, "tok/s",
        "vLLM, RTN INT4 by Marlin, Llama-3.1-8B, H100, batch 1, 256 tokens in and 32 out: 0.154 s, prompt included",
        "vLLM pull request 23197",
    ),
    Anchor(
        "Llama-3-8B decode b16", 1918, "tok/s", "the same, batch 16: 0.267 s", "vLLM pull request 23197"
    ),
    Anchor(
        "W4A16 GEMM M=16", 1.16e12, "bytes/s", "Marlin on an A100, a large matrix: 3.1 times FP16",
        "vLLM pull request 2497",
    ),
    Anchor(
        "Llama-3-8B decode b64", 4155, "tok/s", "LMDeploy 0.2, Llama-2-7B FP16, A100, 1 token in and 128 out",
        "LMDeploy, docs/en/benchmark/a100_fp16.md",
    ),
)  # fmt: skip


def of(figure: str) -> list[Anchor]:
    return [anchor for anchor in ANCHORS if anchor.figure == figure]
