"""Pictures of the rows: share of bandwidth of products over the number of tokens, of attention and of whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gpu.context import Row

Rows = list[Row]


def draw(rows: Rows, out: Path) -> list[Path]:
    """Draw every picture that there is data for. Returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    for name, picture in (("gemm", _gemm), ("attention", _attention), ("engine", _engine)):
        selected = [row for row in rows if row["section"] == name and "share" in row]
        if not selected:
            continue
        figure, axes = pyplot.subplots(figsize=(8, 5))
        picture(selected, axes)
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
        figure.tight_layout()
        figure.savefig(out / f"{name}.png", dpi=120)
        pyplot.close(figure)
        written.append(out / f"{name}.png")
    return written


def _gemm(rows: Rows, axes: Any) -> None:
    """The share of its bound that a product reaches, as a mean over shapes."""
    for name in dict.fromkeys(row["what"] for row in rows):
        mine = [row for row in rows if row["what"] == name]
        tokens = sorted({row["m"] for row in mine})
        shares = [[row["share"] for row in mine if row["m"] == m] for m in tokens]
        axes.plot(tokens, [sum(values) / len(values) for values in shares], marker="o", label=name)
    axes.set(
        xscale="log", xlabel="tokens", ylabel="share of the bound", ylim=(0, None), title="4-bit and bfloat16 products"
    )


def _attention(rows: Rows, axes: Any) -> None:
    for kv in dict.fromkeys(row["kv"] for row in rows):
        mine = [row for row in rows if row["kv"] == kv and row["what"] == "decode"]
        labels = [f"{row['batch']} x {row['context']}" for row in mine]
        axes.plot(labels, [row["share"] for row in mine], marker="o", label=kv)
    axes.set(xlabel="sequences x tokens", ylabel="share of the bound", ylim=(0, None), title="Decode attention")


def _engine(rows: Rows, axes: Any) -> None:
    mine = [row for row in rows if "bound" in row and row["storage"] == "w4"]
    labels = [f"{row['what'].replace(' decode', '')}" for row in mine]
    axes.bar(labels, [row["bound"] for row in mine], color="lightgrey", label="bound")
    axes.bar(labels, [row["tokens_per_s"] for row in mine], width=0.5, label="measured")
    axes.set(yscale="log", ylabel="tok/s", title="Decoding, 4-bit weights, INT8 KV")
    axes.tick_params(axis="x", rotation=30, labelsize="small")
