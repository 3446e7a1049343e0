"""The scan of Mamba-2 on a GPU: results, states, snapshots and draft tokens against the reference."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import lmkit.kernels  # noqa: F401  (registers)
from lmkit.kernels import recurrent_ops
from lmkit.kernels.cuda import selective_scan
from lmkit.kernels.recurrent import RecurrentStates
from lmkit.kernels.selective_scan import ScanWeights
from lmkit.kernels.short_conv import ConvWeights
from tests.kernels.cases import Case, geometry, scan_cases
from tests.kernels.cuda.test_short_conv import moved

CASES = list(scan_cases())
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sequences_in_all_states(device: str, case: Case, dtype: torch.dtype) -> None:
    y, *rest = case.make()
    given = (y.to(dtype), *rest)
    there = [moved(x, device) for x in given]
    expected, got = recurrent_ops.selective_scan.named("reference")(*given), selective_scan.selective_scan(*there)
    assert got.dtype == dtype
    close: dict[str, Any] = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(got.cpu(), expected, **close)
    for name, theirs in vars(given[2]).items():
        torch.testing.assert_close(getattr(there[2], name).cpu(), theirs, **close)


def test_states_do_not_depend_on_how_a_sequence_is_cut_and_padding_changes_nothing(device: str) -> None:
    torch.manual_seed(4)
    taps = ConvWeights(torch.randn(72 + 32, 4) / 2)
    a_log, dt_bias, d = torch.randn(3, 2)
    weights = moved(ScanWeights(taps, a_log, dt_bias, d, torch.randn(72), 1e-5, 1), device)
    y, found = torch.randn(37, 72 + 104 + 2).to(device), []
    for cuts in ((0, 37), (0, 1, 2, 19, 37)):
        states = RecurrentStates(torch.ones(2, 104, 3), torch.ones(2, 2, 16, 36), torch.zeros(2, 0, 106))
        there, parts = moved(states, device), []
        for a, b in pairwise(cuts):
            rows = torch.tensor([[1, 1 if a else -1, -1, 0, 0, 0], [-1] * 6]).int().to(device)
            places = moved(geometry([0, b - a, b - a], [b, 0], torch.zeros(2, 1).int()), device)
            parts.append(selective_scan.selective_scan(y[a:b], weights, there, rows, places))
        found.append((torch.cat(parts), there.conv, there.matrix))
        assert bool((there.matrix[0] == 1).all())  # another sequence's
    for whole, cut in zip(*found, strict=True):
        assert torch.equal(whole, cut)


def test_sizes_that_registers_cannot_hold_run_through_torch(device: str) -> None:
    sizes = {"kernel": 4, "state_size": 256}
    assert recurrent_ops.selective_scan.select("cuda", **sizes).name == "cuda"
    for other in ({"kernel": 9}, {"state_size": 257}):
        assert recurrent_ops.selective_scan.select("cuda", **(sizes | other)).name == "reference"
