"""`lmkit list` and `lmkit pull`: the models on this machine, and how one gets there."""

from __future__ import annotations

import json as jsonlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lmkit.formats.known import Model


def list_models(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show models of the Hugging Face cache, folders and files that lmkit wrote or served, and GGUF files here."""
    from lmkit.cli.progress import duration
    from lmkit.cli.table import print_table
    from lmkit.formats.known import models
    from lmkit.turbo.host_memory import gib

    found = [_measured(model) for model in models()]
    if json:
        print(jsonlib.dumps([model.as_dict() for model in found], indent=2))
        return
    print_table(
        ("name", "size", "format", "bits", "modified"),
        [
            (
                m.name,
                gib(m.num_bytes),
                m.format,
                "" if m.bits is None else f"{m.bits:.4g}",
                f"{duration(time.time() - m.modified)} ago",
            )
            for m in found
        ],
        right=("size", "bits"),
    )


def _measured(model: Model) -> Model:
    """The model with the bits of a weight in the file. Dense ones have those of their dtype, and are not opened."""
    if model.format == "dense":
        return model
    from lmkit.models.weight_bits import bits_of_folder

    return replace(model, bits=bits_of_folder(model.path) or model.bits)


def pull(
    name: Annotated[str, typer.Argument(metavar="ORG/NAME", help="A model of the Hugging Face Hub.")],
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit. Default: main.")] = None,
) -> None:
    """Fetch a model from the Hugging Face Hub: safetensors, configuration and tokenizer, nothing else.

    The same command continues a download that was interrupted. HF_HOME says where models are kept.
    """
    from lmkit.formats.hub import pull
    from lmkit.turbo.host_memory import gib

    def announce(num_files: int, num_bytes: int) -> None:
        print(f"{name}: {num_files} files, {gib(num_bytes)}", flush=True)

    try:
        path = pull(name, revision=revision, announce=announce)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command continues the download") from None
    print(f"{name}: {path}")
