"""`lmkit convert MODEL -o OUT --format FORMAT`: converts quantized weights to another format, or from a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from lmkit.cli.progress import ProgressBar


def convert(
    model: Annotated[str, typer.Argument(help="A quantized checkpoint's folder, or a .gguf file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; it must not exist or be empty.")],
    format: Annotated[
        Literal["awq", "gptq", "gptq_v2", "compressed-tensors", "fp8", "dense"],
        typer.Option(help="Format to write; dense is for a .gguf file."),
    ],
) -> None:
    """Write a quantized checkpoint in another format without loss, and verify it."""
    from lmkit.formats.convert import convert
    from lmkit.formats.gguf import convert_gguf, is_gguf
    from lmkit.formats.known import remember

    chosen = convert_gguf if is_gguf(model) else convert
    with ProgressBar(quiet=False) as bar:
        linears = chosen(model, output, format, progress=lambda done, total: bar.update("linears", done, total))
    remember(output)
    quantized = sum(scheme is not None for scheme in linears.values())
    print(f"{output}: {quantized} linears as {format}, read back and found equal")
