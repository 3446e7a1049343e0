"""Quantizing mixtures of experts: each expert by its own tokens, routers that keep sending them to the same experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch

from lmkit.kernels import ops
from lmkit.kv_dtype import FLOAT32
from lmkit.layers.batch import allocate_kv, whole_batch
from lmkit.layers.moe import MoE
from lmkit.models.decoder import Decoder
from lmkit.models.loader import load_model
from lmkit.models.source import ModelSource
from lmkit.quant.layer.routed import MIN_TOKENS, RoutedStats
from lmkit.quant.layer.scaling import apply
from lmkit.quant.recipe import load_recipe, parse_recipe
from lmkit.quant.report.report import QuantReport
from lmkit.quant.run import prepare
from lmkit.quant.sections import CalibrationRecipe
from tests.quant.helpers import CLIP, recipe, tiny_checkpoint

EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_hidden_layers": 1},
    "qwen2-moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 32, "num_experts": 5},
    "qwen3-moe": {"moe_intermediate_size": 64, "num_hidden_layers": 1, "decoder_sparse_step": 1, "num_experts": 5},
    "glm4-moe": {
        "moe_intermediate_size": 64,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,  # a larger one would scale the error of the experts too
    },
}
CALIBRATION = {"num_samples": 6, "seq_len": 128}
STEPS = ({"step": "awq_scale", "tokens": 128, "grid": 4}, CLIP)


@pytest.fixture(scope="module", params=EXPERTS)
def quantized(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, QuantReport]:
    folder = tmp_path_factory.mktemp(request.param)
    source = tiny_checkpoint(folder / "source", request.param, **EXPERTS[request.param])
    report = prepare(source, recipe(*STEPS, calibration=CALIBRATION)).run(folder / "out")
    return source, folder / "out", report


def logits(decoder: Decoder, rows: list[list[int]]) -> torch.Tensor:
    spec = decoder.spec
    batch, num_blocks = whole_batch(rows, 32)
    kv = [allocate_kv(num_blocks, layer.num_kv_heads, 32, layer.head_dim, (FLOAT32, FLOAT32)) for layer in spec.layers]
    return decoder(batch, kv)


def test_a_quantized_model_loads_and_is_close(quantized: tuple[Path, Path, QuantReport]) -> None:
    source, out, _ = quantized
    rows = [torch.randint(0, 4096, (60,), generator=torch.Generator().manual_seed(1)).tolist()]
    exact, got = (logits(load_model(path, activations="exact"), rows) for path in (source, out))
    assert 0 < float((got - exact).norm() / exact.norm()) < 0.25
    served = load_model(out)
    alone = logits(served, rows)
    assert torch.equal(logits(load_model(out, packed_cache=True), rows), alone)
    assert torch.equal(logits(served, [[9, 8, 7], *rows, [4] * 40])[3 : 3 + len(alone)], alone)


def test_every_expert_is_quantized_and_routers_are_not(quantized: tuple[Path, Path, QuantReport]) -> None:
    source, out, report = quantized
    spec = ModelSource(out).spec
    layers = range(spec.num_layers)
    routers = [spec.module_name(i, role) for i in layers for role in spec.layers[i].routers]
    entry = json.loads((out / "config.json").read_text())["quantization_config"]
    assert entry["modules_to_not_convert"] == sorted(routers)
    tensors = safetensors.torch.load_file(out / "model.safetensors")
    assert all(name + ".weight" in tensors for name in routers)
    for i in layers:
        for role in spec.layers[i].linears:
            module = spec.module_name(i, role)
            assert module + ".qweight" in tensors
            assert module + ".weight" not in tensors
    assert all(linear.format == "awq" for layer in report.layers for linear in layer.linears)
    assert (
        set(safetensors.torch.load_file(source / "model.safetensors"))
        >= {
            n.replace("correction_bias.weight", "correction_bias")  # as lmkit writes it
            for n in tensors
            if "q" not in n[-8:] and "scales" not in n
        }
    )


def test_the_report_counts_tokens_of_experts(quantized: tuple[Path, Path, QuantReport]) -> None:
    _, out, report = quantized
    spec = ModelSource(out).spec
    num_tokens = CALIBRATION["num_samples"] * CALIBRATION["seq_len"]
    for layer in report.layers:
        if not spec.layers[layer.index].is_sparse:
            assert layer.experts is None
            continue
        assert layer.experts is not None
        counts = layer.experts.tokens
        moe = spec.layers[layer.index].mixture
        assert moe is not None
        assert list(counts) == [str(i) for i in range(moe.num_experts)]
        assert sum(counts.values()) == num_tokens * moe.experts_per_token
        few = [int(expert) for expert, count in counts.items() if count < MIN_TOKENS]
        assert list(layer.experts.without_statistics) == few
        fitted = {scale.source for scale in layer.scales}
        assert {f"mlp.experts.{i}.up" for i in range(moe.num_experts) if i not in few} <= fitted
        (block,) = [scale for scale in layer.scales if scale.source == "norm.mlp"]
        assert "mlp.router" in block.consumers
        assert block.loss <= block.losses["identity"]  # type: ignore[operator]
    saved = json.loads((out / "report.json").read_text())
    assert [layer["experts"] is None for layer in saved["layers"]] == [layer.experts is None for layer in report.layers]


@pytest.mark.parametrize("targets", ["exact", "same"])
def test_gptq_rounds_each_expert_on_its_own_tokens(tmp_path: Path, targets: str) -> None:
    """Judged, after AWQ's scales, by what the expert gives for its own held-out tokens."""
    source = tiny_checkpoint(tmp_path / "source", "mixtral", **EXPERTS["mixtral"])
    gptq = {"step": "gptq", "targets": targets}
    sections = {"scheme": {"group_size": 32}, "calibration": CALIBRATION}
    plan = parse_recipe(sections | {"steps": [*STEPS, gptq]}, "test")
    (layer,) = prepare(source, plan).run(tmp_path / "out").layers
    experts = [linear for linear in layer.linears if ".experts." in linear.module and linear.damping is not None]
    assert len(experts) >= 6
    for linear in experts:
        assert 0 < (linear.held_out_error or 1) < 0.05
    assert logits(load_model(tmp_path / "out"), [[1, 2, 3]]).isfinite().all()


def test_smoothquant_knows_each_experts_input(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "mixtral", **EXPERTS["mixtral"])
    plan = load_recipe("smoothquant_w8a8")
    plan = msgspec.structs.replace(plan, calibration=CalibrationRecipe(**CALIBRATION))
    (layer,) = prepare(source, plan).run(tmp_path / "out").layers
    assert {scale.source for scale in layer.scales} >= {"norm.mlp", "mlp.experts.0.up"}
    assert all((linear.error or 0) < 0.01 for linear in layer.linears)


def lonely_checkpoint(path: Path) -> Path:
    """Expert 3's router row equals expert 1's: with one expert a token, it never gets any."""
    tiny_checkpoint(path, "mixtral", num_hidden_layers=1, num_experts_per_tok=1)
    file = path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    gate = tensors["model.layers.0.block_sparse_moe.gate.weight"]
    gate[3] = gate[1]
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("all_experts", [False, True])
def test_an_expert_without_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture, all_experts: bool) -> None:
    source = lonely_checkpoint(tmp_path / "source")
    plan = recipe(*STEPS, calibration=CALIBRATION | {"all_experts": all_experts})
    with caplog.at_level("WARNING", "lmkit.quant.layer.experts"):
        (layer,) = prepare(source, plan).run(tmp_path / "out").layers
    assert layer.experts is not None
    errors = {linear.module.split("mlp.")[-1].split("moe.")[-1]: linear.error for linear in layer.linears}
    if all_experts:
        assert set(layer.experts.tokens.values()) == {6 * 128}
        assert layer.experts.without_statistics == ()
        assert errors["experts.3.w2"]
        assert not caplog.messages
    else:
        assert layer.experts.tokens["3"] == 0
        assert 3 in layer.experts.without_statistics
        assert 1e-4 < (errors["experts.3.w1"] or 0) < 0.05  # of the weights alone
        assert "mlp.experts.3.up" not in {scale.source for scale in layer.scales}
        assert any("saw fewer than" in message for message in caplog.messages)
    assert logits(load_model(tmp_path / "out"), [[1, 2, 3]]).isfinite().all()


@pytest.mark.parametrize("name", EXPERTS)
def test_smoothing_leaves_routes_and_output(tmp_path: Path, name: str) -> None:
    """norm / s, and the columns of experts, routers and the shared expert times s; up / s, down times s."""
    source = ModelSource(tiny_checkpoint(tmp_path, name, **EXPERTS[name]))
    layer = source.layer(0, torch.float32)
    spec = layer.spec
    assert isinstance(layer.mlp, MoE)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(40, spec.hidden_size, generator=generator)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        normed = ops.rms_norm.select("cpu")(x, layer.norm("norm.mlp"))
        assert isinstance(layer.mlp, MoE)
        scores = layer.mlp.router(normed)[:, : layer.mlp.spec.num_experts]
        bias = layer.weights.get("mlp.score_bias")
        assert bias is None or isinstance(bias, torch.Tensor)
        return ops.route.select("cpu")(scores, layer.mlp.routing, bias)[1], layer.mlp(normed)

    experts, exact = run()
    for pair in spec.smooth[2:]:
        width = spec.hidden_size if pair[0] == "norm.mlp" else spec.linear_shape(pair[0])[0]
        apply(layer.weights, *pair, torch.rand(width, generator=generator) * 4 + 0.2, spec)
    again, output = run()
    assert torch.equal(again, experts)
    torch.testing.assert_close(output, exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))


def test_a_sample_of_tokens_whose_number_is_not_known() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(300, 8, generator=generator)
    stats, other = (RoutedStats.of(8, 4, 40, seed=9) for _ in range(2))
    for part in x.split([7, 0, 120, 1, 172]):
        stats.add(part)
        other.add(part * 2)
    assert (stats.num_tokens, len(stats.sample)) == (300, 40)
    assert torch.equal(stats.sample, x[stats.sample_ids])
    assert torch.equal(other.sample_ids, stats.sample_ids)
    assert stats.sample_ids.unique().tolist() == stats.sample_ids.tolist()
    torch.testing.assert_close(stats.abs_mean, x.abs().mean(0))
    assert {int(i) // 100 for i in stats.sample_ids} == {0, 1, 2}


def test_fewer_tokens_than_the_sample_holds_are_all_kept() -> None:
    stats = RoutedStats.of(4, 4, 40, seed=0)
    stats.add(torch.ones(3, 4))
    assert stats.sample_ids.tolist() == [0, 1, 2]
    stats.divide(torch.full((4,), 2.0))
    assert stats.sample.tolist() == [[0.5] * 4] * 3


def test_an_ignored_role_may_be_every_experts(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "mixtral", **EXPERTS["mixtral"])
    plan = prepare(source, recipe(*STEPS, ignore=["mlp.experts.*.down"], calibration=CALIBRATION)).plan
    assert sorted(plan.dense) == [f"model.layers.0.block_sparse_moe.experts.{i}.w2" for i in range(4)]
    assert plan.seconds["layers"] > 0
