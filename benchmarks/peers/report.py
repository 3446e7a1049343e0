"""The table and the plot of a run."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from benchmarks.ceilings import Ceilings
from benchmarks.contention import OTHERS_LIMIT
from benchmarks.peers.catalog import ENGINES, Point
from benchmarks.peers.samples import Samples
from benchmarks.report import share


def table(samples: Samples, points: list[Point], ceilings: Ceilings, num_linear: int, threads: int) -> Table:
    """Tokens per second of every engine, its distance to the machine's ceilings, and lmkit against the best peer.

    `num_linear` counts parameters in the layers' matrices; a prompt token costs two operations for each, without
    attention. Raises AboveCeiling for a figure that the machine cannot reach.
    """
    out = Table(title=f"tokens per second, {threads} threads; {ceilings.describe()}")
    out.add_column("engine")
    for point in points:
        out.add_column(point.name, justify="right")
    out.add_column("b1: weights\nGB/s (% of read)", justify="right")
    out.add_column("prefill512\nGOP/s (% of dot)", justify="right")
    for engine in ENGINES:
        if engine in samples.missing:
            out.add_row(engine, samples.missing[engine], *[""] * (len(points) + 1))
        elif engine in samples.taken:
            rates = [_figure(samples, engine, point) for point in points]
            out.add_row(engine, *rates, *_distances(samples, engine, ceilings, num_linear))
    out.add_section()
    for engine in ENGINES:
        if engine in samples.taken and not ENGINES[engine].is_peer:
            ratios = [ratio(samples, engine, point) for point in points]
            out.add_row(f"{engine} / best peer", *("-" if r is None else f"{r:.2f}x" for r in ratios), "", "")
    out.caption = (
        f"medians; {samples.num_dropped()} of {samples.num_taken()} measurements dropped, others having used more than "
        f"{OTHERS_LIMIT:.0%} of the cores; * = none was clean, the least disturbed one"
    )
    return out


def best_peer(samples: Samples, point: Point) -> float | None:
    rates = [samples.rate(name, point.name) for name, kind in ENGINES.items() if kind.is_peer]
    return max((rate for rate in rates if rate is not None), default=None)


def ratio(samples: Samples, engine: str, point: Point) -> float | None:
    """The speed relative to the fastest peer."""
    mine, best = samples.rate(engine, point.name), best_peer(samples, point)
    return None if mine is None or best is None else mine / best


def _figure(samples: Samples, engine: str, point: Point) -> str:
    rate = samples.rate(engine, point.name)
    return "-" if rate is None else f"{rate:.1f}{'*' if samples.disturbed(engine, point.name) else ''}"


def _distances(samples: Samples, engine: str, ceilings: Ceilings, num_linear: int) -> tuple[str, str]:
    decode, prefill = samples.rate(engine, "b1"), samples.rate(engine, "prefill512")
    read = None if decode is None else decode * samples.facts[engine]["weight_bytes"]
    work = None if prefill is None else prefill * 2 * num_linear
    # An engine may use either dot product, and none can exceed the faster one.
    dot = max(ceilings.int4_ops, ceilings.int8_ops)
    return (
        "-" if read is None else f"{read / 1e9:.1f} ({share(read, ceilings.bytes_per_s, f'{engine}, b1'):.0%})",
        "-" if work is None else f"{work / 1e9:.0f} ({share(work, dot, f'{engine}, prefill512'):.0%})",
    )


def plot(samples: Samples, points: list[Point], path: Path) -> None:
    """Bars of every engine at every point, as multiples of the fastest peer (or of lmkit if there is no peer)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    engines = [name for name in ENGINES if name in samples.taken]
    figure = Figure(figsize=(8.5, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.85 / max(1, len(engines))
    for number, engine in enumerate(engines):
        left = (number - len(engines) / 2 + 0.5) * width
        rates = {place: samples.rate(engine, point.name) for place, point in enumerate(points)}
        known = {place: rate for place, rate in rates.items() if rate is not None}
        shares = [rate / _base(samples, points[place], rate) for place, rate in known.items()]
        places = [place + left for place in known]
        bars = axes.bar(places, shares, 0.94 * width, color=f"C{number}", label=ENGINES[engine].label)
        texts = [f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}" for rate in known.values()]
        axes.bar_label(bars, texts, fontsize=8, padding=2, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    axes.axhline(1, color="grey", linewidth=0.8, linestyle="--", zorder=0)
    axes.set_xticks(range(len(points)), [point.label for point in points])
    axes.set(ylabel="times the fastest peer's speed", ylim=(0, 1.05 * axes.get_ylim()[1]))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=9, frameon=False
    )  # above the bars: it hides none
    figure.suptitle("Llama of 1.1B on a CPU. The number at a bar is tokens per second.", fontsize=11)
    figure.savefig(path, dpi=130)


def _base(samples: Samples, point: Point, rate: float) -> float:
    return best_peer(samples, point) or samples.rate("lmkit", point.name) or rate
