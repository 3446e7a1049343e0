"""Checkpoints of all kinds, opened: folders of safetensors and GGUF files."""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path

import torch

from lmkit.formats.checkpoint import CheckpointReader, resolve_model_path
from lmkit.formats.fp8_floats import Fp8Floats, in_float8
from lmkit.formats.gguf import GgufReader
from lmkit.models.fused import views
from lmkit.models.gguf_names import pieces
from lmkit.models.placed import becomes_dense
from lmkit.models.spec import ModelSpec
from lmkit.qtensor import QuantScheme


def open_checkpoint(path: str | Path, *, floats: bool = False) -> CheckpointReader:
    """The checkpoint of a path or a name that `resolve_model_path` knows. `floats`: read what a GGUF file, or a
    checkpoint in float8, has quantized as floats.

    Raises CheckpointError and UnsupportedError.
    """
    found = resolve_model_path(path)
    if found.is_file():
        return GgufReader(found, floats=floats)
    reader = CheckpointReader(found)
    return Fp8Floats(found) if floats and in_float8(reader.config) else reader


def widened(reader: CheckpointReader, dtype: str, device: str) -> str:
    """A line on the linears of a GGUF file that are dense on the device, or an empty text."""
    if not isinstance(reader, GgufReader):
        return ""
    kinds, weights, nbytes = Counter[str](), 0, 0
    for name in reader.names():
        kind = reader.storage(name)
        scheme = reader.scheme(name)
        if kind is not None and (scheme is None or becomes_dense(scheme, device)):
            kinds[kind] += 1
            weights += prod(reader.info(name).shape)
            nbytes += reader.info(name).nbytes
    if not kinds:
        return ""
    size = getattr(torch, dtype).itemsize
    return (
        f"{', '.join(sorted(kinds))}: no kernel on {device} takes these types: {kinds.total()} linears take "
        f"{8 * size} bits a weight, {weights * size >> 20} MiB (in the file {nbytes >> 20} MiB)"
    )


def coded_scheme(reader: CheckpointReader, name: str) -> QuantScheme | None:
    """The scheme of a tensor that a GGUF file has in codes; None for other tensors."""
    return reader.scheme(name) if isinstance(reader, GgufReader) and reader.has(name) else None


def has_planes(reader: CheckpointReader) -> bool:
    """Whether some linears of a GGUF file are kept in planes of bits."""
    schemes = (coded_scheme(reader, name) for name in reader.names()) if isinstance(reader, GgufReader) else ()
    return any(scheme is not None and scheme.in_planes for scheme in schemes)


def show_tensors(reader: CheckpointReader, spec: ModelSpec) -> None:
    """Let the reader show the tensors of this model that it has inside others, or under other names."""
    if isinstance(reader, GgufReader):
        reader.show_pieces(pieces(reader, spec))
    else:
        reader.show(views(reader, spec))
