"""SignRound starts from given codes, computes the same layer, and never ends with a worse one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lmkit.models.roles import LINEARS
from lmkit.models.source import ModelSource
from lmkit.qtensor import QuantScheme, dequantize, int_scheme, quantize
from lmkit.quant.layer.gradients import layer_output
from lmkit.quant.layer.moments import run
from lmkit.quant.run import prepare
from lmkit.quant.steps import signround
from tests.quant.helpers import recipe, tiny_checkpoint
from tests.quant.steps.test_gptq import stream_of

SCHEMES = [int_scheme(4, 32), int_scheme(4, 32, symmetric=True)]


@pytest.mark.parametrize(
    "family",
    ["llama", "llama-tied-bias", "qwen2", "qwen3", "mistral-window", "olmo2", "granite", "opt", "opt-350m"],
)
def test_the_layer_with_gradients_is_the_decoders(tmp_path: Path, family: str) -> None:
    source, stream = stream_of(tiny_checkpoint(tmp_path, family), rows=3)
    layer = source.layer(1, torch.float32)
    weights = {role: weight for role, weight in layer.weights.items() if isinstance(weight, Tensor)}
    hidden = stream.hidden(0)
    output = layer_output(layer, weights, hidden.view(3, 24, -1))
    torch.testing.assert_close(output.flatten(0, 1), run(layer, stream, hidden), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_before_the_first_step_codes_and_grid_are_those_given(scheme: QuantScheme) -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    start = quantize(weight, scheme)
    start.codes[::3] = (start.codes[::3] + 1).clamp(max=15)  # as GPTQ may: not the nearest
    stored = signround.TunedWeight(weight, start).stored()
    for name in ("codes", "scales", "zeros"):
        assert torch.equal(getattr(stored, name), getattr(start, name))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tuning_lowers_the_loss_and_what_is_stored_has_it(scheme: QuantScheme) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 64, generator=generator)
    mix = torch.randn(16, 64, generator=generator)
    hidden = (torch.randn(8, 32, 16, generator=generator) @ mix) + 0.1 * torch.randn(8, 32, 64, generator=generator)
    start = {"mlp.down": quantize(weight, scheme)}

    def forward(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return x @ weights["mlp.down"].T

    tuned = signround.tune(
        forward, {"mlp.down": weight}, start, lambda i: (hidden[:6], hidden[:6] @ weight.T),  # type: ignore[arg-type]
        (hidden[6:], hidden[6:] @ weight.T), 60,
    )  # fmt: skip
    first, last = tuned.losses
    assert last < 0.7 * first
    error = hidden[6:] @ dequantize(tuned.weights["mlp.down"]).T - hidden[6:] @ weight.T
    assert float(error.square().mean()) == pytest.approx(last, rel=1e-4)


def test_a_start_that_cannot_get_better_is_kept() -> None:
    weight = dequantize(quantize(torch.randn(8, 32, generator=torch.Generator().manual_seed(0)), SCHEMES[0]))
    start, hidden = {"mlp.down": quantize(weight, SCHEMES[0])}, torch.randn(2, 4, 32)
    batch = hidden, hidden @ dequantize(start["mlp.down"]).T
    tuned = signround.tune(lambda w, x: x @ w["mlp.down"].T, {"mlp.down": weight}, start, lambda i: batch, batch, 5)
    assert tuned.weights["mlp.down"] is start["mlp.down"]
    assert tuned.losses[0] == tuned.losses[1]


def test_a_run_tunes_layers_and_repeats(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "source")
    tuning = [{"step": "rtn"}, {"step": "signround", "iters": 30, "batch": 3}]
    report = prepare(path, recipe(*tuning, rounder=None)).run(tmp_path / "one")
    prepare(path, recipe(*tuning, rounder=None)).run(tmp_path / "two")
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    assert any(linear.method == "signround" for layer in report.layers for linear in layer.linears)
    for layer in report.layers:
        assert layer.held_out is not None
        assert layer.held_out.error <= layer.held_out.rtn_error
        assert len(layer.linears) == len(LINEARS)
    ModelSource(tmp_path / "one").layer_weights(1)
