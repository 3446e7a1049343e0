"""Scaling changes no function, and its search never ends with a scale that does worse than none."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.source import ModelSource
from lmkit.qtensor import dequantize, quantize
from lmkit.quant.layer import scaling
from lmkit.quant.layer.layer import CalibratedLayer
from lmkit.quant.steps import awq_scale
from lmkit.quant.steps.awq_scale import AwqScale
from tests.quant.helpers import SMOOTH, calibrate, run_layer, tiny_checkpoint

STEP = AwqScale()
ROWS, SEQ_LEN = 4, 24

# GQA; biases on every linear; norms on q and k with a head_dim of its own; a sliding window; no GQA; narrow values
FAMILIES = ["llama", "llama-tied-bias", "qwen2", "qwen3", "mistral-window", "llama-mha-wide-heads", "mimo-v2-flash"]
BEHIND = ["olmo2", "exaone4"]  # norms only after the blocks


def tiny_layer(path: Path, family: str = "llama") -> DecoderLayer:
    heads = {"num_key_value_heads": 4} if "mha" in family else {}
    return ModelSource(tiny_checkpoint(path, family, **heads)).layer(0, torch.float32)


def hidden_states(size: int, num_tokens: int = ROWS * SEQ_LEN, seed: int = 0) -> Tensor:
    """Correlated channels, a few of them large."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(num_tokens, size // 2, generator=generator) @ torch.randn(size // 2, size, generator=generator)
    mixed[:, ::13] *= 8
    return mixed / size**0.5


def random_scale(size: int, seed: int = 5) -> Tensor:
    return torch.exp(torch.randn(size, generator=torch.Generator().manual_seed(seed)))


def weight_of(layer: DecoderLayer, role: str) -> Tensor:
    weight = layer.weights[role]
    assert isinstance(weight, Tensor)
    return weight


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("source", "consumers"), SMOOTH)
def test_folding_a_scale_is_exact(tmp_path: Path, family: str, source: str, consumers: tuple[str, ...]) -> None:
    layer = tiny_layer(tmp_path, family)
    hidden = hidden_states(layer.spec.hidden_size)
    calibrated = calibrate(layer, hidden, num_rows=ROWS)
    before, weights_before = run_layer(calibrated, hidden), dict(layer.weights)
    s = random_scale(weight_of(layer, source).shape[0])
    scaling.apply(layer.weights, source, consumers, s, layer.spec)
    changed = {role for role, weight in layer.weights.items() if weight is not weights_before[role]}
    assert changed == {source, *consumers} | ({source + ".bias"} & set(layer.weights))
    after = run_layer(calibrated, hidden)
    assert float((after - before).abs().max() / before.abs().max()) < 1e-5


@pytest.mark.parametrize("family", FAMILIES + BEHIND)
def test_a_scaled_layer_is_the_same_function_and_its_statistics_follow(tmp_path: Path, family: str) -> None:
    layer = tiny_layer(tmp_path, family)
    hidden = hidden_states(layer.spec.hidden_size)
    calibrated = calibrate(layer, hidden, num_rows=ROWS)
    before = run_layer(calibrated, hidden)
    searches = awq_scale.scale_layer(calibrated, STEP)
    assert any(found.best.name != "identity" for found in searches)
    after = run_layer(calibrated, hidden)
    assert float((after - before).abs().max() / before.abs().max()) < 1e-5
    fresh = calibrate(layer, hidden, num_rows=ROWS)
    for role, stats in calibrated.inputs.items():
        torch.testing.assert_close(stats.abs_mean, fresh.inputs[role].abs_mean, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(stats.gram, fresh.inputs[role].gram, rtol=1e-3, atol=1e-4)


def test_a_mixture_alone_in_its_layer_is_judged_by_all_tokens(tmp_path: Path) -> None:
    """Not by those of its first expert, which may read other widths than the layer does."""
    layer = tiny_layer(tmp_path, "nemotron-3-super")
    roles = (*layer.spec.linears, *layer.spec.routers)
    calibrated = calibrate(layer, hidden_states(64), num_rows=ROWS, group_size=8, roles=roles)
    found = calibrated.block_output("norm.attn")
    assert found.shape == (ROWS * SEQ_LEN, 64)


@pytest.mark.parametrize("duo", ["both", True, False])
@pytest.mark.parametrize("seed", range(3))
def test_search_is_never_worse_than_identity_on_its_own_loss(tmp_path: Path, duo: str | bool, seed: int) -> None:
    layer = tiny_layer(tmp_path)
    calibrated = calibrate(layer, hidden_states(64, seed=seed), num_rows=ROWS)
    searches = awq_scale.scale_layer(calibrated, AwqScale(duo=duo, grid=20))  # type: ignore[arg-type]
    assert [found.source for found in searches] == [source for source, _ in SMOOTH]
    for found in searches:
        assert len(found.losses) >= 20 * (2 if duo == "both" else 1)
        assert found.losses[found.best.name] == min(found.losses.values()) <= found.losses["identity"]


def block_loss(calibrated: CalibratedLayer, source: str, consumers: tuple[str, ...]) -> float:
    """What rounding the consumers as they are costs at the block's output."""
    layer, exact = calibrated.layer, calibrated.block_output(source)
    originals = {role: calibrated.weight(role) for role in consumers}
    layer.weights.update({role: dequantize(quantize(w, calibrated.schemes[role])) for role, w in originals.items()})
    loss = float((calibrated.block_output(source) - exact).square().sum(dtype=torch.float64))
    layer.weights.update(originals)
    return loss


def test_losses_are_those_of_the_weights_as_stored(tmp_path: Path) -> None:
    """Identity's loss is plain rounding's; the best loss is found again after folding the scale."""
    layer = tiny_layer(tmp_path)
    calibrated = calibrate(layer, hidden_states(64), num_rows=ROWS)
    for source, consumers in SMOOTH:
        plain = block_loss(calibrated, source, consumers)
        candidates = awq_scale.pair_candidates(calibrated, source, consumers, STEP)
        found = awq_scale.search(calibrated, source, consumers, candidates)
        assert found.losses["identity"] == pytest.approx(plain, rel=1e-6)
        s = scaling.expand(found.best.scale, consumers[0], layer.spec)
        scaling.apply(layer.weights, source, consumers, found.best.scale, layer.spec)
        calibrated.input(consumers[0]).divide(s)
        assert block_loss(calibrated, source, consumers) == pytest.approx(found.losses[found.best.name], rel=1e-3)


def test_identity_wins_ties(tmp_path: Path) -> None:
    """Weights that the grid holds exactly lose nothing under any candidate that is a power of two."""
    layer = tiny_layer(tmp_path)
    calibrated = calibrate(layer, hidden_states(64), num_rows=ROWS)
    codes = torch.randint(0, 16, layer.spec.linear_shape("mlp.down"), generator=torch.Generator().manual_seed(0))
    codes[:, ::32], codes[:, 1::32] = 0, 15
    layer.weights["mlp.down"] = (codes - 8) / 16
    halves = [scaling.Candidate(f"{s}", torch.full((96,), s)) for s in (0.5, 2.0)]
    identity = scaling.Candidate("identity", torch.ones(96))
    found = awq_scale.search(calibrated, "mlp.up", ("mlp.down",), [identity, *halves])
    assert set(found.losses.values()) == {0.0}
    assert found.best is identity


def test_a_candidate_that_is_not_finite_loses(tmp_path: Path) -> None:
    calibrated = calibrate(tiny_layer(tmp_path), hidden_states(64), num_rows=ROWS)
    candidates = [scaling.Candidate("identity", torch.ones(96))]
    calibrated.inputs["mlp.down"].sample[0, 0] = torch.nan
    found = awq_scale.search(calibrated, "mlp.up", ("mlp.down",), candidates)
    assert math.isnan(found.losses["identity"])
    assert found.best is candidates[0]


def test_dead_channels_keep_their_scale() -> None:
    x_mean, w_mean = torch.rand(32) + 0.1, torch.rand(32) + 0.1
    x_mean[3], w_mean[5], x_mean[7] = 0.0, 0.0, torch.nan
    candidates = awq_scale.make_candidates(x_mean, w_mean, grid=20, duo="both")
    assert len(candidates) == 41
    for candidate in candidates:
        assert bool(candidate.scale.isfinite().all())
        assert bool((candidate.scale > 0).all())
        assert candidate.scale[[3, 5, 7]].tolist() == [1.0, 1.0, 1.0]
    names = [c.name for c in awq_scale.make_candidates(torch.zeros(8), torch.ones(8), 20, "both")]
    assert names == ["identity"]


def test_extreme_activations_give_bounded_scales() -> None:
    x_mean = torch.logspace(-30, 30, 16)
    for candidate in awq_scale.make_candidates(x_mean, torch.ones(16), grid=20, duo="both"):
        assert bool(candidate.scale.isfinite().all())
        assert float(candidate.scale.max()) <= scaling.LIMIT
        assert float(candidate.scale.min()) >= 0.999 / scaling.LIMIT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_divided_by_a_representable_scale_is_stored_exactly(dtype: torch.dtype) -> None:
    norm = torch.randn(512, generator=torch.Generator().manual_seed(0)).to(dtype).float()
    norm[:3] = torch.tensor([0.0, 1e-7, 300.0])
    wanted = random_scale(512).clamp(1e-3, 1e3)
    s = scaling.representable(wanted, norm, lambda w: w.to(dtype).float())
    divided = norm / s
    torch.testing.assert_close(divided.to(dtype).float(), divided, rtol=2e-7, atol=0)
    ordinary = norm.abs() > 1e-3
    torch.testing.assert_close(s[ordinary], wanted[ordinary], rtol=2**-7, atol=0)
    assert s[0] == 1.0


def test_query_heads_of_a_group_share_one_scale(tmp_path: Path) -> None:
    spec = tiny_layer(tmp_path).spec
    x = torch.arange(64.0)
    per_value = awq_scale.reduce(x, "attn.v", spec)
    assert per_value.shape == (32,)
    assert per_value[0] == (0 + 16) / 2  # channel 0 of query heads 0 and 1
    assert per_value[16] == (32 + 48) / 2
    spread = scaling.expand(per_value, "attn.o", spec)
    assert torch.equal(spread.view(2, 2, 16)[:, 0], spread.view(2, 2, 16)[:, 1])
    assert torch.equal(awq_scale.reduce(spread, "attn.v", spec), per_value)


@pytest.mark.parametrize(("source", "consumers"), SMOOTH)
def test_outliers_that_keep_the_function_are_smoothed_away(
    demo_model: Path, source: str, consumers: tuple[str, ...]
) -> None:
    """A few channels times 30 before, their columns divided by 30 after: the search undoes most of the harm."""
    layer = ModelSource(demo_model).layer(3, torch.float32)
    embed = ModelSource(demo_model).embed_tokens().float()
    hidden = embed[torch.randint(0, 4096, (8 * 64,), generator=torch.Generator().manual_seed(0))]
    outliers = torch.ones(weight_of(layer, source).shape[0])
    outliers[::50] = 30.0
    scaling.apply(layer.weights, source, consumers, 1 / outliers, layer.spec)
    calibrated = calibrate(layer, hidden, num_rows=8, group_size=128)
    candidates = awq_scale.pair_candidates(calibrated, source, consumers, STEP)
    found = awq_scale.search(calibrated, source, consumers, candidates)
    assert found.losses[found.best.name] < 0.5 * found.losses["identity"]


def test_pairs_whose_consumers_stay_dense_are_left_alone(tmp_path: Path) -> None:
    layer = tiny_layer(tmp_path)
    calibrated = calibrate(layer, hidden_states(64), num_rows=ROWS, roles=("attn.o", "mlp.gate"))
    before = dict(layer.weights)
    searches = awq_scale.scale_layer(calibrated, STEP)
    assert [found.source for found in searches] == ["attn.v", "norm.mlp"]
    assert layer.weights["norm.attn"] is before["norm.attn"]
    assert layer.weights["mlp.down"] is before["mlp.down"]


def test_a_scale_that_saves_too_little_is_not_taken(tmp_path: Path) -> None:
    """The same losses are found, and the layer stays as it is where the best of them saves less than asked for."""
    layer = tiny_layer(tmp_path)
    calibrated, before = calibrate(layer, hidden_states(64), num_rows=ROWS), dict(layer.weights)
    searches = awq_scale.scale_layer(calibrated, AwqScale(min_gain=0.99))
    assert all(found.best.name == "identity" for found in searches)
    assert any(min(found.losses.values()) < found.losses["identity"] for found in searches)
    assert all(layer.weights[role] is weight for role, weight in before.items())


def test_candidates_that_lose_on_some_outputs_are_not_compared_on_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, compared = tiny_layer(tmp_path), dict[float, set[str]]()
    calibrated = calibrate(layer, hidden_states(64, awq_scale.ROUGH_TOKENS), num_rows=8)
    source, consumers = "norm.mlp", ("mlp.gate", "mlp.up")
    candidates = awq_scale.pair_candidates(calibrated, source, consumers, STEP)
    found = awq_scale.search(calibrated, source, consumers, candidates)
    dropped = {name for name, loss in found.losses.items() if math.isinf(loss)}
    assert dropped
    assert found.best.name not in dropped
    assert found.losses["identity"] == pytest.approx(block_loss(calibrated, source, consumers), rel=1e-6)
    assert len(candidates) - len(dropped) == 1 + awq_scale.MOST
    monkeypatch.setattr(awq_scale, "MOST", len(candidates))
    for min_gain in (0.0, 0.9):
        limit = awq_scale.search(calibrated, source, consumers, candidates, min_gain)
        compared[min_gain] = {name for name, loss in limit.losses.items() if math.isfinite(loss)}
    assert {"identity", found.best.name} <= compared[0.9] < compared[0.0]
