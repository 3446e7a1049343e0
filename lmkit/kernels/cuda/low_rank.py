"""Additions of low rank to linears (adapters), and the gated activation of columns in turns: csrc/low_rank.cu."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from lmkit.kernels import low_rank_ops
from lmkit.kernels.cuda.elementwise import (
    ACTIVATIONS,
    BLOCK,
    WIDTH,
    accepts,
    dtypes_of,
    half_of,
    is_aligned,
    kernel_for,
)
from lmkit.kernels.cuda.module import HALVES, Kernel
from lmkit.kernels.registry import implements
from lmkit.low_rank import MAX_RANK, AdapterRows, Add, Columns, LowRanks, Parts

ROWS = 8  # of a block, as in low_rank.cu
WARPS, RANK_PARTS = 4, 4  # rows of A that a block reads at a time, and blocks that share an adapter's
SORTERS = 1024
ROWS_BY_ADAPTER = Kernel("low_rank.cu", "rows_by_adapter")
_accepts = partial(accepts, "low_rank.cu")


@implements(low_rank_ops.rows_by_adapter, "cuda", device="cuda", accepts=_accepts, priority=20)
def rows_by_adapter(numbers: Tensor, count: int) -> Tensor:
    order = torch.empty_like(numbers)
    ROWS_BY_ADAPTER(1, SORTERS, [numbers, order, len(numbers), count], shared=4 * (count + 1))
    return order


@implements(low_rank_ops.add_low_rank, "cuda", device="cuda", accepts=_accepts, priority=20)
def add_low_rank(x: Tensor, rows: AdapterRows, parts: Parts) -> Add:
    def add(y: Tensor) -> None:
        for additions, columns in parts:
            _add(x, y, rows, additions, columns)

    return add


def _add(x: Tensor, y: Tensor, rows: AdapterRows, additions: LowRanks, columns: Columns) -> None:
    tokens, inputs = x.shape
    half = half_of(x, y)
    if half is None or rows.order is None or x.stride(1) != 1 or y.stride(1) != 1:
        low_rank_ops.add_low_rank.fall_back("reference", dtypes_of(x, y))(x, rows, [(additions, columns)])(y)
        return
    factors = torch.empty(tokens, MAX_RANK, dtype=torch.float32, device=x.device)
    of_step = rows.numbers, rows.order, additions.addresses, factors, tokens
    groups = -(-tokens // ROWS)
    aligned = inputs % WIDTH == 0 and x.stride(0) % WIDTH == 0 and is_aligned(x)
    kernel_for("low_rank.cu", "low_rank_factors", half)(
        (groups, RANK_PARTS), 32 * WARPS, [x, np.int64(x.stride(0)), *of_step, inputs, x.dtype in HALVES, aligned]
    )
    where = columns.size, columns.start, columns.width, columns.stride
    kernel_for("low_rank.cu", "low_rank_outputs", half)(
        (groups, -(-columns.size // BLOCK)), BLOCK, [y, np.int64(y.stride(0)), *of_step, *where, y.dtype in HALVES]
    )


@implements(low_rank_ops.gated_panels, "cuda", device="cuda", accepts=_accepts, priority=20)
def gated_panels(
    gate_up: Tensor,
    activation: str,
    width: int,
    size: int,
    dtype: torch.dtype | None = None,
    add: Add | None = None,
) -> Tensor:
    if add is not None:
        add(gate_up)
    dtype = dtype or gate_up.dtype
    half = half_of(gate_up, dtype)
    if half is None or gate_up.stride(1) != 1:
        y: Tensor = low_rank_ops.gated_panels.fall_back("reference", dtypes_of(gate_up, dtype))(
            gate_up, activation, width, size, dtype
        )
        return y
    out = torch.empty(len(gate_up), size, dtype=dtype, device=gate_up.device)
    args = [
        gate_up, np.int64(gate_up.stride(0)), out, size, width, ACTIVATIONS[activation], gate_up.dtype in HALVES,
        dtype in HALVES,
    ]  # fmt: skip
    kernel_for("low_rank.cu", "gated_panels", half)((len(gate_up), -(-size // BLOCK)), BLOCK, args)
    return out
