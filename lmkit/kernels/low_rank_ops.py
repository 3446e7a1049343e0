"""Ops of low-rank additions to linears, by the adapter of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from lmkit.kernels.registry import op
from lmkit.low_rank import AdapterRows, Add, Parts


@op
def rows_by_adapter(numbers: Tensor, count: int) -> Tensor:
    """int32 [T]: the rows of numbers int32 [T] by number, below `count`, in any order within one; -1 comes last."""


@op
def add_low_rank(x: Tensor, rows: AdapterRows, parts: Parts) -> Add:
    """Begin the additions of each row's adapter to linears of x [T, in]. The result, called once, adds them to y [T, C]
    in place; a CPU may compute them beside the work in between. x and y are float32, or on a GPU 16 bits. The outputs
    of a part stand in its columns of y, one group after the other. A row's sum does not depend on other rows.
    """


@op
def gated_panels(
    gate_up: Tensor,
    activation: str,
    width: int,
    size: int,
    dtype: torch.dtype | None = None,
    add: Add | None = None,
) -> Tensor:
    """`ops.gated_activation` of gate_up [T, 2 n * width], gate and up in turns of `width` columns, after
    `add_low_rank`'s `add`. The result [T, size] has `dtype`, or gate_up's. Columns beyond `size` of each half are
    padding.
    """
