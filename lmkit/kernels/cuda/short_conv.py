"""Gated short convolutions: csrc/short_conv.cu. The formulas are in lmkit.kernels.short_conv."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmkit.kernels import recurrent_ops
from lmkit.kernels.cuda import elementwise
from lmkit.kernels.cuda.elementwise import half_of, kernel_for
from lmkit.kernels.cuda.module import HALVES
from lmkit.kernels.ops import BatchGeometry
from lmkit.kernels.recurrent import RecurrentStates
from lmkit.kernels.registry import implements
from lmkit.kernels.short_conv import ConvWeights

BLOCK = 128
MAX_KERNEL = 8  # taps that registers hold


def _accepts(*, kernel: int, **traits: Any) -> str | None:
    if (reason := elementwise.accepts()) is not None:
        return reason
    return f"a convolution over {kernel} tokens, more than {MAX_KERNEL}" if kernel > MAX_KERNEL else None


@implements(recurrent_ops.short_conv, "cuda", device="cuda", accepts=_accepts, priority=20)
def short_conv(
    y: Tensor, weights: ConvWeights, states: RecurrentStates, rows: Tensor, geometry: BatchGeometry
) -> Tensor:
    half = half_of(y)
    assert half is not None
    assert (y.stride(1), rows.dtype) == (1, torch.int32)
    assert all(x.is_contiguous() for x in (states.conv, states.drafted, rows, weights.conv))
    (channels, kernel), tokens = weights.conv.shape, len(y)
    out = torch.empty(tokens, channels, dtype=y.dtype, device=y.device)
    args = [
        y, np.int64(y.stride(0)), geometry.query_start, rows, weights.conv, weights.bias, states.conv, states.drafted,
        out, tokens, states.drafted.shape[1], channels, y.dtype in HALVES,
    ]  # fmt: skip
    kernel_for("short_conv.cu", "short_conv", half, KERNEL=kernel)((len(rows), -(-channels // BLOCK)), BLOCK, args)
    return out
