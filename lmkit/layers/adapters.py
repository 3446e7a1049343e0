"""Adapters (LoRA, arXiv 2106.09685): what is added to the products of single rows of a step.

Each adapter that an engine has loaded has a number. A row of a step has the number of its sequence's adapter, or -1.
Numbers and additions lie at fixed places, so that captured steps find them. On a GPU, rows of one adapter are computed
together.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor

from lmkit.devices import named
from lmkit.errors import UnsupportedError
from lmkit.kernels import low_rank_ops
from lmkit.kernels.cpu.panels import interleave
from lmkit.kernels.cuda.module import tensor_device
from lmkit.low_rank import AdapterRows, Add, Columns, LowRank, LowRanks


class StepAdapters:
    """The adapters of the rows of the step that runs now. The last layer may compute the logit rows alone."""

    def __init__(self, device: str) -> None:
        self._by_count: dict[int, AdapterRows] = {}
        self._sorts, self._order = not named(device).panels, low_rank_ops.rows_by_adapter.select(device)
        self.count = 0  # adapters at most

    def set(self, *numbers: Tensor | None) -> None:
        """`numbers`: int32 [rows] of all rows, and of the logit rows; None if no row has an adapter."""
        self._by_count = {}
        for of_rows in numbers:
            if of_rows is not None and len(of_rows) not in self._by_count:
                order = self._order(of_rows, self.count) if self._sorts else None
                self._by_count[len(of_rows)] = AdapterRows(of_rows, order)

    def of(self, count: int) -> AdapterRows | None:
        """The adapters of `count` rows. Raises UnsupportedError if it is not known which rows of the step they are."""
        if self._by_count and count not in self._by_count:
            raise UnsupportedError(f"adapters are known for {[*self._by_count]} rows of this step, not for {count}")
        return self._by_count.get(count)


class LinearAdapters:
    """The additions of all adapters to one MergedLinear, by role. `rows(count)` are those of the step."""

    def __init__(self, roles: tuple[str, ...], step: StepAdapters, device: str) -> None:
        self.rows = step.of
        self._in_panels = named(device).panels
        self._additions = {role: LowRanks(step.count, tensor_device(device)) for role in roles}
        self.implementation = low_rank_ops.add_low_rank.select(device)

    def set(self, role: str, number: int, entry: LowRank | None) -> None:
        self._additions[role].set(number, entry.in_panels() if entry is not None and self._in_panels else entry)

    def begin(self, x: Tensor, rows: AdapterRows, places: list[Columns]) -> Add:
        """Compute what is added to the roles' products of x beside the products themselves. The result adds it to them,
        which stand at `places`."""
        parts = list(zip(self._additions.values(), places, strict=True))
        add: Add = self.implementation(x, rows, parts)
        return add


class Ungated(NamedTuple):
    """A kernel's weight and bias without the activation: gate and up come in turns of `width` columns."""

    weight: Any
    bias: Tensor | None
    width: int

    @classmethod
    def of(cls, packed: Any, bias: Tensor | None, size: int) -> Ungated:
        """`size` is that of each half. A weight that says no `width` has one half after the other."""
        width: int = getattr(packed, "width", size)
        columns = {"out_features": 2 * -(-size // width) * width} if hasattr(packed, "out_features") else {}
        in_turns = None if bias is None else interleave(bias[:, None], width).flatten()
        return cls(dataclasses.replace(packed, activation=None, **columns), in_turns, width)
