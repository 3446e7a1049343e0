"""The table and the plot."""

from __future__ import annotations

import math
from pathlib import Path

from rich.table import Table

from benchmarks.quality_peers.catalog import ENTRIES, Entry
from benchmarks.quality_peers.results import Results


def table(results: Results) -> Table:
    """KL of every entry for every factor. Time and memory are of the model as it is, or else of the largest factor."""
    factors = factors_of(results)
    settings = results.settings
    out = Table(
        title=f"KL from the original, 1e-3 nats a token (perplexity), {settings['eval_tokens']:,} held-out tokens; "
        f"{settings['num_rows']} calibration rows of {settings['seq_len']}, {settings['threads']} threads"
    )
    out.add_column("tool")
    for factor in factors:
        out.add_column("as it is" if factor == 1 else f"x{factor}", justify="right")
    for name in ("bits", "seconds", "CPU seconds", "GiB"):
        out.add_column(name, justify="right")
    for entry in ENTRIES:
        rows = [results.get(entry, factor) for factor in factors]
        seen = [row for row in rows if row is not None]
        if seen:
            first = seen[0]
            cells = ["-" if row is None else f"{1000 * row.kl:.3f} ({row.perplexity:.3f})" for row in rows]
            taken = f"{first.seconds:.0f}", f"{first.cpu_seconds:.0f}", f"{first.peak_gib:.2f}"
            out.add_row(entry.name, *cells, f"{first.bits:.3f}", *taken)
        elif entry.name in results.missing:
            out.add_row(entry.name, results.missing[entry.name], *[""] * (len(factors) + 3))
    if results.rows:
        perplexity = results.rows[0].reference_perplexity
        out.caption = f"perplexity of the original {perplexity:.3f}; seconds and GiB of the first column"
    return out


def factors_of(results: Results) -> list[int]:
    return sorted({row.outliers for row in results.rows})


def plot(results: Results, path: Path) -> None:
    """KL of every entry against the outliers' factor, on logarithmic axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    factors = factors_of(results)
    for entry in ENTRIES:
        kls = [_kl(results, entry, factor) for factor in factors]
        if any(math.isfinite(kl) for kl in kls):
            ours = entry.tool == "lmkit"
            axes.plot(factors, kls, "o-" if ours else "s--", label=entry.name, linewidth=2 if ours else 1, markersize=4)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="factor of the outlier channels (log scale)",
        ylabel="KL, nats a token (log scale)",
    )
    axes.set_xticks(factors, [f"x{factor}" for factor in factors])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.suptitle("KL from the original: 4-bit weights of the demo model, groups of 128", fontsize=10)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), fontsize=8, ncols=3, frameon=False)
    figure.savefig(path, dpi=110)


def _kl(results: Results, entry: Entry, factor: int) -> float:
    row = results.get(entry, factor)
    return math.nan if row is None else row.kl
