"""`lmkit inspect MODEL`: a checkpoint's properties, and what serving it would take."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated, Any

import typer


def inspect(
    model: Annotated[str, typer.Argument(help='A checkpoint folder, a .gguf file, or "demo".')],
    max_model_len: Annotated[int | None, typer.Option(help="Context to plan memory for; default the model's.")] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(help="Sequences to plan memory for. Default: as `lmkit serve` chooses it.")
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, int8, fp8 or int4.")] = "auto",
    tp: Annotated[int, typer.Option(help="Processes that share the model; memory is then that of each.")] = 1,
    ep: Annotated[int, typer.Option(help="Processes that share the experts; memory is then that of each.")] = 1,
    pp: Annotated[int, typer.Option(help="Processes with some layers each; memory is then that of the largest.")] = 1,
    processes: Annotated[
        int | None, typer.Option(min=2, max=64, help="Show only each way to share the model out to so many processes.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; auto takes a GPU if there is one.")] = "auto",
    model_impl: Annotated[str, typer.Option(help="Engine: auto, fast or flexible.")] = "auto",
    devices: Annotated[str, typer.Option(help="GPUs of the processes of --tp or --ep: 0,1.")] = "",
    weights_memory: Annotated[
        str | None, typer.Option(metavar="<size>", help="Memory for weights; layers beyond are read in every step.")
    ] = None,
    weights_path: Annotated[str | None, typer.Option(help="A folder to read these layers from.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a checkpoint's architecture, formats and sizes, and the memory that serving it needs."""
    from lmkit.config import EngineConfig, parse, parse_bytes
    from lmkit.turbo.engine.describe import describe_model, describe_ways

    options: dict[str, Any] = {
        "max_model_len": max_model_len,
        "max_batch_size": max_batch_size,
        "kv_dtype": kv_dtype,
        "tp": tp,
        "ep": ep,
        "pp": pp,
        "device": device,
        "model_impl": model_impl,
        "devices": devices,
    }
    if weights_memory is not None:
        options["weights_memory"] = parse_bytes(weights_memory, "--weights-memory")
    options["weights_path"] = weights_path
    config = parse(options, EngineConfig, "lmkit inspect")
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
