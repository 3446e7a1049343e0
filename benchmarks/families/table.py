"""The table of the sweep: which architectures lmkit runs, by which engine, and why it does not run the others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lmkit
from benchmarks.families.tiny import version

DOCS = Path(__file__).parents[2] / "docs"
PAGE, DATA = DOCS / "notes" / "families_sweep.md", DOCS / "notes" / "families_sweep.json"
CHECKS = ("served", "batch", "prefix", "quantized")
REASON = 70  # characters of a reason in the table; the JSON has all


def write(found: list[dict[str, Any]]) -> None:
    """Write the page and its data."""
    write_page(found, page, PAGE, DATA)


def write_page(
    found: list[dict[str, Any]], page: Callable[[list[dict[str, Any]], dict[str, str]], str], path: Path, data: Path
) -> None:
    """Write what a sweep found to `data`, and what `page` makes of it and of the versions to `path`."""
    kept = [{name: placeless(each[name]) for name in each if name not in ("failure", "seconds")} for each in found]
    versions = {"lmkit": lmkit.__version__, "transformers": version(), "torch": torch.__version__}
    data.write_text(json.dumps({"versions": versions, "architectures": kept}, indent=1) + "\n")
    path.write_text(page(kept, versions))


def page(found: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """The page's text."""
    writes = [each for each in found if not each["transformers"]]
    equal = [each for each in writes if not (each["served"] or each["batch"])]
    paged = [each for each in equal if each["kv"].startswith("paged")]
    quantized = [each for each in equal if not each["quantized"]]
    lines = [
        "# Every causal architecture of transformers",
        "",
        f"Written by `python -m benchmarks.families` with {', '.join(f'{k} {v}' for k, v in versions.items())}.",
        "Each architecture is a tiny model with random weights, made from its configuration class. lmkit serves it in",
        "float32 with greedy sampling and chunks of 16 tokens: five prompts one by one, the five together, and one",
        "again with its prefix in the cache. All tokens must be those of transformers' `generate`. Then its weights",
        "are rounded to 4 bits, and it writes again.",
        "",
        f"- {len(found)} types of models; transformers itself makes {len(writes)} of them and writes with them.",
        f"- {len(equal)} write transformers' tokens in lmkit, {len(paged)} of them on keys and values in its blocks.",
        f"- {len(quantized)} of these write with 4-bit weights.",
        "",
        "| type | engine | KV | tokens | batch | prefix | 4 bits |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in found:
        if each["transformers"]:
            lines.append(f"| {each['model_type']} | - | - | transformers: {cell(each['transformers'])} | | | |")
            continue
        cells = [cell(each[name]) or "yes" for name in CHECKS]
        if each["served"]:
            cells[1:] = [""] * 3
        lines.append(f"| {each['model_type']} | {each['engine'] or '-'} | {each['kv'] or '-'} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def placeless(value: Any) -> Any:
    """A reason without the folder of this run."""
    return re.sub(r"\S*/models/", "", value) if isinstance(value, str) else value


def cell(reason: str) -> str:
    text = " ".join(reason.split()).replace("|", "/")
    return text if len(text) <= REASON else text[: REASON - 1] + "…"
