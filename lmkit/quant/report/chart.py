"""Small charts as SVG text, without scripts, fonts or anything from outside. The page's style has their colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import TypeGuard

WIDTH, HEIGHT = 540, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 8, 28, 42  # margins for the numbers and names of the axes
DASHES = ("", "7 3", "2 3", "9 3 2 3", "1 4")  # so that lines differ without colour, and show what lies below them

Values = Sequence[float | None]
Height = Callable[[float], float]  # from a value to its y


def line_chart(series: Mapping[str, Values], *, title: str, x_label: str, y_label: str) -> str:
    """Lines over 0, 1, 2, ... on a logarithmic axis. None, zero and values that are not finite leave a gap."""
    drawn = [value for values in series.values() for value in values if _positive(value)]
    if not drawn:
        return ""
    ticks = _log_ticks(min(drawn), max(drawn))
    low, high = math.log(ticks[0]), math.log(ticks[-1])
    count = max(len(values) for values in series.values())

    def height(value: float) -> float:
        return HEIGHT - BOTTOM - (math.log(value) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [_y_axis(ticks, height, f"{y_label} (log scale)"), _x_axis(count, x_label)]
    for number, (name, values) in enumerate(series.items()):
        for run in _runs(values):
            path = " ".join(f"{_x(index, count):.1f},{height(value):.1f}" for index, value in run)
            parts.append(f'<polyline points="{path}" {_style(number)}/>')
            parts += [
                f'<circle cx="{_x(index, count):.1f}" cy="{height(value):.1f}" r="3" class="mark s{number}">'
                f"<title>{escape(f'{name}, {x_label} {index}: {value:.4g}')}</title></circle>"
                for index, value in run
            ]
    return _figure(parts, title, list(series))


def bar_chart(values: Sequence[float], *, title: str, x_label: str, y_label: str) -> str:
    """A bar for each of 0, 1, 2, ... from zero up."""
    if not values or not math.isfinite(sum(values)) or max(values) <= 0:
        return ""
    ticks = _linear_ticks(max(values))

    def height(value: float) -> float:
        return HEIGHT - BOTTOM - value / ticks[-1] * (HEIGHT - TOP - BOTTOM)

    width = max(1.0, 0.7 * (WIDTH - LEFT - RIGHT) / len(values))
    parts = [_y_axis(ticks, height, y_label), _x_axis(len(values), x_label)]
    for index, value in enumerate(values):
        place = f'x="{_x(index, len(values)) - width / 2:.1f}" y="{height(value):.1f}" width="{width:.1f}"'
        label = escape(f"{x_label} {index}: {value:.4g} {y_label}")
        size = HEIGHT - BOTTOM - height(value)
        parts.append(f'<rect {place} height="{size:.1f}" class="mark s0"><title>{label}</title></rect>')
    return _figure(parts, title, [])


def sparkline(values: Values) -> str:
    """A line the height of a text, from the least to the greatest value."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < 2:
        return ""
    low, span = min(known), (max(known) - min(known)) or 1.0
    points = " ".join(
        f"{4 * index + 1},{15 - 14 * (value - low) / span:.1f}"
        for index, value in enumerate(values)
        if value is not None and math.isfinite(value)
    )
    label = f"{len(known)} values from {low:.4g} to {max(known):.4g}"
    line = f'<title>{label}</title><polyline points="{points}" {_style(0)}/>'
    return f'<svg class="spark" width="{4 * len(values)}" height="16" role="img" aria-label="{label}">{line}</svg>'


def _positive(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value) and value > 0


def _runs(values: Values) -> Iterator[list[tuple[int, float]]]:
    """The stretches of (index, value) between gaps."""
    run: list[tuple[int, float]] = []
    for index, value in enumerate([*values, None]):
        if _positive(value):
            run.append((index, value))
        elif run:
            yield run
            run = []


def _log_ticks(low: float, high: float) -> list[float]:
    """Ticks around the values: powers of ten, and 2 and 5 times these if few powers are enough."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    ticks = [float(f"{factor}e{power}") for power in range(first, last + 1) for factor in factors]
    below = max(tick for tick in ticks if tick <= low)
    above = min((tick for tick in ticks if tick >= high and tick > below), default=10.0 * below)
    return [tick for tick in ticks if below <= tick <= above] if above in ticks else [below, above]


def _linear_ticks(top: float) -> list[float]:
    """Ticks from 0 to the first one that is not below `top`, in steps of 1, 2 or 5 times a power of ten."""
    power = math.floor(math.log10(top / 4))
    step = next(step for factor in (1, 2, 5, 10) if (step := float(f"{factor}e{power}")) >= top / 4)
    return [step * index for index in range(math.ceil(top / step) + 1)]


def _x(index: int, count: int) -> float:
    return LEFT + (index + 0.5) * (WIDTH - LEFT - RIGHT) / count


def _y_axis(ticks: Sequence[float], height: Height, label: str) -> str:
    lines = [
        f'<line x1="{LEFT}" y1="{height(tick):.1f}" x2="{WIDTH - RIGHT}" y2="{height(tick):.1f}" class="grid"/>'
        f'<text x="{LEFT - 6}" y="{height(tick) + 4:.1f}" text-anchor="end">{tick:.3g}</text>'
        for tick in ticks
    ]
    return "".join(lines) + f'<text x="0" y="13">{escape(label)}</text>'


def _x_axis(count: int, label: str) -> str:
    step = -(-count // 12)
    numbers = [
        f'<text x="{_x(index, count):.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{index}</text>'
        for index in range(0, count, step)
    ]
    name = f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(label)}</text>'
    return "".join(numbers) + name


def _style(number: int) -> str:
    return f'class="line s{number}" stroke-dasharray="{DASHES[number]}"'


def _figure(parts: Sequence[str], title: str, names: Sequence[str]) -> str:
    """The chart under its title. The legend is text of the page, so it takes the room it needs and covers nothing."""
    keys = [
        '<li><svg width="30" height="10" aria-hidden="true">'
        f'<line x1="0" y1="5" x2="30" y2="5" {_style(number)}/></svg>{escape(name)}</li>'
        for number, name in enumerate(names)
    ]
    legend = f'<ul class="legend">{"".join(keys)}</ul>' if keys else ""
    chart = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{chart}{legend}</figure>"
