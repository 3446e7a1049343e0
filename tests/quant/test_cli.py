"""The commands: options reach the recipe, results come as JSON or as tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from lmkit.cli.main import app
from lmkit.quant.recipe import load_recipe, recipe_for
from tests.cli.commands import mistake
from tests.quant.helpers import tiny_checkpoint

SMALL = ["--group-size", "32", "--num-samples", "4", "--seq-len", "32"]


def run(*arguments: object) -> str:
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
    source = tiny_checkpoint(tmp_path / "source", num_hidden_layers=1, hidden_size=256, intermediate_size=8)
    monkeypatch.setattr("lmkit.quant.run.EVAL_TOKENS", 256)
    shown = run("quantize", source, "-o", tmp_path / "out", "--calibration", "demo", *SMALL)
    assert "recipe loss_w4a16_g128: awq_scale, awq_clip, gptq\n" in shown
    assert "weights: 4 bits, groups of 32, format awq; KV cache: 16 bits\n" in shown
    assert "estimate:" in shown
    assert "stays dense: model.layers.0.mlp.down_proj: 8 inputs" in shown
    assert "same most likely token" in shown
    assert "calibration: demo: 108 documents, sha256 " in shown
    assert "GiB at the peak; report: " in shown
    assert "report.html" in shown
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!doctype html>")
    shown = run("eval", tmp_path / "out", "--seq-len", "64", "--limit", "64")
    assert "perplexity" in shown
    assert "reference" not in shown


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--recipe unknown", "recipe 'unknown': not a .yaml file and not one of awq_rtn_w4a16_g128, awq_w4a16_g128"),
        ("--recipe awq_w4a16", "; did you mean awq_w4a16_g128?"),
        ("--recipe gptq", "no recipe gptq: use w4a16_g128_sym_gptq, or gptq_w4a16_g128 for GPTQ alone"),
        ("--recipe gone.yaml", "recipe gone.yaml: no such file"),
        ("--group-size 7", "--group-size '7': expected -1, 16, 32, 64, 128, channel, tensor or block"),
        ("--group-size tensor", "group_size tensor is for type float; int has 32, 64, 128 or channel"),
        ("--format foo", "--format 'foo': expected awq, gptq, gptq_v2, compressed-tensors or fp8"),
        ("--bits four", "--bits 'four': expected 2, 3, 4 or 8"),
        ("--bits 4.5", "--bits '4.5': expected 2, 3, 4 or 8; --average-bits mixes them"),
        ("--average-bits 2", "average_bits 2 cannot be reached; the lowest for this model is 2.141"),
        ("--average-bits 0", "--average-bits '0': expected a number of at least 1 and at most 32"),
        (
            "--average-bits 4.5 --format gptq",
            "linears of format gptq all have one scheme; compressed",
        ),
        ("--kv-bits 5", "--kv-bits '5': expected 16, 8, 4, 3, 2 or auto"),
        ("--seq-len 0", "--seq-len '0': expected an integer of at least 8"),
        ("--seq-len 100000", "calibration.seq_len 100000 exceeds the model's context, 4096"),
        ("--num-samples 0", "--num-samples '0': expected an integer of at least 1"),
        ("--seed -1", "--seed '-1': expected an integer of at least 0"),
        ("--calibration missing.txt", "missing.txt"),
        ("--calibration demo:nan", "demo:nan"),
        ("--max-memory 64MiB", "--max-memory 64MiB: quantizing"),
        ("--max-memory much", "--max-memory: 'much' is not a size"),
        ("--device cuda:0", "--device cuda:0: torch"),
        ("--time-budget 20", "--time-budget: '20' is not a time; write for example 20m or 1h30m"),
        ("--time-budget 20m --num-samples 8", "--time-budget chooses the number of rows; leave out --num-samples"),
        ("--time-budget 0.1s", "--time-budget: 16 rows of 512 tokens take about"),
        ("--recipe awq_w4a16_g128 --format fp8", "; --recipe fp8_block writes fp8"),
        ("--recipe awq_w4a16_g128 --format gptq", "; --recipe w4a16_g128_sym_gptq writes gptq"),
        ("--recipe fp8_block --bits 4", "type float has `bits: 8`"),
    ],
)
def test_a_wrong_option_of_quantize(options: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert line in mistake("quantize", "demo", "-o", "out", *options.split())
    assert list(tmp_path.iterdir()) == []


def test_the_bundled_text_is_for_the_demo_model(source: Path, tmp_path: Path) -> None:
    line = mistake("quantize", source, "-o", tmp_path / "out", *SMALL)
    assert f"{source} needs --calibration" in line
    assert "--calibration demo takes the demo model's" in line
    run(
        "quantize", source, "-o", tmp_path / "out", "--recipe", "rtn_w8a16", "--group-size", "32", "--no-eval"
    )  # no text


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        ((), "loss_w4a16_g128"),
        ((None, 4), "loss_w4a16_g128"),
        ((None, 8), "rtn_w8a16"),
        (("gptq",), "w4a16_g128_sym_gptq"),
        (("gptq", 8), "w4a16_g128_sym_gptq"),
        (("gptq_v2",), "loss_w4a16_g128"),
        (("compressed-tensors", 8), "rtn_w8a16"),
        (("fp8",), "fp8_block"),
        ((None, None, 4.5), "mixed_4.5"),
    ],
)
def test_what_is_asked_decides_the_recipe(options: tuple[Any, ...], recipe: str) -> None:
    """And the recipe can be written so."""
    assert recipe_for(*options) == recipe
    weight_format, bits, average = (*options, None, None, None)[:3]
    loaded = load_recipe(recipe, {"format": weight_format, "average_bits": average, "scheme": {"bits": bits}})
    assert weight_format in (None, loaded.format)
    assert bits in (None, loaded.scheme.bits)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            "--kv-dtype int5",
            "--kv-dtype 'int5': expected auto, float32, bfloat16, float16, int8, fp8, int4, int3 or int2",
        ),
        ("--activations none", "--activations 'none': expected auto, int8, fp8 or exact"),
        ("--lm-head int4", "--lm-head 'int4': expected auto, int8 or stored"),
        ("--seq-len 1", "--seq-len '1': expected an integer of at least 2"),
        ("--limit 1", "--limit '1': expected an integer of at least 2"),
        ("--text missing.txt", "missing.txt"),
        ("--dataset missing.jsonl", "missing.jsonl"),
        ("--dataset demo-text --text missing.txt", "--text and --dataset: give one of them"),
        ("--against nowhere", "nowhere"),
    ],
)
def test_a_wrong_option_of_eval(options: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert line in mistake("eval", "demo", *options.split())
    assert list(tmp_path.iterdir()) == []


def test_an_occupied_output_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    assert "is not empty; choose another folder" in mistake("quantize", "nowhere", "-o", tmp_path)


def test_an_estimate_that_does_not_fit_is_refused_before_any_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmkit.turbo.host_memory.available_memory", lambda: 100 << 20)
    out = tmp_path / "out"
    command = [
        "quantize",
        source,
        "-o",
        out,
        "--no-eval",
        "--recipe",
        "rtn_w4a16_g128",
        "--calibration",
        "demo",
        *SMALL,
    ]
    line = mistake(*command)
    assert "of memory, 100MiB are free; the least that works is " in line
    assert line.endswith("; --ignore-estimate starts anyway")
    monkeypatch.setattr("lmkit.turbo.host_memory.available_memory", lambda: 1 << 40)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 10))
    assert "of disk, 1024 bytes are free where the output goes; --ignore-estimate" in mistake(*command)
    assert not out.exists()
    assert list(tmp_path.iterdir()) == []
    run(*command, "--ignore-estimate", "--json")
    assert out.exists()


def test_a_budget_of_bits_is_shown_and_kept(source: Path, tmp_path: Path) -> None:
    small = [
        "--recipe",
        "rtn_w4a16_g128",
        "--num-samples",
        "4",
        "--seq-len",
        "32",
        "--no-eval",
        "--calibration",
        "demo",
    ]
    options = [*small, "--group-size", "64", "--average-bits", "6", "--format", "compressed-tensors"]
    shown = run("quantize", source, "-o", tmp_path / "out", *options)
    assert "weights: 4 bits, groups of 64, or finer: 6 bits on average, format compressed-tensors; KV" in shown
    found = re.search(r"^([\d.]+) bits a weight of 6: (.*)$", shown, re.MULTILINE)
    assert found is not None
    assert 4.25 <= float(found[1]) <= 6
    assert "int4 g32" in found[2]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
