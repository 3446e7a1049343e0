"""`lmkit inspect MODEL`: a checkpoint's properties, and what serving it would take."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated, Any

import typer

from lmkit.cli.options import fields_of, takes
from lmkit.config import EngineConfig, parse

# What decides how much memory serving takes.
SERVING = (
    "max_model_len", "max_batch_size", "kv_dtype", "tp", "ep", "pp", "device", "model_impl", "devices",
    "weights_memory", "weights_path",
)  # fmt: skip


@takes(serving=fields_of(EngineConfig, *SERVING, group="Serving"))
def inspect(
    model: Annotated[str, typer.Argument(help='A checkpoint folder, a .gguf file, or "demo".')],
    processes: Annotated[
        int | None, typer.Option(min=2, max=64, help="Show only each way to share the model out to so many processes.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    serving: dict[str, Any],
) -> None:
    """Show a checkpoint's architecture, formats and sizes, and the memory that serving it needs."""
    from lmkit.turbo.engine.describe import describe_model, describe_ways

    config = parse(serving, EngineConfig, "lmkit inspect")
    if processes is not None:
        shown: Any = describe_ways(model, config, processes)
    else:
        shown = describe_model(model, config)
    if json:
        print(jsonlib.dumps(shown, indent=2))
    elif processes is not None:
        _print_ways(shown)
    else:
        _print(shown)


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=report["path"], show_header=False, title_justify="left")
    for section, fields in report.items():
        if isinstance(fields, dict):
            rows = [(name, value) for name, value in fields.items() if value not in (None, [])]
            table.add_row(Text(_words(section), "bold"), "" if rows else "none")
            for name, value in rows:
                table.add_row(f"  {_words(name)}", _text(name, value))
    Console(markup=False).print(table)


def _print_ways(ways: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "flags", "weights", "KV of a token", "tokens", "why not", title="of each process", title_justify="left"
    )
    for way in ways:
        problem = way["problem"] or ""
        if not way["kv_tokens"]:
            table.add_row(way["flags"], "", "", "", problem)
            continue
        kv, tokens = f"{way['kv_token_bytes'] / 1024:.1f} KiB", _text("kv_tokens", way["kv_tokens"])
        table.add_row(way["flags"], _text("weight_bytes", way["weight_bytes"]), kv, tokens, problem)
    Console(markup=False).print(table)


def _words(name: str) -> str:
    return " ".join(word.upper() if word in ("kv", "mlp") else word for word in name.split("_"))


def _text(name: str, value: Any) -> str:
    """A value of the report as a user reads it."""
    from lmkit.turbo.host_memory import gib

    if isinstance(value, list):
        return "; ".join(_text(name, item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{_words(key)} {_text(key, item)}" for key, item in value.items() if item is not None)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes") or name == "bytes":
        return gib(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
