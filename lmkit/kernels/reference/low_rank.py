"""Reference low-rank additions. Formulas and shapes: lmkit.kernels.low_rank_ops."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from lmkit.kernels import low_rank_ops
from lmkit.kernels.reference.elementwise import gated_activation
from lmkit.kernels.registry import implements
from lmkit.low_rank import AdapterRows, Add, Parts


@implements(low_rank_ops.gated_panels, "reference", device="any")
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
    halves = gate_up.view(len(gate_up), -1, 2, width).transpose(1, 2).reshape(len(gate_up), 2, -1)[..., :size]
    result: Tensor = gated_activation(halves.flatten(1), activation)
    return result.to(dtype or gate_up.dtype)


@implements(low_rank_ops.rows_by_adapter, "reference", device="any")
def rows_by_adapter(numbers: Tensor, count: int) -> Tensor:
    return torch.where(numbers < 0, count, numbers).argsort().int()


@implements(low_rank_ops.add_low_rank, "reference", device="any")
def add_low_rank(x: Tensor, rows: AdapterRows, parts: Parts) -> Add:
    def add(y: Tensor) -> None:
        for (additions, columns), (row, number) in itertools.product(parts, enumerate(rows.numbers.tolist())):
            entry = additions.entries[number] if number >= 0 else None
            if entry is not None:
                added = entry.scale * (x[row].float() @ entry.a.float().T) @ entry.b.float()
                for i, part in enumerate(added.split(columns.width)):
                    start = columns.start + i * columns.stride
                    y[row, start : start + len(part)] += part

    return add
