"""`lmkit convert MODEL -o OUT --format FORMAT`: converts quantized weights to another format, or from a GGUF file.
With `--merge-adapter` it adds a LoRA adapter to a dense checkpoint.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from lmkit.cli.progress import ProgressBar
from lmkit.errors import ConfigError
from lmkit.formats.names import FormatName


def convert(
    model: Annotated[str, typer.Argument(help="A quantized checkpoint's folder, or a .gguf file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; it must not exist or be empty.")],
    format: Annotated[
        Literal[FormatName, "dense"] | None,
        typer.Option(
            help="Format to write; dense has the dtype of config.json, or float16. Default for a .gguf file: the one "
            "that holds what the file has."
        ),
    ] = None,
    merge_adapter: Annotated[
        Path | None,
        typer.Option(
            "--merge-adapter", "--export-merged", help="A LoRA adapter's folder, merged into a dense checkpoint."
        ),
    ] = None,
) -> None:
    """Write a quantized checkpoint in another format without loss, and verify it. Or write dense weights, or merge a
    LoRA adapter."""
    from lmkit.formats.convert import convert
    from lmkit.formats.gguf_model import is_gguf
    from lmkit.formats.known import remember
    from lmkit.models.gguf_convert import convert_gguf

    if merge_adapter is not None:
        _merge(model, merge_adapter, output, format)
        return
    from_gguf = is_gguf(model)
    if format is None and not from_gguf:
        raise ConfigError("convert: give --format, or --merge-adapter")
    if format == "dense" and not from_gguf:
        _to_dense(model, output)
        return
    with ProgressBar(quiet=False) as bar:
        progress = partial(bar.update, "linears")
        if from_gguf:
            written, linears = convert_gguf(model, output, format, progress=progress)
        else:
            assert format is not None
            written, linears = format, convert(model, output, format, progress=progress)
    remember(output)
    quantized = sum(scheme is not None for scheme in linears.values())
    if quantized:
        print(f"{output}: {quantized} linears as {written}, read back and found equal")
    else:
        print(f"{output}: {len(linears)} linears are dense")


def _to_dense(model: str, output: Path) -> None:
    from lmkit.formats.known import remember
    from lmkit.models.to_dense import to_dense

    with ProgressBar(quiet=False) as bar:
        count = to_dense(model, output, progress=lambda done, total: bar.update("linears", done, total))
    remember(output)
    print(f"{output}: {count} linears are dense")


def _merge(model: str, adapter: Path, output: Path, format: str | None) -> None:
    from lmkit.formats.known import remember
    from lmkit.models.merge import merge

    if format not in (None, "dense"):
        raise ConfigError(f"--merge-adapter writes dense weights; quantize the result, and leave out --format {format}")
    with ProgressBar(quiet=False) as bar:
        count = merge(model, adapter, output, progress=lambda done, total: bar.update("linears", done, total))
    remember(output)
    print(f"{output}: {count} linears merged")
