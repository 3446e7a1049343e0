"""The gated short convolution on a GPU: results, states, snapshots and draft tokens against the reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import lmkit.kernels  # noqa: F401  (registers)
from lmkit.kernels import recurrent_ops
from lmkit.kernels.cuda import short_conv
from lmkit.kernels.recurrent import RecurrentStates
from lmkit.kernels.short_conv import ConvWeights
from tests.kernels.cases import Case, conv_cases, geometry

CASES = list(conv_cases())
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def moved(value: Any, device: str) -> Any:
    """A copy of an op's argument on the device."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    parts = {name: x for name, x in vars(value).items() if isinstance(x, Tensor | ConvWeights)}
    return replace(value, **{name: moved(x, device) for name, x in parts.items()})


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sequences_in_all_states(device: str, case: Case, dtype: torch.dtype) -> None:
    y, *rest = case.make()
    given = (y.to(dtype), *rest)
    there = [moved(x, device) for x in given]
    expected, got = recurrent_ops.short_conv.named("reference")(*given), short_conv.short_conv(*there)
    assert got.dtype == dtype
    close: dict[str, Any] = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(got.cpu(), expected, **close)
    for name, theirs in vars(given[2]).items():
        torch.testing.assert_close(getattr(there[2], name).cpu(), theirs, **close)


def test_states_do_not_depend_on_how_a_sequence_is_cut_and_padding_changes_nothing(device: str) -> None:
    torch.manual_seed(4)
    weights, y = ConvWeights(torch.randn(40, 3)), torch.randn(21, 120)
    found = []
    for cuts in ((0, 21), (0, 1, 2, 11, 21)):
        states = RecurrentStates(torch.ones(2, 40, 2), torch.zeros(2, 0, 0, 0), torch.zeros(2, 0, 40))
        there, parts = moved(states, device), []
        for a, b in pairwise(cuts):
            rows = torch.tensor([[1, 1 if a else -1, -1, 0, 0, 0], [-1] * 6]).int().to(device)
            places = moved(geometry([0, b - a, b - a], [b, 0], torch.zeros(2, 1).int()), device)
            parts.append(short_conv.short_conv(y[a:b].to(device), moved(weights, device), there, rows, places))
        found.append((torch.cat(parts), there.conv))
        assert bool((there.conv[0] == 1).all())  # another sequence's
    for whole, cut in zip(*found, strict=True):
        assert torch.equal(whole, cut)


def test_taps_that_registers_cannot_hold_run_through_torch(device: str) -> None:
    assert recurrent_ops.short_conv.select("cuda", kernel=3).name == "cuda"
    assert recurrent_ops.short_conv.select("cuda", kernel=9).name == "reference"
