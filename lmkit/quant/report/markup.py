"""Parts of a page as HTML text. Every text of the caller is escaped, and no path of this machine is shown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

DASH = "–"  # stands for no value
ABSOLUTE = re.compile(r"(?<![\w./~<])[/~](?!/)[^\s,;]*/")  # the folders of a path in a text

# The colours of text, lines and marks have at least the contrast that WCAG 2.2 AA asks for, on either background.
STYLE = """
:root { color-scheme: light dark; --page: #fff; --panel: #f4f5f7; --text: #1c1f24; --soft: #565d68; --rule: #d9dce1;
  --s0: #2458c5; --s1: #b3480a; --s2: #0b7a6b; --s3: #9d2a86; --s4: #6d5a12 }
@media (prefers-color-scheme: dark) { :root { --page: #14171c; --panel: #1f242c; --text: #e8eaee; --soft: #a4acb8;
  --rule: #3a414c; --s0: #8ab2ff; --s1: #ffb066; --s2: #58d6c2; --s3: #f29be0; --s4: #dcc25a } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1rem 3rem }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere }
h2 { font-size: 1.2rem; margin: 2.25rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--rule) }
p { margin: .4rem 0; max-width: 48rem } .soft, figcaption, caption { color: var(--soft) }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: .75rem; margin: 1.25rem 0 }
.cards div { background: var(--panel); border-radius: .5rem; padding: .7rem .9rem }
.cards dt { color: var(--soft); font-size: .875rem } .cards dd { margin: 0 }
.cards dd.note { color: var(--soft); font-size: .875rem }
.cards dd.value { font-size: 1.35rem; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums }
.scroll { overflow-x: auto; margin: .5rem 0 1rem; max-width: 100% }
table { border-collapse: collapse; font-size: .9rem } caption { text-align: left; padding: .2rem 0 }
th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--rule); vertical-align: top }
th { font-weight: 600 } th[scope=row] { font-weight: 400; color: var(--soft) }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem 2rem }
figure { margin: .5rem 0; max-width: 40rem } figure > svg { width: 100%; height: auto; display: block }
figcaption { font-weight: 600; margin-bottom: .25rem } svg text { font: 13px system-ui, sans-serif; fill: var(--soft) }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1.25rem; margin: .25rem 0 0; padding: 0;
  font-size: .875rem } .legend svg { margin-right: .4rem; vertical-align: middle } .spark { vertical-align: middle }
.grid { stroke: var(--rule) } .line { fill: none; stroke-width: 2 }
.line.s0 { stroke: var(--s0) } .line.s1 { stroke: var(--s1) } .line.s2 { stroke: var(--s2) }
.line.s3 { stroke: var(--s3) } .line.s4 { stroke: var(--s4) }
.mark.s0 { fill: var(--s0) } .mark.s1 { fill: var(--s1) } .mark.s2 { fill: var(--s2) } .mark.s3 { fill: var(--s3) }
.mark.s4 { fill: var(--s4) }
summary { cursor: pointer; padding: .35rem 0 } details { border-bottom: 1px solid var(--rule) }
@media (max-width: 30rem) { figure > svg text { font-size: 16px } }
pre { background: var(--panel); padding: .8rem; border-radius: .5rem; overflow-x: auto; font-size: .85rem }
"""


class Html(str):
    """Text that is markup already."""


class Percent(float):
    """A share, shown as percent."""


def page(title: str, sections: Iterable[str]) -> str:
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join(section for section in sections if section)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{body}\n</main></body></html>\n'


def cards(figures: Iterable[tuple[str, Any, str]]) -> str:
    """The headline: (name, value, note) of each figure."""
    items = "".join(
        f'<div><dt>{escape(name)}</dt><dd class="value">{escape(text(value))}</dd>'
        + (f'<dd class="note">{escape(note)}</dd></div>' if note else "</div>")
        for name, value, note in figures
    )
    return f'<dl class="cards">{items}</dl>'


def pairs(rows: Mapping[str, Any], name: str) -> str:
    """A table of values beside their labels."""
    body = "".join(
        f'<tr><th scope="row">{escape(label)}</th>{_cell(value, False)}</tr>' for label, value in rows.items()
    )
    return _scrolled(f"<table><tbody>{body}</tbody></table>", name)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], name: str) -> str:
    """A table without the columns that have no value in any row."""
    listed = [list(row) for row in rows]
    used = [index for index in range(len(columns)) if any(text(row[index]) != DASH for row in listed)]
    numeric = {index for index in used if any(isinstance(row[index], int | float) for row in listed)}
    head = "".join(f'<th scope="col"{_number_class(i in numeric)}>{escape(columns[i])}</th>' for i in used)
    body = "".join("<tr>" + "".join(_cell(row[i], i in numeric) for i in used) + "</tr>" for row in listed)
    return _scrolled(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>", name)


def text(value: Any) -> str:
    """A value as a reader wants it. A path of this machine is shown by its last part."""
    if value is None or value == "":
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Percent):
        return f"{value:.1%}"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text(part)}" for name, part in value.items() if part is not None)
    return ", ".join(map(text, value)) if isinstance(value, list | tuple) else without_folders(str(value))


def number(value: float | None) -> str:
    return DASH if value is None or not math.isfinite(value) else f"{value:.4g}"


def without_folders(value: str) -> str:
    """The last part of an absolute path, also of one inside a text."""
    return Path(value).name if value.startswith(("/", "~")) else ABSOLUTE.sub("", value)


def _scrolled(content: str, name: str) -> str:
    """A wide table scrolls by itself, with the keyboard too, and the page does not."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(name)}">{content}</div>'


def _cell(value: Any, numeric: bool) -> str:
    if isinstance(value, Html):
        return f"<td>{value}</td>"
    return f"<td{_number_class(numeric)}>{escape(text(value))}</td>"


def _number_class(numeric: bool) -> str:
    return ' class="number"' if numeric else ""
