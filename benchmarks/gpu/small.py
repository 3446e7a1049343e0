"""Section "small": the ops between products (norms, embedding, activation, sampling). Each takes microseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import lmkit.kernels  # noqa: F401  (registers)
from benchmarks.gpu.context import Context
from benchmarks.gpu.roofline import LLAMA_3_8B
from benchmarks.gpu.timing import seconds_of
from lmkit.kernels import ops
from lmkit.kernels.ops import Norm


def run(context: Context) -> None:
    for rows in (2,) if context.rehearsal else (1, 16, 64, 256):
        for what, make in (
            ("rms_norm", _norm),
            ("gated_activation", _silu),
            ("embedding", _embedding),
            ("draw", _draw),
        ):
            with context.attempt(what, rows=rows):
                call, name, num_bytes = make(context, rows)
                seconds = seconds_of([call] * 10, context.device, budget=0.05)
                bound = context.peak().seconds(num_bytes)
                context.row(what, kernel=name, rows=rows, seconds=seconds, bound=bound)


Made = tuple[Callable[[], Any], str, int]  # the call, its implementation's name, the bytes that it moves


def _norm(context: Context, rows: int) -> Made:
    hidden = _size(context, LLAMA_3_8B.hidden)
    impl = ops.rms_norm.select("cuda")
    x = torch.randn(rows, hidden, device=context.device)
    norm = Norm(torch.ones(hidden, device=context.device), 1e-5, None, torch.float16)
    return lambda: impl(x, norm), impl.name, rows * hidden * 6


def _silu(context: Context, rows: int) -> Made:
    width = _size(context, LLAMA_3_8B.mlp)
    impl = ops.gated_activation.select("cuda")
    x = torch.randn(rows, 2 * width, device=context.device).half()
    return lambda: impl(x, "silu"), impl.name, rows * width * 6


def _embedding(context: Context, rows: int) -> Made:
    vocab, hidden = _size(context, LLAMA_3_8B.vocab), _size(context, LLAMA_3_8B.hidden)
    impl = ops.embedding.select("cuda")
    table = torch.randn(vocab, hidden, device=context.device).half()
    ids = torch.randint(0, vocab, (rows,), device=context.device)
    return lambda: impl(table, ids), impl.name, rows * hidden * 6


def _draw(context: Context, rows: int) -> Made:
    vocab = _size(context, LLAMA_3_8B.vocab)
    impl = ops.draw.select("cuda")
    logits = 3 * torch.randn(rows, vocab, device=context.device)
    numbers = [
        torch.full((rows,), value, dtype=torch.float64, device=context.device) for value in (0.8, 0.95, 0.0, 0.5)
    ]
    temperature, top_p, min_p, share = numbers
    top_k = torch.full((rows,), 40, device=context.device)
    ids = torch.arange(rows, device=context.device)
    return lambda: impl(logits, ids, temperature, top_k, top_p, min_p, share), impl.name, logits.nbytes


def _size(context: Context, size: int) -> int:
    return 256 if context.rehearsal else size
