"""The gated delta rule on a GPU: results, states, snapshots and draft tokens against the reference."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import lmkit.kernels  # noqa: F401  (registers)
from lmkit.kernels import ops
from lmkit.kernels.cuda import delta, module
from lmkit.kernels.delta import DeltaWeights
from lmkit.kernels.recurrent import RecurrentStates
from tests import emulator
from tests.kernels.cases import Case, delta_cases, geometry

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CASES = list(delta_cases())
TOLERANCE = {F32: 2e-4, F16: 2e-3, BF16: 2e-2}


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """What torch.empty gives is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def moved(value: Any, device: str) -> Any:
    """A copy of an op's argument on the device."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    return replace(value, **{name: moved(x, device) for name, x in vars(value).items() if isinstance(x, Tensor)})


def compare(device: str, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    """Results and every part of the states are those of the reference. It may write its arguments."""
    y, *rest = args
    given = (y.to(dtype), *rest)
    there = [moved(x, device) for x in given]
    expected, got = ops.gated_delta.named("reference")(*given), delta.gated_delta(*there)
    assert got.dtype == dtype
    close: dict[str, Any] = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(got.cpu(), expected, **close)
    for mine, theirs in zip((*there[3].parts, there[3].drafted), (*given[3].parts, given[3].drafted), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, **close)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sequences_in_all_states(device: str, case: Case) -> None:
    compare(device, case.make(), F32)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_inputs_of_16_bits(device: str, dtype: torch.dtype) -> None:
    compare(device, CASES[0].make(), dtype)


def large(tokens: int) -> tuple[Tensor, Tensor, DeltaWeights, RecurrentStates]:
    """One head of keys and two of values, of sizes that no tile divides."""
    torch.manual_seed(tokens)
    weights = DeltaWeights(torch.randn(2 * 72 + 80, 4) / 2, torch.randn(2), torch.randn(2), torch.randn(40), 1e-6)
    states = RecurrentStates(torch.ones(3, 224, 3), torch.ones(3, 2, 72, 40), torch.zeros(2, 0, 228))
    return torch.randn(tokens, 2 * 72 + 160), torch.randn(tokens, 4), weights, states


def test_more_tokens_than_a_tile(device: str) -> None:
    y, gates, weights, states = large(37)
    rows = torch.tensor([[1, -1, 2, 32, 0, 0], [0, 0, -1, 0, 0, 0]]).int()
    compare(device, (y, gates, weights, states, rows, geometry([0, 36, 37], [36, 9], torch.zeros(2, 1).int())), F32)


def test_a_step_that_begins_with_drafts_of_the_step_before(device: str) -> None:
    *inputs, states = large(2)
    states = replace(states, drafted=torch.randn(2, 4, 228))
    places = geometry([0, 2], [9], torch.zeros(1, 1).int())
    compare(device, (*inputs, states, torch.tensor([[0, 0, -1, -3, 3, 1]]).int(), places), F32)


def test_states_do_not_depend_on_how_a_sequence_is_cut(device: str) -> None:
    found = []
    for cuts in ((0, 37), (0, 1, 2, 19, 36, 37)):
        y, gates, weights, states = (moved(x, device) for x in large(37))
        parts = []
        for a, b in pairwise(cuts):
            rows = torch.tensor([[1, 1 if a else -1, -1, 0, 0, 0]]).int().to(device)
            places = moved(geometry([0, b - a], [b], torch.zeros(1, 1).int()), device)
            parts.append(delta.gated_delta(y[a:b], gates[a:b], weights, states, rows, places))
        found.append((torch.cat(parts), states.conv, states.matrix))
        assert bool((states.matrix[0] == 1).all())  # another sequence's
    for whole, cut in zip(*found, strict=True):
        assert torch.equal(whole, cut)


def test_sequences_that_pad_a_step_change_nothing(device: str) -> None:
    y, gates, weights, states = large(3)
    before = copy.deepcopy(states)
    rows = torch.tensor([[1, 1, -1, 0, 0, 0], [-1] * 6, [-1] * 6]).int()
    places = geometry([0, 1, 2, 3], [4, 0, 0], torch.zeros(3, 1).int())
    there = [moved(x, device) for x in (y, gates, weights, states, rows, places)]
    got = delta.gated_delta(*there)
    alone = replace(places, query_start=places.query_start[:2])
    expected = ops.gated_delta.named("reference")(y[:1], gates[:1], weights, states, rows[:1], alone)
    torch.testing.assert_close(got[:1].cpu(), expected, rtol=2e-4, atol=2e-4)
    for mine, theirs in zip(there[3].parts, before.parts, strict=True):
        assert torch.equal(mine[::2].cpu(), theirs[::2])


def test_states_are_read_before_the_wait() -> None:
    """The emulator sees reads of what an earlier kernel of the step writes."""
    if shutil.which("g++") is None:
        pytest.skip("kernels are emulated with g++")
    emulator.install(seed=5, overlap=True)
    try:
        compare("cpu", CASES[0].make(), F16)
    finally:
        module.BACKENDS.pop("cpu", None)
        module.counters.cache_clear()


def test_sizes_that_registers_cannot_hold_run_through_torch(device: str) -> None:
    sizes: dict[str, int] = {"key_dim": 128, "kernel": 4}
    assert ops.gated_delta.select("cuda", **sizes).name == "cuda"
    for other in ({"key_dim": 257}, {"kernel": 9}):
        assert ops.gated_delta.select("cuda", **(sizes | other)).name == "reference"
