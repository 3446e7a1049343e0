"""Rounding is qtensor's; clipping lowers each group's error or leaves the group alone."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lmkit.formats.nvfp4 import NVFP4
from lmkit.models.source import ModelSource
from lmkit.qtensor import QuantScheme, dequantize, int_scheme, quantize
from lmkit.quant.layer.grid import round_to_nearest
from lmkit.quant.steps import awq_clip
from lmkit.quant.steps.awq_clip import AwqClip, clip_layer, search_shrink
from tests.quant.helpers import calibrate, tiny_checkpoint

SCHEMES = [int_scheme(4, 32), int_scheme(4, 32, symmetric=True)]


def weights_and_inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Heavy-tailed weight [16, 64], correlated x [200, 64] and its Gram matrices of groups of 32."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(16, 64, generator=generator) ** 3
    x = torch.randn(200, 20, generator=generator) @ torch.randn(20, 64, generator=generator)
    grouped = x.view(200, 2, 32).transpose(0, 1).double()
    return weight, x, grouped.transpose(1, 2) @ grouped


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rtn_gives_the_codes_of_qtensor(scheme: QuantScheme) -> None:
    weight, _, _ = weights_and_inputs()
    rounded, expected = round_to_nearest(weight, scheme), quantize(weight, scheme)
    assert rounded.scheme == scheme
    for name in ("codes", "scales", "zeros"):
        assert torch.equal(getattr(rounded, name), getattr(expected, name))


def test_rtn_with_narrower_ends_saturates_outside() -> None:
    weight = torch.tensor([[-8.0, -1.0, 0.0, 1.0, 2.0, 32.0] + [0.0] * 26])
    rounded = round_to_nearest(weight, int_scheme(4, 32), (torch.tensor([[1 / 8]]), torch.tensor([[1 / 16]])))
    torch.testing.assert_close(dequantize(rounded)[0, :6], torch.tensor([-1.0, -1, 0, 1, 2, 2]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("clipped", [False, True])
def test_weights_that_are_multiplied_together_have_one_factor(clipped: bool) -> None:
    weight = weights_and_inputs()[0]
    shrink = (torch.full((16, 4), 0.7), torch.full((16, 4), 0.7)) if clipped else None
    alone = round_to_nearest(weight, NVFP4, largest=2 * weight.abs().max())
    assert round_to_nearest(weight, NVFP4, shrink, 2 * weight.abs().max()).factor == alone.factor
    assert quantize(weight, NVFP4).factor == 2 * alone.factor


def direct_losses(weight: Tensor, rounded: Tensor, x: Tensor) -> Tensor:
    """[out, groups]: each group's part of the squared output error, from the tokens themselves."""
    error = (rounded - weight).view(16, 2, 32).double()
    return torch.einsum("ogi,tgi->tog", error, x.view(200, 2, 32).double()).square().sum(0)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("seed", range(3))
def test_clipping_is_never_worse_for_any_row_and_group(scheme: QuantScheme, seed: int) -> None:
    weight, x, gram = weights_and_inputs(seed)
    found = search_shrink(weight, gram, scheme, grid=10, max_shrink=0.5)
    assert bool((found.loss <= found.unclipped).all())
    unclipped = direct_losses(weight, dequantize(quantize(weight, scheme)), x)
    clipped = direct_losses(weight, dequantize(round_to_nearest(weight, scheme, found.shrink)), x)
    torch.testing.assert_close(found.unclipped.double(), unclipped, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.loss.double(), clipped, rtol=1e-3, atol=1e-4)
    assert clipped.sum() < 0.96 * unclipped.sum()
    assert 0.2 < found.clipped_share <= 1


def test_groups_without_clipping_keep_the_plain_grid() -> None:
    """A group of two magnitudes, both on the grid, cannot gain."""
    weight = torch.ones(8, 64)
    weight[:, ::2] = -0.875
    found = search_shrink(weight, weights_and_inputs()[2], int_scheme(4, 32), grid=10, max_shrink=0.5)
    kept = round_to_nearest(weight, int_scheme(4, 32), found.shrink)
    same = found.loss == found.unclipped
    assert torch.equal(kept.codes.view(8, 2, 32)[same], quantize(weight, int_scheme(4, 32)).codes.view(8, 2, 32)[same])


def test_ends_are_independent_and_near_the_best_of_all_pairs() -> None:
    """One-sided tails need one end only; searching ends in turn comes close to searching all pairs."""
    weight, _, gram = weights_and_inputs(5)
    scheme, steps = int_scheme(4, 32), [torch.full((16, 2), 1 - 0.5 * i / 5) for i in range(6)]
    found = search_shrink(weight, gram, scheme, grid=5, max_shrink=0.5)
    groups = awq_clip.Groups.of(weight, gram, scheme)
    pairs = [groups.losses((ends[0].T, ends[1].T)).T for ends in itertools.product(steps, steps)]
    best = torch.stack(pairs).amin(0)
    assert bool((found.loss >= best * 0.999).all())
    assert found.loss.sum() < 1.1 * best.sum()
    assert bool(((found.shrink[0] < 1) != (found.shrink[1] < 1)).any())


def test_symmetric_ends_move_together() -> None:
    weight, _, gram = weights_and_inputs(2)
    found = search_shrink(weight, gram, SCHEMES[1], grid=10, max_shrink=0.5)
    assert torch.equal(*found.shrink)
    rounded, plain = round_to_nearest(weight, SCHEMES[1], found.shrink), quantize(weight, SCHEMES[1])
    assert bool((rounded.zeros == 8).all())
    assert bool((rounded.scales <= plain.scales).all())
    assert bool((rounded.scales < plain.scales).any())


def test_dead_inputs_leave_the_range_alone() -> None:
    weight, _, gram = weights_and_inputs()
    scheme = int_scheme(4, 32)
    found = search_shrink(weight, torch.zeros_like(gram), scheme, grid=10, max_shrink=0.5)
    assert found.clipped_share == 0
    assert torch.equal(round_to_nearest(weight, scheme, found.shrink).codes, quantize(weight, scheme).codes)


@pytest.mark.parametrize("seed", range(4))
def test_query_and_key_are_clipped_only_where_attention_gains(tmp_path: Path, seed: int) -> None:
    layer = ModelSource(tiny_checkpoint(tmp_path)).layer(seed % 2, torch.float32)
    hidden = torch.randn(96, 64, generator=torch.Generator().manual_seed(seed))
    calibrated = calibrate(layer, hidden, num_rows=4)
    before = dict(layer.weights)
    searches = clip_layer(calibrated, AwqClip(grid=5))
    assert all(layer.weights[role] is weight for role, weight in before.items())
    assert searches.keys() == calibrated.shrinks.keys() >= {"attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down"}
    chosen = awq_clip._attention_error(calibrated, calibrated.shrinks)
    values_only = {role: found for role, found in calibrated.shrinks.items() if role not in awq_clip.SCORES}
    assert chosen <= awq_clip._attention_error(calibrated, values_only)
