"""Small charts as SVG text, without scripts, fonts or anything from outside."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TypeGuard

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 28, 36  # margins for tick labels, legend and axis
COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#9c6b4e")

Values = Sequence[float | None]


def line_chart(series: Mapping[str, Values], *, title: str, x_label: str) -> str:
    """Lines over 0, 1, 2, ... on a logarithmic axis. None, zero and values that are not finite leave a gap."""
    drawn = [value for values in series.values() for value in values if _positive(value)]
    if not drawn:
        return ""
    low, high = math.floor(math.log10(min(drawn))), math.ceil(math.log10(max(drawn)))
    high = max(high, low + 1)
    count = max(len(values) for values in series.values())

    def at(index: int, value: float) -> tuple[float, float]:
        share = (math.log10(value) - low) / (high - low)
        return _x(index, count), HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [_tick(at(0, 10.0**power)[1], f"1e{power}") for power in range(low, high + 1)]
    for number, (name, values) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        points = [at(index, value) for index, value in enumerate(values) if _positive(value)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in points]
        parts.append(_legend(number, name, color))
    return _svg([*parts, _x_axis(count, x_label)], title)


def bar_chart(values: Sequence[float], *, title: str, x_label: str) -> str:
    """A bar for each of 0, 1, 2, ... from zero up."""
    top = max(values, default=0.0)
    if not top > 0 or not math.isfinite(top):
        return ""
    width = max(1.0, 0.7 * (WIDTH - LEFT - RIGHT) / len(values))
    parts = [_tick(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), f"{share * top:.3g}") for share in (0, 0.5, 1)]
    for index, value in enumerate(values):
        height = value / top * (HEIGHT - TOP - BOTTOM)
        x, y = _x(index, len(values)) - width / 2, HEIGHT - BOTTOM - height
        parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{COLORS[0]}"/>')
    return _svg([*parts, _x_axis(len(values), x_label)], title)


def sparkline(values: Values) -> str:
    """A line the height of a text, from the least to the greatest value."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < 2:
        return ""
    low, span = min(known), (max(known) - min(known)) or 1.0
    points = " ".join(
        f"{4 * index:.0f},{15 - 14 * (value - low) / span:.1f}"
        for index, value in enumerate(values)
        if value is not None and math.isfinite(value)
    )
    line = f'<polyline points="{points}" fill="none" stroke="{COLORS[0]}"/>'
    return f'<svg width="{4 * len(values)}" height="16" role="img">{line}</svg>'


def _positive(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value) and value > 0


def _x(index: int, count: int) -> float:
    return LEFT + (index + 0.5) * (WIDTH - LEFT - RIGHT) / count


def _tick(y: float, label: str) -> str:
    line = f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>'
    return line + f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>'


def _x_axis(count: int, label: str) -> str:
    step = -(-count // 16)
    numbers = [
        f'<text x="{_x(index, count):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{index}</text>'
        for index in range(0, count, step)
    ]
    name = f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 5}" text-anchor="middle">{escape(label)}</text>'
    return "".join(numbers) + name


def _legend(number: int, name: str, color: str) -> str:
    x = LEFT + 210 * number
    box = f'<rect x="{x}" y="6" width="10" height="10" fill="{color}"/>'
    return box + f'<text x="{x + 15}" y="15">{escape(name)}</text>'


def _svg(parts: Sequence[str], title: str) -> str:
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return f'<svg {size} role="img"><title>{escape(title)}</title>{"".join(parts)}</svg>'
