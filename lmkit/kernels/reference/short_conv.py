"""The short convolution as kernels.short_conv defines it, token by token. Gradients pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lmkit.kernels import recurrent_ops
from lmkit.kernels.ops import BatchGeometry
from lmkit.kernels.recurrent import RecurrentStates
from lmkit.kernels.registry import implements
from lmkit.kernels.short_conv import ConvWeights

Parts = tuple[Tensor, ...]  # of one sequence's state


@implements(recurrent_ops.short_conv, "reference", device="any")
def short_conv(
    y: Tensor, weights: ConvWeights, states: RecurrentStates, rows: Tensor, geometry: BatchGeometry
) -> Tensor:
    b, gates, x = y.float().chunk(3, dim=1)

    def token(given: Tensor, gate: Tensor | None, state: Parts) -> tuple[Tensor, Parts]:
        mixed, window = convolved(given, state[0], weights)
        return mixed if gate is None else gate * mixed, (window, *state[1:])

    out = walk((b * x).unbind(), gates.unbind(), token, states, rows, geometry)
    return (torch.stack(out) if out else torch.zeros_like(gates)).to(y.dtype)


def convolved(given: Tensor, window: Tensor, weights: ConvWeights) -> tuple[Tensor, Tensor]:
    """(the convolution [C] of a token's inputs [C] with those before it [C, K - 1], the window after it)."""
    window = torch.cat([window, given[:, None]], dim=1)
    mixed = (window * weights.conv).sum(1)
    return mixed if weights.bias is None else mixed + weights.bias, window[:, 1:]


def walk(
    given: Parts,
    others: Parts,
    token: Callable[[Tensor, Any, Parts], tuple[Tensor, Parts]],
    states: RecurrentStates,
    rows: Tensor,
    geometry: BatchGeometry,
) -> list[Tensor]:
    """Take the tokens of each sequence in order: the results of all, with the states moved on (kernels.recurrent).

    `token(given, others, state)` gives a token's result and the state after it. Of a draft token of the step before,
    what it gave is kept, and its `others` are None: its result is not needed again.
    """
    out, starts = list[Tensor](), geometry.query_start.tolist()

    def keep(state: Parts, row: int) -> None:
        for part, kept in zip(state, states.parts, strict=True):
            kept[row] = part.detach()

    for b, (row, source, snapshot, after, replayed, drafts) in enumerate(rows.tolist()):
        state = tuple(x[source].clone() if source >= 0 else torch.zeros_like(x[row]) for x in states.parts)
        tokens = slice(starts[b], starts[b + 1])
        kept = [(states.drafted[row, i].clone(), None) for i in range(replayed)]
        known = [*kept, *zip(given[tokens], others[tokens], strict=True)]
        for count, inputs in enumerate(known, 1):
            if count > len(known) - drafts:
                states.drafted[row, count - 1 - len(known) + drafts] = inputs[0].detach()
            result, state = token(*inputs, state)
            if count > replayed:
                out.append(result)
            if snapshot >= 0 and count == after:
                keep(state, snapshot)
            if count == len(known) - drafts:
                keep(state, row)
    return out
