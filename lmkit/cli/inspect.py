"""`lmkit inspect MODEL`: a checkpoint's properties, and what serving it would take."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated, Any

import typer


def inspect(
    model: Annotated[str, typer.Argument(help='A checkpoint folder, or "demo".')],
    max_model_len: Annotated[int | None, typer.Option(help="Context to plan memory for; default the model's.")] = None,
    max_batch_size: Annotated[int, typer.Option(help="Sequences to plan memory for.")] = 64,
    kv_dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, int8, fp8 or int4.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a checkpoint's architecture, formats and sizes, and the memory that serving it needs."""
    from lmkit.config import EngineConfig, parse
    from lmkit.turbo.engine.describe import describe_model

    options = {"max_model_len": max_model_len, "max_batch_size": max_batch_size, "kv_dtype": kv_dtype}
    report = describe_model(model, parse(options, EngineConfig, "lmkit inspect"))
    if json:
        print(jsonlib.dumps(report, indent=2))
    else:
        _print(report)


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=report["path"], show_header=False, title_justify="left")
    for section, fields in report.items():
        if isinstance(fields, dict):
            table.add_row(f"[bold]{section}", "", end_section=False)
            for key, value in fields.items():
                table.add_row(f"  {key}", _text(key, value))
    Console().print(table)


def _text(key: str, value: Any) -> str:
    from lmkit.turbo.host_memory import gib

    if key.endswith("bytes") and isinstance(value, int):
        return f"{gib(value)}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
