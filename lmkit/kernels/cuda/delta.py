"""Gated delta-rule linear attention: csrc/delta.cu. The formulas are in lmkit.kernels.delta."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cuda import elementwise
from lmkit.kernels.cuda.elementwise import half_of, kernel_for
from lmkit.kernels.cuda.module import HALVES
from lmkit.kernels.delta import DeltaWeights, heads_of
from lmkit.kernels.ops import BatchGeometry
from lmkit.kernels.recurrent import RecurrentStates
from lmkit.kernels.registry import implements

LANES, COLUMNS, TILE = 4, 32, 16  # of delta.cu
BLOCK, WARPS = 128, 4
MAX_KEY_DIM, MAX_KERNEL = 256, 8  # that registers hold


def _accepts(*, key_dim: int, kernel: int, **traits: Any) -> str | None:
    if (reason := elementwise.accepts("delta.cu")) is not None:
        return reason
    if key_dim > MAX_KEY_DIM:
        return f"keys of {key_dim}, more than {MAX_KEY_DIM}"
    return f"a convolution over {kernel} tokens, more than {MAX_KERNEL}" if kernel > MAX_KERNEL else None


@implements(ops.gated_delta, "cuda", device="cuda", accepts=_accepts, priority=20)
def gated_delta(
    y: Tensor, gates: Tensor, weights: DeltaWeights, states: RecurrentStates, rows: Tensor, geometry: BatchGeometry
) -> Tensor:
    half = half_of(y)
    assert half is not None
    assert (y.stride(1), gates.stride(1), gates.dtype, rows.dtype) == (1, 1, torch.float32, torch.int32)
    assert all(x.is_contiguous() for x in (*states.parts, states.drafted, rows, weights.conv))
    assert weights.flat or weights.decays == 1
    _, value_heads, key_dim, value_dim = heads_of(states)
    sizes, by_row = (*heads_of(states), weights.decays), int(weights.decays > 1)
    tokens, sequences, room = len(y), len(rows), states.drafted.shape[1]
    all_rows, channels, kernel = tokens + sequences * room, *weights.conv.shape
    mixed = torch.empty(all_rows, channels, device=y.device)
    factors = torch.empty(all_rows, value_heads, 1 + weights.decays, device=y.device)
    o = torch.empty(tokens, value_heads, value_dim, device=y.device)
    out = torch.empty(tokens, value_heads * value_dim, dtype=y.dtype, device=y.device)
    layout = weights.flat, y.dtype in HALVES
    places = geometry.query_start, rows
    inputs = [
        y, np.int64(y.stride(0)), gates, np.int64(gates.stride(0)), *places, weights.conv, weights.a_log,
        weights.dt_bias, weights.rate, weights.floor, states.conv, states.drafted, mixed, factors, tokens, room, *sizes,
        *layout,
    ]  # fmt: skip
    grid = sequences, -(-(channels + weights.dt_bias.numel()) // BLOCK)
    kernel_for("delta.cu", "delta_inputs", half, KERNEL=kernel)(grid, BLOCK, inputs)
    rule = [*places, mixed, factors, states.matrix, o, tokens, room, *sizes]
    lane_rows = -(-key_dim // (4 * LANES)) * 4
    shared = 4 * TILE * ((2 + by_row) * LANES * lane_rows + COLUMNS + 2)
    blocks = sequences, value_heads, -(-value_dim // COLUMNS)
    rule_of = kernel_for("delta.cu", "delta_rule", torch.float16, ROWS=lane_rows, BY_ROW=by_row)
    rule_of(blocks, BLOCK, rule, shared=shared)
    pairs = tokens * value_heads
    gated = [weights.norm, weights.eps, out, pairs, *sizes, int(weights.sigmoid), *layout]
    outputs = [o, y, np.int64(y.stride(0)), *gated]
    kernel_for("delta.cu", "delta_outputs", half)(-(-pairs // WARPS), 32 * WARPS, outputs)
    return out
