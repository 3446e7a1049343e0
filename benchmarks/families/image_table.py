"""The table of the sweep of images."""

from __future__ import annotations

from typing import Any

from benchmarks.families.sweep_images import CHECKS
from benchmarks.families.table import DOCS, cell, write_page

PAGE, DATA = DOCS / "notes" / "images_sweep.md", DOCS / "notes" / "images_sweep.json"


def write(found: list[dict[str, Any]]) -> None:
    """Write the page and its data."""
    write_page(found, page, PAGE, DATA)


def page(found: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """The page's text."""
    writes = [each for each in found if not each["transformers"]]
    equal = [each for each in writes if not (each["refused"] or any(each[name] for name in CHECKS[:3]))]
    made = ", ".join(f"{name} {number}" for name, number in versions.items())
    lines = [
        "# Every architecture of transformers that sees",
        "",
        f"Written by `python -m benchmarks.families --images` with {made}.",
        "Each architecture of transformers' mapping from images and text to text is a tiny model with random weights",
        "and a processor of its own, on the [flexible engine](../families.md#two-engines) in float32, in chunks of",
        "16 tokens.",
        "It answers about an image, about another one after the same text, without any, and about two; then all of",
        "these together; then the first again. All tokens must be those of transformers'",
        "`generate`, and the cache must find the first image and not take the second one for it. Where transformers",
        "itself does not write here, the reason is the tiny model's, or a package that is not installed.",
        "",
        f"- {len(found)} types of models; with {len(writes)} of them transformers writes about an image here.",
        f"- {len(equal)} of these give transformers' tokens in lmkit.",
        "",
        "| type | KV | one image | two images | batch | prefix |",
        "|---|---|---|---|---|---|",
    ]
    for each in found:
        reason = f"transformers: {each['transformers']}" if each["transformers"] else ""
        reason = reason or (f"refused: {each['refused']}" if each["refused"] else "")
        cells = [cell(reason), "", "", ""] if reason else [cell(each[name]) or "yes" for name in CHECKS]
        lines.append(f"| {each['model_type']} | {each['kv'] or '-'} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
