"""KL divergence of low-bit KV caches from the float cache, on keys with a large bias, as Qwen2's have.

    python -m benchmarks.key_bias [--tokens 4096] [--make DIR] [--json FILE]

The case is the demo model as a Qwen2. Its k_proj.bias has elements of up to 300 at RoPE pairs that turn slowly, and
smaller ones at faster pairs. Queries are smaller there, so that the model still predicts text. The demo model as it is
stands beside it. Weights are rounded to nearest, and the reference has the same weights: only the cache differs.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import save
from lmkit.config import KVStorageName
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.formats.kv_config import load_kv_config
from lmkit.quant.recipe import parse_recipe
from lmkit.quant.report.evaluate import EvalResult, encode_text, evaluate
from lmkit.quant.run import prepare

console = Console()
BIASES = {31: 300.0, 30: 150.0, 27: 80.0, 12: 20.0}  # RoPE pair -> radius
QUERY_GAIN = 0.1  # of queries at these pairs
PLAIN: dict[str, KVStorageName] = {"int4": "int4", "int8": "int8", "fp8": "fp8"}
OURS: dict[str, dict[str, Any]] = {
    "int4, fitted": {"bits": 4, "hadamard": False},
    "int4, fitted, Hadamard": {"bits": 4, "hadamard": True},
    "5 bits on average": {"bits": "auto", "average_bits": 5},
    "int8, fitted": {"bits": 8},
}


def add_key_bias(source: str | Path, target: Path) -> None:
    """Write the demo model (or another Llama with heads of 64) with key biases, as a Qwen2ForCausalLM."""
    generator = torch.Generator().manual_seed(0)
    with CheckpointReader(source) as reader:
        config = {k: v for k, v in reader.config.items() if k not in ("attention_bias", "mlp_bias", "pretraining_tp")}
        heads, half = config["num_key_value_heads"], config["head_dim"] // 2
        writer = CheckpointWriter(target)
        for name in reader.names():
            weight = reader.tensor(name)
            if name.endswith("q_proj.weight"):
                rows = weight.clone().view(-1, 2, half, weight.shape[1])
                rows[:, :, list(BIASES)] *= QUERY_GAIN
                weight = rows.view(weight.shape)
            writer.add(name, weight)
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                bias = torch.zeros(len(weight))
                if "k_proj" in name:
                    for pair, radius in BIASES.items():
                        angle = torch.rand(heads, generator=generator) * 2 * torch.pi
                        bias.view(heads, 2, half)[:, :, pair] = radius * torch.stack([angle.cos(), angle.sin()], dim=-1)
                writer.add(name.removesuffix("weight") + "bias", bias.to(weight.dtype))
        changes = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
        writer.finish(config | changes, reader.path)


def quantize(model: Path, kv: dict[str, Any], output: Path) -> None:
    recipe = {
        "scheme": {"group_size": 64},
        "steps": [{"step": "rtn"}],
        "kv": kv,
        "calibration": {"num_samples": 16, "seq_len": 256},
    }
    prepare(model, parse_recipe(recipe, "benchmarks.key_bias")).run(output)


def measure(model: Path, kv_dtype: KVStorageName, tokens: int) -> EvalResult:
    """Evaluate against the same weights with float32 KV."""
    return evaluate(
        model, encode_text(model), against=model, kv_dtype=kv_dtype, activations="exact", seq_len=512, limit=tokens
    )


def run(model: Path, folder: Path, tokens: int) -> list[dict[str, Any]]:
    quantize(model, {"bits": 16}, folder / "plain")
    rows = [{"cache": f"{name}, plain"} | _figures(measure(folder / "plain", t, tokens)) for name, t in PLAIN.items()]
    for name, kv in OURS.items():
        output = folder / name.replace(" ", "-")
        quantize(model, kv, output)
        config = load_kv_config(output)
        assert config is not None
        layers = config.layers
        row: dict[str, Any] = {"cache": name} | _figures(measure(output, "auto", tokens))
        row["bits"] = sum({"int4": 4, "int8": 8, "fp8": 8}[s] for x in layers for s in (x.k, x.v)) / 2 / len(layers)
        row["smoothing"] = [layer.smoothing for layer in layers]
        row["mean pairs"] = sum(len(pairs) for layer in layers for pairs in layer.key_mean)
        row["hadamard"] = sum(layer.hadamard for layer in layers)
        rows.append(row)
        shutil.rmtree(output)
    return rows


def _figures(result: EvalResult) -> dict[str, Any]:
    assert result.divergence is not None
    found = result.divergence
    return {
        "kl_mean": found.kl_mean, "kl_p99": found.kl_p99, "same_top": found.same_top,
        "perplexity": result.perplexity, "float_kv_perplexity": found.reference_perplexity,
    }  # fmt: skip


def show(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"{title}: KL from float KV, the same weights")
    for column in ("KV cache", "KL mean", "KL p99", "same top", "perplexity", "with float KV"):
        table.add_column(column, justify="left" if column == "KV cache" else "right")
    for row in rows:
        table.add_row(row["cache"], f"{row['kl_mean']:.5f}", f"{row['kl_p99']:.4f}", f"{100 * row['same_top']:.2f} %",
                      f"{row['perplexity']:.3f}", f"{row['float_kv_perplexity']:.3f}")  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of held-out text")
    parser.add_argument("--only", choices=("key bias", "demo"), help="one of the two models")
    parser.add_argument("--make", type=Path, metavar="DIR", help="write the model with key biases there, and end")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    if arguments.make:
        arguments.make.mkdir(parents=True)
        add_key_bias(DEMO_FOLDER, arguments.make)
        return
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "model").mkdir()
        add_key_bias(DEMO_FOLDER, folder / "model")
        for title, model in (("key bias", folder / "model"), ("demo", DEMO_FOLDER)):
            if arguments.only in (None, title):
                rows = run(model, folder / title, arguments.tokens)
                show(title, rows)
                found += [{"model": title} | row for row in rows]
    if arguments.json:
        save(arguments.json, "key_bias", found)


if __name__ == "__main__":
    main()
