"""GPTQ: where it must equal plain rounding, where it must be better, and that it never breaks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lmkit.formats.mxfp4 import MXFP4
from lmkit.formats.nvfp4 import NVFP4
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.roles import expert_of
from lmkit.models.source import ModelSource
from lmkit.qtensor import QTensor, QuantScheme, dequantize, int_scheme, quantize
from lmkit.quant.data.hidden_states import Stream
from lmkit.quant.layer.moments import Moments, collect, held_out_rows
from lmkit.quant.layer.passes import LayerPass
from lmkit.quant.layer.refine import refine
from lmkit.quant.run import prepare
from lmkit.quant.steps import gptq
from lmkit.quant.steps.gptq import Gptq
from tests.quant.helpers import CLIP, recipe, tiny_checkpoint

ORDERS = ("activation", "gar", "natural")
SCHEME = int_scheme(4, 32)


def weight_of(rows: int = 48, columns: int = 128, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def inputs(tokens: int = 1000, rank: int = 32, seed: int = 1) -> Tensor:
    """Correlated [tokens, 128] with a few large channels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, rank, generator=generator) @ torch.randn(rank, 128, generator=generator)
    x += 0.3 * torch.randn(tokens, 128, generator=generator)
    x[:, ::40] *= 4
    return x


def hessian_of(x: Tensor) -> Tensor:
    return (x.double().T @ x.double()).float()


def solve(weight: Tensor, hessian: Tensor, order: str = "activation", scheme: QuantScheme = SCHEME) -> QTensor:
    factor = gptq.factorize(hessian, gptq.column_order(hessian, order, scheme.group_size), 0.01)
    assert factor is not None
    return gptq.round_columns(weight, quantize(weight, scheme), factor)


def error(weight: Tensor, q: QTensor, x: Tensor) -> float:
    return float((x.double() @ (dequantize(q) - weight).double().T).square().sum())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "scheme", [SCHEME, int_scheme(4, 32, symmetric=True), int_scheme(8, -1, symmetric=True), NVFP4, MXFP4]
)
def test_with_uncorrelated_inputs_it_is_plain_rounding(order: str, scheme: QuantScheme) -> None:
    weight = weight_of()
    for hessian in (torch.eye(128), torch.diag(torch.linspace(0.01, 100, 128))):
        rounded, plain = solve(weight, hessian, order, scheme), quantize(weight, scheme)
        assert torch.equal(dequantize(rounded), dequantize(plain))  # float4 has two zeros
        assert torch.equal(rounded.scales, plain.scales)


@pytest.mark.parametrize(("order", "scheme"), [*((order, SCHEME) for order in ORDERS), ("gar", NVFP4), ("gar", MXFP4)])
def test_it_errs_less_than_plain_rounding_on_other_tokens(order: str, scheme: QuantScheme) -> None:
    weight, x, unseen = weight_of(), inputs(seed=1)[:800], inputs(seed=1)[800:]
    plain, rounded = quantize(weight, scheme), solve(weight, hessian_of(x), order, scheme)
    assert error(weight, rounded, unseen) < 0.6 * error(weight, plain, unseen)
    refined = refine(weight, rounded, hessian_of(x), 2)
    assert error(weight, refined, x) < 0.97 * error(weight, rounded, x)
    assert error(weight, refined, unseen) < error(weight, rounded, unseen)


@pytest.mark.parametrize("scheme", [SCHEME, NVFP4, MXFP4], ids=str)
def test_refinement_never_raises_the_error_and_keeps_the_zeros(scheme: QuantScheme) -> None:
    weight, x = weight_of(), inputs()
    rounded, errors = quantize(weight, scheme), []
    for _ in range(5):
        errors.append(error(weight, rounded, x))
        refined = refine(weight, rounded, hessian_of(x), 1)
        assert torch.equal(refined.zeros, rounded.zeros)
        assert refined.factor is rounded.factor
        rounded = refined
    assert errors == sorted(errors, reverse=True)
    assert bool((rounded.scheme.scales.plain(rounded.scales, rounded.factor) > 0).all())


def test_columns_come_in_the_order_of_their_inputs() -> None:
    diagonal = torch.tensor([1.0, 4, 9, 2, 7, 8, 3, 5])
    hessian = torch.diag(diagonal)
    assert gptq.column_order(hessian, "activation", 4).tolist() == [2, 5, 4, 7, 1, 6, 3, 0]
    assert gptq.column_order(hessian, "gar", 4).tolist() == [2, 1, 3, 0, 5, 4, 7, 6]
    assert gptq.column_order(hessian, "natural", 4).tolist() == list(range(8))


def test_rows_are_rounded_each_by_itself() -> None:
    weight, hessian = weight_of(), hessian_of(inputs())
    shuffled = torch.randperm(48, generator=torch.Generator().manual_seed(2))
    assert torch.equal(solve(weight, hessian).codes[shuffled], solve(weight[shuffled], hessian).codes)


def test_few_tokens_and_dead_inputs_leave_finite_codes() -> None:
    weight, x = weight_of(), inputs(tokens=20)
    x[:, 5] = 0
    rounded = refine(weight, solve(weight, hessian_of(x)), hessian_of(x), 2)
    assert bool(dequantize(rounded).isfinite().all())
    assert error(weight, rounded, x) < error(weight, quantize(weight, SCHEME), x)
    assert float((dequantize(rounded)[:, 5] - weight[:, 5]).abs().max()) < 0.5


def test_few_tokens_are_damped_more() -> None:
    assert gptq.enough_damping(256, 30720) == gptq.MIN_DAMPING
    assert gptq.enough_damping(4096, 30720) == pytest.approx(4096 / 3 / 30720)
    assert gptq.enough_damping(4096, 128) == gptq.MAX_DAMPING


def test_damping_grows_until_there_is_a_factor_or_there_is_none() -> None:
    hessian, order = hessian_of(inputs()), torch.arange(128)
    shifted = hessian - 0.05 * hessian.diagonal().mean() * torch.eye(128)
    factor = gptq.factorize(shifted, order, 0.01)
    assert factor is not None
    assert factor.damping == pytest.approx(0.1)
    assert gptq.factorize(-hessian, order, 0.01) is None
    assert gptq.factorize(torch.zeros_like(hessian), order, 0.01) is None
    assert gptq.factorize(hessian * torch.nan, order, 0.01) is None


def test_the_target_is_the_weight_for_the_original_outputs() -> None:
    """Inputs that lost a fifth of some channels: the weight makes up for it."""
    weight, exact = weight_of(), inputs(rank=128)
    factors = torch.ones(128)
    factors[::3] = 0.8
    x = exact * factors
    order, scheme = torch.randperm(128), int_scheme(8, 32)
    shift, factor = weight @ (exact - x).T @ x, gptq.factorize(hessian_of(x), order, 1e-6)
    assert factor is not None
    grid = quantize(weight / factors, scheme)
    found = gptq.round_columns(weight, grid, factor, shift=shift)
    wanted = gptq.round_columns(weight / factors, grid, factor)
    least = error(weight / factors, wanted, x)
    assert error(weight / factors, found, x) < 1.5 * least
    assert error(weight / factors, gptq.round_columns(weight, grid, factor), x) > 100 * least
    refined = refine(weight, found, hessian_of(x), 2, shift=shift)
    assert error(weight / factors, refined, x) < error(weight / factors, found, x)


def stream_of(path: Path, rows: int = 10, *, exact: bool = False) -> tuple[ModelSource, Stream]:
    source = ModelSource(path)
    ids = torch.randint(0, 4096, (rows, 24), generator=torch.Generator().manual_seed(0))
    return source, Stream.embedded(source, ids, exact=exact)


def seen_by(stream: Stream, layer: DecoderLayer, role: str) -> Tensor:
    """What a linear sees of the first batch in the layer's own forward."""
    seen: dict[str, Tensor] = {}
    layer.observe(seen.__setitem__)
    stream.output(layer, 0)
    layer.observe(None)
    return seen[role]


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe"])
def test_a_pass_in_parts_is_the_layers_forward(tmp_path: Path, family: str) -> None:
    """Inputs of every linear, and what stands after the layer."""
    source, stream = stream_of(tiny_checkpoint(tmp_path, family))
    layer = source.layer(stream.layer, torch.float32)
    whole = stream.output(layer, 0)
    layer_pass = LayerPass(stream, layer)
    tokens = slice(0, len(whole))
    for role in layer.spec.linears:
        if expert_of(role) is None:
            part = layer.spec.part_of(role)
            x = layer_pass.inputs(tokens, part, (role,))[role]
            torch.testing.assert_close(x, seen_by(stream, layer, role), rtol=1e-5, atol=1e-5)
            layer_pass.part = part
    layer_pass.move(tokens, layer_pass.end)
    stream.advance()
    torch.testing.assert_close(stream.hidden(0), whole, rtol=1e-5, atol=1e-5)


def test_moments_are_sums_over_all_rows_but_the_held_out(tmp_path: Path) -> None:
    source, stream = stream_of(tiny_checkpoint(tmp_path), exact=True)
    layer, original = source.layer(0, torch.float32), source.layer(0, torch.float32)
    layer.weights["attn.v"] = layer.weights["attn.v"] * 1.1  # type: ignore[operator]
    s = torch.linspace(0.5, 2, layer.spec.linear_shape("attn.o")[1])
    x, e = seen_by(stream, layer, "attn.o"), seen_by(stream, original, "attn.o") / s
    kept = (10 - held_out_rows(10)) * 24
    stream.states(0, exact=True).mul_(3)  # which no norm lets through, so only the residual stream lacks something
    weight = layer.weights["attn.o"]
    assert isinstance(weight, torch.Tensor)
    lack = 2 * stream.hidden(0)
    passes = LayerPass(stream, layer), LayerPass(stream, original, exact=True)
    found = collect(*passes, {"attn.o": weight}, {"attn.o": s})["attn.o"]
    assert found.num_tokens == kept < 240
    torch.testing.assert_close(found.hessian, hessian_of(x[:kept]), rtol=1e-4, atol=1e-5)
    assert found.shift is not None
    assert found.held_lack is not None
    pull = (e - x) @ weight.T + lack
    torch.testing.assert_close(found.shift, pull[:kept].T @ x[:kept], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found.held_lack, lack[kept:])
    torch.testing.assert_close(found.held, x[kept:])
    torch.testing.assert_close(found.held_exact, e[kept:], rtol=1e-2, atol=1e-2)


def test_a_linear_that_plain_rounding_serves_better_falls_back() -> None:
    weight, plain = weight_of(), quantize(weight_of(), SCHEME)
    moments = Moments.empty(128)
    moments.held = moments.held_exact = inputs()
    bad = QTensor(plain.codes.flip(0), plain.scales, plain.zeros, SCHEME)
    judged = gptq._judge(weight, bad, plain, moments, 0.01, torch.float32)
    assert judged.weight is plain
    assert judged.method == "rtn"
    assert judged.fallback is not None
    assert judged.error is not None
    assert judged.rtn_error is not None
    assert judged.error > judged.rtn_error


def test_inputs_that_saw_too_little_are_rounded_plainly_and_say_so(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "source")
    few = recipe({"step": "gptq"}, calibration={"num_samples": 2, "seq_len": 24}, rounder=None)
    report = prepare(path, few).run(tmp_path / "out")
    linears = [linear for layer in report.layers for linear in layer.linears]
    assert all(linear.method == "rtn" and "24 calibration tokens" in str(linear.fallback) for linear in linears)


@pytest.mark.parametrize("targets", ["exact", "same"])
def test_a_run_says_what_it_did_and_repeats(tmp_path: Path, targets: str) -> None:
    path = tiny_checkpoint(tmp_path / "source")
    step = {"step": "gptq", "targets": targets, "sequential": targets == "exact"}
    asked = recipe(CLIP, step, rounder=None, calibration={"num_samples": 24, "seq_len": 64})
    reports = [prepare(path, asked).run(tmp_path / name) for name in ("one", "two")]
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    for layer in reports[0].layers:
        assert layer.held_out is not None
        assert layer.held_out.tokens == 64
        assert layer.held_out.error <= layer.held_out.rtn_error or layer.held_out.fallback is not None
        assert all(linear.method in ("gptq", "rtn") for linear in layer.linears)
        assert all(linear.method == "gptq" or linear.fallback for linear in layer.linears)
    assert any(linear.method == "gptq" for layer in reports[0].layers for linear in layer.linears)


def test_recipe_options_are_the_documented_defaults() -> None:
    assert Gptq() == Gptq(order="activation", damping="auto", targets="exact", strength=1.0, sequential=True, refine=2)
