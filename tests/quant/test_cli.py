"""The commands: options reach the recipe, results come as JSON or as tables."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lmkit.cli import eval as eval_command
from lmkit.cli import quantize as quantize_command
from lmkit.errors import ConfigError, UnsupportedError
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
    options = ["--recipe", "rtn_w4a16_g128", "--kv-bits", "8", "--seed", "3", "--no-eval"]
    options += ["--calibration", text, "--calibration", "demo-chat:2"]
    report = json.loads(run("quantize", source, "-o", tmp_path / "out", *options, *SMALL, "--json"))
    assert report["recipe"]["scheme"]["group_size"] == 32
    assert report["recipe"]["kv"]["bits"] == 8
    assert report["recipe"]["calibration"] == {
        "dataset": [str(text), {"source": "demo-chat", "weight": 2.0}], "num_samples": 4, "seq_len": 32, "seed": 3,
        "all_experts": False,
    }  # fmt: skip
    assert [source["samples"] for source in report["calibration"]["sources"]] == [1, 3]
    assert report["evaluation"] is None
    kv = json.loads((tmp_path / "out" / "kv_config.json").read_text())
    assert [(layer["k"], layer["v"]) for layer in kv["layers"]] == [("int8", "int8")]

    options = ["--against", source, "--text", text, "--seq-len", "64", "--limit", "256"]
    result = json.loads(run("eval", tmp_path / "out", *options, "--activations", "exact", "--json"))
    assert result["kv_dtype"] == "int8"
    assert result["activations"] == "exact"
    assert result["num_tokens"] == 4 * 63
    assert 0 < result["divergence"]["kl_mean"] < 1
    result = json.loads(run("eval", source, "--text", text, "--seq-len", "64", "--kv-dtype", "int4", "--json"))
    assert result["kv_dtype"] == "int4"
    assert result["divergence"] is None
    result = json.loads(run("eval", source, "--dataset", "demo-text", "--seq-len", "64", "--limit", "128", "--json"))
    assert result["num_tokens"] == 2 * 63


def test_tables_show_plan_errors_and_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_hidden_layers=1, intermediate_size=88)
    monkeypatch.setattr("lmkit.quant.run.EVAL_TOKENS", 256)
    shown = run("quantize", source, "-o", tmp_path / "out", *SMALL)
    assert "awq_scale, awq_clip, gptq; 4 bits, groups of 32; KV 16 bits" in shown
    assert "estimate:" in shown
    assert "stays dense: model.layers.0.mlp.down_proj: 88 inputs" in shown
    assert "same most likely token" in shown
    assert "calibration: demo: 108 documents, sha256 " in shown
    assert "GiB at the peak; report: " in shown
    assert "report.html" in shown
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!doctype html>")
    shown = run("eval", tmp_path / "out", "--seq-len", "64", "--limit", "64")
    assert "perplexity" in shown
    assert "reference" not in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["quantize", "demo", "-o", "out", "--recipe", "unknown"],
        ["quantize", "demo", "-o", "out", "--group-size", "48"],
        ["quantize", "demo", "-o", "out", "--group-size", "tensor"],
        ["quantize", "demo", "-o", "out", "--format", "gguf"],
        ["quantize", "demo", "-o", "out", "--bits", "2.5"],
        ["quantize", "demo", "-o", "out", "--kv-bits", "5"],
        ["quantize", "demo", "-o", "out", "--calibration", "missing.txt"],
        ["quantize", "demo", "-o", "out", "--max-memory", "64MiB"],
        ["quantize", "demo", "-o", "out", "--max-memory", "much"],
        ["eval", "demo", "--kv-dtype", "int3"],
        ["eval", "demo", "--activations", "none"],
        ["eval", "demo", "--text", "missing.txt"],
        ["eval", "demo", "--dataset", "missing.jsonl"],
        ["eval", "demo", "--dataset", "demo-text", "--text", "missing.txt"],
        ["quantize", "demo", "-o", "out", "--calibration", "demo:nan"],
    ],
)
def test_wrong_options_are_config_errors(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        run(*arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_budget_of_bits_is_shown_and_kept(source: Path, tmp_path: Path) -> None:
    small = ["--recipe", "rtn_w4a16_g128", "--num-samples", "4", "--seq-len", "32", "--no-eval"]
    options = [*small, "--group-size", "64", "--bits", "6", "--format", "compressed-tensors"]
    shown = run("quantize", source, "-o", tmp_path / "out", *options)
    assert "rtn; 4 bits, groups of 64, or finer: 6 bits on average; KV 16 bits" in shown
    found = re.search(r"^([\d.]+) bits a weight of 6: (.*)$", shown, re.MULTILINE)
    assert found is not None
    assert 4.25 <= float(found[1]) <= 6
    assert "int4 g32" in found[2]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


def test_another_device_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="--device cuda:0: quantization runs on the CPU"):
        run("quantize", "demo", "-o", "out", "--device", "cuda:0")
