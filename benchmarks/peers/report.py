"""The tables and the plot of a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from benchmarks.contention import OTHERS_LIMIT
from benchmarks.peers.catalog import POINTS, EngineKind, Point
from benchmarks.peers.limits import possible, prompt_linear
from benchmarks.peers.protocol import Facts
from benchmarks.peers.samples import Samples
from benchmarks.random_llama import Shape
from benchmarks.report import share


def table(samples: Samples, kinds: list[EngineKind], points: list[Point], shape: Shape, threads: int) -> Table:
    """Tokens per second of every engine, its distance to the machine's ceilings, and lmkit against the best peer.

    A prompt's GOP/s are those of the linears alone.
    """
    out = Table(title=f"tokens per second, {threads} threads; {samples.best_ceilings().describe()}")
    out.add_column("engine")
    for point in points:
        out.add_column(point.name, justify="right")
    out.add_column("b1: weights\nGB/s (% of read)", justify="right")
    out.add_column("prefill512\nGOP/s (% of peak)", justify="right")
    for kind in kinds:
        reason = samples.missing.get(kind.name, "")
        if samples.taken.get(kind.name):
            rates = [_figure(samples, kind.name, point) for point in points]
            out.add_row(kind.name, *rates, *_distances(samples, kind.name, shape))
        elif reason:
            out.add_row(kind.name, escape(reason.partition(":")[0]), *[""] * (len(points) + 1))
    out.add_section()
    for kind in kinds:
        if kind.name in samples.taken and not kind.is_peer:
            ratios = [ratio(samples, kind.name, point) for point in points]
            out.add_row(f"{kind.name} / best peer", *("-" if r is None else f"{r:.2f}x" for r in ratios), "", "")
    read = [each["bytes_per_s"] / 1e9 for each in samples.ceilings]
    out.caption = (
        f"medians; {samples.num_dropped()} of {samples.num_taken()} measurements dropped, others having used more than "
        f"{OTHERS_LIMIT:.0%} of the cores; * = none was clean, the least disturbed one; a share is of the ceilings "
        f"just before and after: reading was measured {len(read)} times, {min(read):.0f} to {max(read):.0f} GB/s"
    )
    return out


def rows(samples: Samples, shape: Shape) -> list[dict[str, Any]]:
    """{"engine", "point", "tokens_per_s", ...} for everything that was measured. Raises AboveCeiling."""
    return [
        {
            "engine": engine,
            "point": point,
            "tokens_per_s": samples.rate(engine, point),
            "samples": [asdict(sample) for sample in taken],
            "of_possible": _share(samples, engine, POINTS[point], shape),
            "of_possible_beside": samples.share(engine, point),
            "dropped": sum(not sample.clean for sample in taken),
        }
        for engine, points in samples.taken.items()
        for point, taken in points.items()
        if taken
    ]


def _share(samples: Samples, engine: str, point: Point, shape: Shape) -> float:
    """The rate as a share of what the best ceilings of the run allow. What others leave of the memory's bandwidth may
    change within a second, so the ceilings just before and after a measurement could be too low for it. Raises
    AboveCeiling."""
    rate = samples.rate(engine, point.name)
    assert rate is not None
    limit = possible(samples.best_ceilings(), shape, Facts(**samples.facts[engine]), point)
    return share(rate, limit, f"{engine}, {point.name}")


def engines(samples: Samples, kinds: list[EngineKind]) -> Table:
    """Version and settings of every engine, and why one failed."""
    out = Table(title="engines")
    for column in ("engine", "version", "settings"):
        out.add_column(column, overflow="fold")
    for kind in kinds:
        facts, reason = samples.facts.get(kind.name, {}), samples.missing.get(kind.name)
        settings = "; ".join(text for text in (facts.get("settings"), reason) if text)
        out.add_row(kind.name, facts.get("version", ""), escape(settings))
    return out


def best_peer(samples: Samples, point: Point) -> float | None:
    rates = [samples.rate(name, point.name) for name in samples.taken if not name.startswith("lmkit")]
    return max((rate for rate in rates if rate is not None), default=None)


def ratio(samples: Samples, engine: str, point: Point) -> float | None:
    """The speed relative to the fastest peer."""
    mine, best = samples.rate(engine, point.name), best_peer(samples, point)
    return None if mine is None or best is None else mine / best


def _figure(samples: Samples, engine: str, point: Point) -> str:
    rate = samples.rate(engine, point.name)
    return "-" if rate is None else f"{rate:.1f}{'*' if samples.disturbed(engine, point.name) else ''}"


def _distances(samples: Samples, engine: str, shape: Shape) -> tuple[str, str]:
    decode, prompt = samples.rate(engine, "b1"), samples.rate(engine, "prefill512")
    read = None if decode is None else decode * Facts(**samples.facts[engine]).bytes_read(shape.share_read(1))
    work = None if prompt is None else prompt * 2 * prompt_linear(shape)
    return (
        "-" if read is None else f"{read / 1e9:.1f} ({samples.share(engine, 'b1'):.0%})",
        "-" if work is None else f"{work / 1e9:.0f} ({samples.share(engine, 'prefill512'):.0%})",
    )


def plot(samples: Samples, kinds: list[EngineKind], points: list[Point], path: Path) -> None:
    """Bars of every engine at every point, as multiples of the fastest peer (or of lmkit if there is no peer)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = [kind for kind in kinds if samples.taken.get(kind.name)]
    figure = Figure(figsize=(10, 4.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.86 / max(1, len(drawn))
    for number, kind in enumerate(drawn):
        left = (number - len(drawn) / 2 + 0.5) * width
        rates = {place: samples.rate(kind.name, point.name) for place, point in enumerate(points)}
        known = {place: rate for place, rate in rates.items() if rate is not None}
        shares = [rate / _base(samples, points[place], rate) for place, rate in known.items()]
        places = [place + left for place in known]
        bars = axes.bar(places, shares, 0.94 * width, color=f"C{number}", label=kind.label)
        texts = [f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}" for rate in known.values()]
        axes.bar_label(bars, texts, fontsize=8, padding=2, rotation=90 if len(drawn) > 3 else 0)
    axes.axhline(1, color="grey", linewidth=0.8, linestyle="--", zorder=0)
    axes.set_xticks(range(len(points)), [point.label for point in points])
    axes.set(ylabel="times the fastest peer's speed", ylim=(0, 1.12 * axes.get_ylim()[1]))
    axes.spines[["top", "right"]].set_visible(False)
    # Above the bars and in the middle: it hides none, and no label is cut.
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=min(4, len(drawn)), fontsize=9, frameon=False)
    figure.suptitle("Llama of 1.1B on a CPU. The number at a bar is tokens per second.", fontsize=11)
    figure.savefig(path)


def _base(samples: Samples, point: Point, rate: float) -> float:
    return best_peer(samples, point) or samples.rate("lmkit", point.name) or rate
