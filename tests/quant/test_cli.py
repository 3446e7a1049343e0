"""The commands: options reach the recipe, results come as JSON or as tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lmkit.cli import eval as eval_command
from lmkit.cli import quantize as quantize_command
from lmkit.errors import ConfigError
from tests.quant.helpers import tiny_checkpoint

app = typer.Typer()
app.command("quantize")(quantize_command.quantize)
app.command("eval")(eval_command.evaluate)
SMALL = ["--group-size", "32", "--num-samples", "4", "--seq-len", "32"]


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("source"), num_hidden_layers=1)


def test_quantize_then_eval_as_json(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(left, right):\n    return left + right\n" * 400)
    options = ["--recipe", "rtn_w4a16_g128", "--calibration", text, "--kv-bits", "8", "--seed", "3", "--no-eval"]
    report = json.loads(run("quantize", source, "-o", tmp_path / "out", *options, *SMALL, "--json"))
    assert report["recipe"]["scheme"]["group_size"] == 32
    assert report["recipe"]["kv"]["bits"] == 8
    assert report["recipe"]["calibration"] == {
        "dataset": [str(text)], "num_samples": 4, "seq_len": 32, "seed": 3,
    }  # fmt: skip
    assert report["evaluation"] is None
    kv = json.loads((tmp_path / "out" / "kv_config.json").read_text())
    assert [layer["k"] for layer in kv["layers"]] == ["int8"]

    options = ["--against", source, "--text", text, "--seq-len", "64", "--limit", "256"]
    result = json.loads(run("eval", tmp_path / "out", *options, "--activations", "exact", "--json"))
    assert result["kv_dtype"] == "int8"
    assert result["activations"] == "exact"
    assert result["num_tokens"] == 4 * 63
    assert 0 < result["divergence"]["kl_mean"] < 1
    result = json.loads(run("eval", source, "--text", text, "--seq-len", "64", "--kv-dtype", "int4", "--json"))
    assert result["kv_dtype"] == "int4"
    assert result["divergence"] is None


def test_tables_show_plan_errors_and_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_hidden_layers=1, intermediate_size=88)
    monkeypatch.setattr("lmkit.quant.run.EVAL_TOKENS", 256)
    shown = run("quantize", source, "-o", tmp_path / "out", *SMALL)
    assert "awq_scale, awq_clip, rtn; 4 bits, groups of 32; KV 16 bits" in shown
    assert "estimate:" in shown
    assert "stays dense: model.layers.0.mlp.down_proj: 88 inputs" in shown
    assert "same most likely token" in shown
    shown = run("eval", tmp_path / "out", "--seq-len", "64", "--limit", "64")
    assert "perplexity" in shown
    assert "reference" not in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["quantize", "demo", "-o", "out", "--recipe", "unknown"],
        ["quantize", "demo", "-o", "out", "--group-size", "48"],
        ["quantize", "demo", "-o", "out", "--kv-bits", "5"],
        ["quantize", "demo", "-o", "out", "--calibration", "missing.txt"],
        ["eval", "demo", "--kv-dtype", "int3"],
        ["eval", "demo", "--activations", "none"],
        ["eval", "demo", "--text", "missing.txt"],
    ],
)
def test_wrong_options_are_config_errors(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        run(*arguments)
    assert list(tmp_path.iterdir()) == []
