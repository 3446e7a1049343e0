"""Adapters (LoRA, arXiv 2106.09685): what is added to the products of single rows of a step.

Each adapter that an engine has loaded has a number. A row of a step has the number of its sequence's adapter, or -1.
Numbers and additions lie at fixed places, so that captured steps find them.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cpu.panels import interleave
from lmkit.kernels.ops import Columns
from lmkit.kernels.registry import Implementation
from lmkit.low_rank import LowRank, LowRanks


class RowNumbers:
    """The adapters of the rows of the step that runs now. The last layer may compute the logit rows alone."""

    def __init__(self) -> None:
        self._by_count: dict[int, Tensor] = {}

    def set(self, *numbers: Tensor | None) -> None:
        """`numbers`: int32 [rows] of all rows, and of the logit rows; None if no row has an adapter."""
        self._by_count = {len(rows): rows for rows in reversed(numbers) if rows is not None}

    def of(self, count: int) -> Tensor | None:
        return self._by_count.get(count)


class LinearAdapters:
    """The additions of all adapters to one MergedLinear, by role. `numbers(count)` are those of the step's rows."""

    def __init__(self, roles: tuple[str, ...], count: int, rows: RowNumbers) -> None:
        self.numbers = rows.of
        self._additions = {role: LowRanks(count) for role in roles}
        self._add = ops.add_low_rank.select("cpu")

    def set(self, role: str, number: int, entry: LowRank | None) -> None:
        self._additions[role].set(number, entry)

    def add(self, role: str, x: Tensor, y: Tensor, numbers: Tensor, columns: Columns) -> None:
        self._add(x, y, numbers, self._additions[role], columns)


@cache
def _gated_panels() -> Implementation:
    return ops.gated_panels.select("cpu")


def gated(merged: Tensor, activation: str, width: int, size: int) -> Tensor:
    """The activation of gate and up that stand in turns of `width` columns."""
    result: Tensor = _gated_panels()(merged, activation, width, size)
    return result


def without_activation(packed: Any, bias: Tensor | None) -> tuple[Any, Tensor | None]:
    """The same panels and bias of a CPU, without the activation: gate and up come in turns of a panel."""
    width = packed.width
    columns = 2 * -(-packed.out_features // (2 * width)) * width
    in_turns = None if bias is None else interleave(bias[:, None], width).flatten()
    return dataclasses.replace(packed, activation=None, out_features=columns), in_turns
