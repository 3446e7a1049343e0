"""`lmkit advise TRACE`: what a trace of requests contains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lmkit.advise.describe import Description

KINDS = {
    "benchmark": "a benchmark's requests",
    "log": "an access log",
    "batch": "a batch's requests",
    "dataset": "a data set",
}


def advise(
    trace: Annotated[
        Path, typer.Argument(help="Figures of lmkit bench, an access log in JSON, a batch, or a data set.")
    ],
    tokenizer: Annotated[
        str | None, typer.Option(help="For a batch or a data set: the model's folder or Hub name.")
    ] = None,
    kv_tokens: Annotated[
        str | None, typer.Option(help="Sizes of a prefix cache in tokens, for example 20000,100000.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a trace contains: lengths, arrivals, concurrency, and what a prefix cache would save."""
    import msgspec

    from lmkit.advise.describe import describe
    from lmkit.advise.trace import read_trace
    from lmkit.bench.config import parse_list
    from lmkit.config import BLOCK_SIZE
    from lmkit.errors import ConfigError
    from lmkit.formats.hub import resolve_model_path
    from lmkit.text import Tokenizer

    sizes = sorted(set(parse_list(kv_tokens, int, "--kv-tokens"))) if kv_tokens is not None else []
    found = Tokenizer.from_pretrained(resolve_model_path(tokenizer, weights=False)) if tokenizer else None
    read = read_trace(trace, found)
    if sizes and found is None:
        raise ConfigError(f"{trace}: has no prompts, so --kv-tokens has no use")
    description = describe(read, kv_tokens=sizes, block_size=BLOCK_SIZE["cpu"])
    if json:
        print(msgspec.json.format(msgspec.json.encode(description)).decode())
    else:
        _print(description)


def _print(description: Description) -> None:
    from lmkit.cli.table import print_table

    d = description
    rows = [("trace", KINDS[d.kind]), ("requests", f"{d.requests:,}"), ("failed", f"{d.failed:,}")]
    rows += [("left out", f"{d.left_out:,}")] * bool(d.left_out)
    if (a := d.arrivals) is not None:
        rows += [
            ("arrivals, s", f"{a.seconds:,.1f}"),
            ("requests/s", _number(a.requests_per_s)),
            ("burstiness", "-" if a.interval_cv is None else f"CV {a.interval_cv:.2f} of intervals (Poisson 1)"),
            ("in flight", f"mean {_number(a.mean_concurrency)}, most {a.max_concurrency:,}"),
        ]
    if d.served_from_cache is not None:
        rows.append(("from the cache", f"{d.served_from_cache:.1%} of prompt tokens"))
    for row in d.prefix_cache:
        size = "unlimited" if row.kv_tokens is None else f"{row.kv_tokens:,} tokens"
        rows.append(("a prefix cache", f"would serve {row.share:.1%} of prompt tokens ({size})"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name.ljust(width)}  {value}")
    lengths = [("prompts", d.prompt_tokens), ("answers", d.output_tokens), ("their limits", d.max_tokens)]
    shown = [
        (name, *(f"{value:,.0f}" for value in (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)))
        for name, spread in lengths
        if spread is not None
    ]
    if shown:
        print()
        figures = ("mean", "p50", "p90", "p99", "most")
        print_table(("tokens", *figures), shown, right=figures)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
