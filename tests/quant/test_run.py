"""From a checkpoint to a quantized one: whole, loadable, reproducible, or not there at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from lmkit.errors import CheckpointError, ConfigError, UnsupportedError
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.kv_config import load_kv_config
from lmkit.models.loader import load_model
from lmkit.models.roles import LINEARS
from lmkit.models.source import ModelSource
from lmkit.qtensor import QTensor, quantize
from lmkit.quant.data.calibration import load_calibration
from lmkit.quant.layer.layer import Geometry
from lmkit.quant.plan import NUM_ROWS
from lmkit.quant.recipe import Recipe
from lmkit.quant.report.evaluate import encode_text, evaluate, text_of_tokens
from lmkit.quant.report.report import QuantReport
from lmkit.quant.run import prepare
from lmkit.quant.steps.base import Speed
from lmkit.text import Tokenizer
from tests.quant.helpers import CLIP, SCALE, TOKENIZER_FILES, recipe, tiny_checkpoint

AWQ = recipe(SCALE, CLIP)


def convert(path: Path, change: Any) -> Path:
    """Rewrite every tensor of a checkpoint by change(name, tensor)."""
    file = path / "model.safetensors"
    tensors = {name: change(name, tensor) for name, tensor in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    return path


def in_bfloat16(path: Path) -> Path:
    config = json.loads((path / "config.json").read_text()) | {"dtype": "bfloat16"}
    (path / "config.json").write_text(json.dumps(config))
    return convert(path, lambda name, tensor: tensor.bfloat16())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_bfloat16(tiny_checkpoint(tmp_path_factory.mktemp("source")))


@pytest.fixture(scope="module")
def quantized(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, QuantReport]:
    out = tmp_path_factory.mktemp("out") / "model"
    ids = encode_text(source)[:300]
    return out, prepare(source, AWQ).run(out, eval_ids=ids)


def test_the_result_is_a_checkpoint_of_the_awq_format(source: Path, quantized: tuple[Path, QuantReport]) -> None:
    out, report = quantized
    config = json.loads((out / "config.json").read_text())
    assert config.pop("quantization_config") == {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None,
    }  # fmt: skip
    assert report.head is not None
    assert config.pop("lm_head_storage", "stored") == report.head.storage
    assert config == json.loads((source / "config.json").read_text())
    for name in TOKENIZER_FILES:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    before, after = CheckpointReader(source), CheckpointReader(out)
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert torch.equal(before.tensor(name), after.tensor(name))
    assert load_model(out).spec == ModelSource(source).spec
    assert report.bytes_after < report.bytes_before
    kv = load_kv_config(out)
    assert kv is not None
    assert all((layer.k, layer.v) == ("dense", "dense") and min(layer.k_absmax) > 0 for layer in kv.layers)


def test_the_stored_layers_are_those_the_run_measured(source: Path, quantized: tuple[Path, QuantReport]) -> None:
    """Each layer of the file, fed by the stored layers before it, errs as reported: quantized prefix, exact norms."""
    out, report = quantized
    before, after = ModelSource(source), ModelSource(out)
    rows = load_calibration(AWQ.calibration, prepare(source, AWQ).tokenizer).rows
    geometry = Geometry.of(before.spec.layers[0], *rows.shape)
    stream = before.embed_tokens()[rows.flatten()].float()

    def run(model: ModelSource, index: int) -> Tensor:
        layer = model.layer(index, torch.float32).multiply_in(AWQ.product_dtype())
        delta, residual = layer(stream.clone(), None, geometry.batch, geometry.rope, geometry.kv)
        return delta + residual

    for index, layer in enumerate(report.layers):
        exact, stored = run(before, index), run(after, index)
        error = float((stored - exact).square().sum() / (exact - stream).square().sum())
        assert error == pytest.approx(layer.error, rel=1e-3)
        assert 0 < error < 0.1
        stream = stored


def test_the_report_tells_what_was_done(quantized: tuple[Path, QuantReport]) -> None:
    out, report = quantized
    saved = json.loads((out / "report.json").read_text())
    assert saved["recipe"]["steps"][0]["step"] == "awq_scale"
    assert saved["calibration"]["rows"] == 6
    assert len(saved["calibration"]["sha256"]) == 64
    assert [layer.index for layer in report.layers] == [0, 1]
    spec = ModelSource(out).spec
    for layer in report.layers:
        assert [linear.module for linear in layer.linears] == [spec.module_name(layer.index, role) for role in LINEARS]
        assert all(linear.format == "awq" and linear.reason is None for linear in layer.linears)
        assert len(layer.scales) == 4
        assert all(found.loss == min(found.losses.values()) <= found.identity_loss for found in layer.scales)  # type: ignore[type-var]
        clipped = [linear.clip for linear in layer.linears if linear.clip is not None]
        assert len(clipped) >= 5
        assert all(clip.loss <= clip.unclipped_loss for clip in clipped)
    before = sum(linear.rtn_error or 0 for layer in report.layers for linear in layer.linears)
    after = sum(linear.error or 0 for layer in report.layers for linear in layer.linears)
    assert 0 < after < before


def test_the_evaluation_in_the_report_is_that_of_the_result(source: Path, quantized: tuple[Path, QuantReport]) -> None:
    out, report = quantized
    ids = encode_text(source)[:300]
    again = evaluate(out, ids, against=source, seq_len=128, decode=text_of_tokens(source))
    assert report.evaluation is not None
    assert report.evaluation.model == str(out)
    assert report.evaluation.perplexity == again.perplexity
    assert report.evaluation.divergence == again.divergence
    assert again.divergence is not None
    assert 0 < again.divergence.kl_mean < 0.5


def test_two_runs_write_the_same_bytes(source: Path, quantized: tuple[Path, QuantReport], tmp_path: Path) -> None:
    out, _ = quantized
    prepare(source, AWQ).run(tmp_path / "again")
    names = {file.name for file in out.iterdir()}
    assert names == {file.name for file in (tmp_path / "again").iterdir()}
    for name in names - {"report.json", "report.html"}:  # which tell times
        assert (out / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_rtn_writes_the_codes_of_qtensor(source: Path, tmp_path: Path) -> None:
    prepare(source, recipe()).run(tmp_path / "out")
    before, after = ModelSource(source), ModelSource(tmp_path / "out")
    for role, weight in before.layer_weights(1, torch.float32).items():
        stored = after.layer_weights(1)[role]
        if role not in LINEARS:
            assert isinstance(stored, Tensor)
            assert torch.equal(stored.float(), weight)  # type: ignore[arg-type]
            continue
        assert isinstance(stored, QTensor)
        assert isinstance(weight, Tensor)
        expected = quantize(weight, AWQ.grid)
        assert torch.equal(stored.codes, expected.codes)
        assert torch.equal(stored.scales, expected.scales)
        assert torch.equal(stored.zeros, expected.zeros)


@pytest.mark.parametrize(
    "family", ["llama-tied-bias", "qwen2", "qwen3", "mistral-window", "olmo2", "gemma3", "granite"]
)
def test_every_family_is_quantized(tmp_path: Path, family: str) -> None:
    path = tiny_checkpoint(tmp_path / "source", family)
    report = prepare(path, AWQ).run(tmp_path / "out", eval_ids=encode_text(path)[:100])
    assert report.evaluation is not None
    assert report.evaluation.divergence is not None
    assert report.evaluation.divergence.kl_mean < 0.5


def test_ignored_linears_stay_dense(source: Path, tmp_path: Path) -> None:
    ignoring = recipe(SCALE, CLIP, ignore=["attn.o", "model.layers.0.mlp.*", "*.layers.1.self_attn.q_proj"])
    report = prepare(source, ignoring).run(tmp_path / "out")
    dense = {linear.module: linear.reason for layer in report.layers for linear in layer.linears if linear.reason}
    expected = {f"model.layers.{i}.self_attn.o_proj" for i in (0, 1)} | {"model.layers.1.self_attn.q_proj"}
    expected |= {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert dense.keys() == expected
    assert all("ignored" in str(reason) for reason in dense.values())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["modules_to_not_convert"] == sorted(expected)
    before, after = ModelSource(source), ModelSource(tmp_path / "out")
    untouched = after.layer_weights(0)["mlp.gate"], before.layer_weights(0)["mlp.gate"]
    assert torch.equal(*untouched)  # type: ignore[arg-type]
    load_model(tmp_path / "out")


def test_linears_that_the_format_cannot_hold_stay_dense(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "source", hidden_size=256, intermediate_size=8)
    report = prepare(path, AWQ).run(tmp_path / "out")
    dense = {linear.module: linear.reason for layer in report.layers for linear in layer.linears if linear.reason}
    assert dense.keys() == {f"model.layers.{i}.mlp.down_proj" for i in (0, 1)}
    assert set(dense.values()) == {"8 inputs are not a multiple of the group size 32"}
    load_model(tmp_path / "out")


def refused(path: Path, asked: Recipe) -> str:
    with pytest.raises((ConfigError, CheckpointError, UnsupportedError)) as caught:
        prepare(path, asked)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_recipes_that_do_not_fit_are_refused_before_any_work(
    source: Path, quantized: tuple[Path, QuantReport], tmp_path: Path
) -> None:
    assert "is quantized already (awq)" in refused(quantized[0], AWQ)
    assert "exceeds the model's context, 128" in refused(source, recipe(calibration={"seq_len": 129}))
    assert "'attn.w' matches no linear" in refused(source, recipe(ignore=["attn.w"]))
    assert "no layer 2" in refused(source, recipe(kv={"layers": {2: {"k_bits": 8}}}))
    assert "nothing to quantize" in refused(source, recipe(ignore=["*"]))
    only_wide = recipe(scheme={"group_size": 128, "smaller_groups": False})
    assert "14 of 14 linears, 100% of the weights, would stay dense" in refused(source, only_wide)
    assert "too short" in refused(source, recipe(calibration={"num_samples": 100_000, "seq_len": 128}))
    assert "no such file" in refused(source, recipe(calibration={"dataset": "missing.txt", "seq_len": 48}))
    assert "no such folder" in refused(tmp_path / "missing", AWQ)


def test_an_occupied_output_is_refused_and_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "keep.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        prepare(source, AWQ).run(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["keep.txt"]


@pytest.mark.parametrize("where", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_weights_that_are_not_numbers_are_refused_and_nothing_is_left(tmp_path: Path, where: str) -> None:
    def damage(name: str, tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, torch.nan) if name == where else tensor

    path = convert(tiny_checkpoint(tmp_path / "source"), damage)
    with pytest.raises(CheckpointError, match=r"not finite|not a finite number"):
        prepare(path, AWQ).run(tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_rounding_to_nearest_needs_no_text(source: Path, tmp_path: Path) -> None:
    """The weights are those of a run with text. No layer is run: nothing is known of keys, values and outputs."""
    without = prepare(source, recipe(calibration={"dataset": "none"})).run(tmp_path / "without")
    prepare(source, recipe()).run(tmp_path / "with")
    found, expected = (ModelSource(tmp_path / name) for name in ("without", "with"))
    for name in expected.reader.names():
        assert torch.equal(found.reader.tensor(name), expected.reader.tensor(name))
    assert load_kv_config(tmp_path / "without") is None
    for layer in without.layers:
        assert layer.error is None
        for linear in layer.linears:
            assert linear.method == "rtn"
            assert linear.error is not None
            assert 0 < linear.error < 0.05


def test_the_time_decides_how_many_rows_of_text(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speed = Speed(short=1e9, full=1e9, engine=1e9, rounding=1e9, calls=1e9)
    monkeypatch.setattr("lmkit.quant.plan.measure_speed", lambda *arguments: speed)
    chosen = [prepare(source, AWQ, time_budget=seconds) for seconds in (12.6, 13, 14, 1e6)]
    rows = [quantizer.recipe.calibration.num_samples for quantizer in chosen]
    assert rows[0] < rows[1] < rows[2] <= rows[3]
    for quantizer, count, seconds in zip(chosen, rows, (12.6, 13, 14, 1e6), strict=True):
        assert len(quantizer.data.rows) == count in NUM_ROWS
        assert sum(quantizer.plan.seconds.values()) <= seconds
    short = recipe(SCALE, calibration={"dataset": "demo-chat", "seq_len": 128})
    found = prepare(source, short, time_budget=1e6).recipe.calibration.num_samples
    assert found < NUM_ROWS[0]  # there is not more text
    load_calibration(short.with_rows(found).calibration, Tokenizer.from_pretrained(source))
    more = NUM_ROWS[NUM_ROWS.index(found) - 1]
    with pytest.raises(ConfigError, match="too short for"):
        load_calibration(short.with_rows(more).calibration, Tokenizer.from_pretrained(source))
