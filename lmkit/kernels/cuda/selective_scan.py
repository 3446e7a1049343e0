"""The scan of Mamba-2: csrc/selective_scan.cu. The formulas are in lmkit.kernels.selective_scan."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmkit.kernels import recurrent_ops
from lmkit.kernels.cuda import elementwise
from lmkit.kernels.cuda.elementwise import half_of, kernel_for
from lmkit.kernels.cuda.module import HALVES
from lmkit.kernels.cuda.short_conv import BLOCK, MAX_KERNEL
from lmkit.kernels.ops import BatchGeometry
from lmkit.kernels.recurrent import RecurrentStates
from lmkit.kernels.registry import implements
from lmkit.kernels.selective_scan import ScanWeights

LANES, COLUMNS, TILE = 4, 32, 16  # of recurrent.cuh
GATE_BLOCK = 256  # threads of scan_outputs
MAX_SIZE = 256  # rows of a state that registers hold


def _accepts(*, kernel: int, state_size: int, **traits: Any) -> str | None:
    if (reason := elementwise.accepts()) is not None:
        return reason
    if state_size > MAX_SIZE:
        return f"states of {state_size} rows, more than {MAX_SIZE}"
    return f"a convolution over {kernel} tokens, more than {MAX_KERNEL}" if kernel > MAX_KERNEL else None


@implements(recurrent_ops.selective_scan, "cuda", device="cuda", accepts=_accepts, priority=20)
def selective_scan(
    y: Tensor, weights: ScanWeights, states: RecurrentStates, rows: Tensor, geometry: BatchGeometry
) -> Tensor:
    half, taps = half_of(y), weights.taps
    assert half is not None
    assert (y.stride(1), rows.dtype) == (1, torch.int32)
    assert all(x.is_contiguous() for x in (*states.parts, states.drafted, rows, taps.conv))
    _, heads, size, dim = states.matrix.shape
    (channels, kernel), tokens, sequences = taps.conv.shape, len(y), len(rows)
    room, stride, is_half = states.drafted.shape[1], np.int64(y.stride(0)), y.dtype in HALVES
    mixed = torch.empty(tokens + sequences * room, channels, device=y.device)
    factors = torch.empty(tokens + sequences * room, heads, 2, device=y.device)
    o = torch.empty(tokens, heads * dim, device=y.device)
    out = torch.empty(tokens, heads * dim, dtype=y.dtype, device=y.device)
    places, sizes = (geometry.query_start, rows), (heads, weights.groups, size, dim)
    inputs = [
        y, stride, *places, taps.conv, taps.bias, weights.a_log, weights.dt_bias, *weights.limits, states.conv,
        states.drafted, mixed, factors, tokens, room, *sizes, is_half,
    ]  # fmt: skip
    grid = sequences, -(-(channels + heads) // BLOCK)
    kernel_for("selective_scan.cu", "scan_inputs", half, KERNEL=kernel)(grid, BLOCK, inputs)
    scan = [*places, mixed, factors, weights.d, states.matrix, o, tokens, room, *sizes]
    lane_rows = -(-size // (4 * LANES)) * 4
    shared = 4 * TILE * (2 * LANES * lane_rows + COLUMNS + 2)
    blocks = sequences, heads, -(-dim // COLUMNS)
    kernel_for("selective_scan.cu", "scan_states", torch.float16, ROWS=lane_rows)(
        blocks, LANES * COLUMNS, scan, shared=shared
    )
    outputs = [o, y, stride, weights.norm, weights.eps, out, heads * dim, is_half]
    gate = kernel_for("selective_scan.cu", "scan_outputs", half)
    gate((tokens, weights.groups), GATE_BLOCK, outputs, shared=4 * (GATE_BLOCK // 32))
    return out
