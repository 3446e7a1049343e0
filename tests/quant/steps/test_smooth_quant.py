"""SmoothQuant changes no function, follows its formula, and its search never ends with a scale worse than none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lmkit.formats.names import Activations
from lmkit.models.source import ModelSource
from lmkit.qtensor import QuantScheme, dequantize, float8_scheme, int_scheme, quantize
from lmkit.quant.layer.layer import CalibratedLayer
from lmkit.quant.steps.smooth_quant import SmoothQuant, make_candidates, round_activations, smooth_layer
from tests.quant.helpers import SMOOTH, calibrate, run_layer, tiny_checkpoint

INT8 = int_scheme(8, -1, symmetric=True)
FLOAT8 = float8_scheme()
ROWS, SEQ_LEN = 4, 24


def hidden_states(outliers: float = 60.0) -> Tensor:
    """float32 [ROWS * SEQ_LEN, 64], three channels of them larger."""
    hidden = torch.randn(ROWS * SEQ_LEN, 64, generator=torch.Generator().manual_seed(0))
    hidden[:, [3, 30, 50]] *= outliers
    return hidden


def calibrated_layer(path: Path, family: str = "llama", scheme: QuantScheme = INT8) -> CalibratedLayer:
    layer = ModelSource(tiny_checkpoint(path, family)).layer(0, torch.float32)
    return calibrate(layer, hidden_states(), num_rows=ROWS, scheme=scheme)


@pytest.mark.parametrize("family", ["llama", "llama-tied-bias", "qwen3"])  # GQA; biases everywhere; norms on q and k
@pytest.mark.parametrize("step", [SmoothQuant(grid=5), SmoothQuant(alpha=0.8)])
def test_a_smoothed_layer_is_the_same_function_and_its_statistics_follow(
    tmp_path: Path, family: str, step: SmoothQuant
) -> None:
    calibrated, hidden = calibrated_layer(tmp_path, family), hidden_states()
    before = run_layer(calibrated, hidden)
    searches = smooth_layer(calibrated, step, "int8")
    assert [(found.source, found.consumers) for found in searches] == list(SMOOTH)
    assert any(found.best.name != "identity" for found in searches)
    after = run_layer(calibrated, hidden)
    assert float((after - before).abs().max() / before.abs().max()) < 1e-5
    fresh = calibrate(calibrated.layer, hidden, num_rows=ROWS, scheme=INT8)
    for role, stats in calibrated.inputs.items():
        torch.testing.assert_close(stats.abs_max, fresh.inputs[role].abs_max, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(stats.sample, fresh.inputs[role].sample, rtol=1e-3, atol=1e-3)


def test_half_gives_input_and_weights_the_same_ranges(tmp_path: Path) -> None:
    """With alpha 1/2, max|x_j| / s_j and max|w_j| * s_j are both sqrt(max|x_j| max|w_j|), up to one common factor."""
    calibrated = calibrated_layer(tmp_path)
    smooth_layer(calibrated, SmoothQuant(alpha=0.5), "int8")
    ratio = calibrated.input("mlp.down").abs_max / calibrated.weight("mlp.down").abs().amax(0)
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-3, atol=0)


@pytest.mark.parametrize(("scheme", "activations"), [(INT8, "int8"), (FLOAT8, "float8")])
def test_search_is_never_worse_than_identity(tmp_path: Path, scheme: QuantScheme, activations: Activations) -> None:
    calibrated = calibrated_layer(tmp_path, scheme=scheme)
    for found in smooth_layer(calibrated, SmoothQuant(grid=6), activations):
        assert list(found.losses) == ["identity", *(f"alpha {i / 5:.3g}" for i in range(6))]
        assert found.losses[found.best.name] == min(found.losses.values())


def test_outliers_cost_less_after_smoothing(tmp_path: Path) -> None:
    """Measured apart from the search: q, k and v as an engine runs them, int8 inputs and weights."""
    calibrated = calibrated_layer(tmp_path)

    def error() -> float:
        x = calibrated.input("attn.q").sample
        weight = torch.cat([calibrated.weight(role) for role in ("attn.q", "attn.k", "attn.v")])
        product = round_activations(x, "int8", INT8) @ dequantize(quantize(weight, INT8)).T
        return float((product - x @ weight.T).square().mean())

    before = error()
    found = smooth_layer(calibrated, SmoothQuant(), "int8")[0]
    assert found.best.name.startswith("alpha")
    assert error() < before / 4


def test_a_dead_channel_is_left_alone() -> None:
    x_max, w_max = torch.tensor([0.0, 4.0, 1.0, 9.0]), torch.tensor([1.0, 1.0, 0.0, 1.0])
    (candidate,) = make_candidates(x_max, w_max, [0.5])
    assert candidate.scale[[0, 2]].tolist() == [1.0, 1.0]
    torch.testing.assert_close(candidate.scale[3] / candidate.scale[1], torch.tensor(1.5))
    (nothing,) = make_candidates(torch.zeros(2), torch.ones(2), [0.5])
    assert nothing.scale.tolist() == [1.0, 1.0]


def test_activations_are_rounded_token_by_token() -> None:
    x = torch.randn(7, 40, generator=torch.Generator().manual_seed(4)) * torch.logspace(-3, 3, 7)[:, None]
    x[2] = 0
    assert torch.equal(round_activations(x, "none", INT8), x)
    rounded = round_activations(x, "int8", INT8)
    step = x.abs().amax(1, keepdim=True) / 127
    assert bool(((rounded - x).abs() <= step * 0.5001).all())
    assert all(len(row.unique()) <= 255 for row in rounded)
    float8 = round_activations(x, "float8", INT8)
    assert bool(((float8 - x).abs() <= x.abs() / 15 + x.abs().amax(1, keepdim=True) / 448 / 512).all())
    torch.testing.assert_close(float8.abs().amax(1), x.abs().amax(1))


def test_groups_of_a_token_have_scales_of_their_own() -> None:
    x = torch.cat([torch.full((1, 16), 1000.0), torch.linspace(-1, 1, 20)[None]], dim=1)
    grouped = round_activations(x, "int8", int_scheme(8, 16))
    assert grouped.shape == x.shape
    assert float((grouped - x).abs().max()) < 0.005
    assert float((round_activations(x, "int8", INT8) - x).abs().max()) > 0.5
