"""A checkpoint with an adapter's products added to its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lmkit.errors import UnsupportedError
from lmkit.formats.checkpoint import CheckpointWriter, atomic_directory
from lmkit.formats.parts import FLOATS
from lmkit.formats.peft import Adapter, read_adapter
from lmkit.models.adapters import check_place
from lmkit.models.source import ModelSource

Progress = Callable[[int, int], None]  # (modules done, of how many)


def merge(
    model: str | Path, adapter: str | Path, output: str | Path, *, progress: Progress = lambda done, total: None
) -> int:
    """Write `model` with `adapter` merged to `output`, completely or not at all. Returns the number of changed linears.

    W + scale * B A is computed in float32 and stored in W's dtype. Raises UnsupportedError if the weights are quantized
    or stored fused, and CheckpointError for broken files or an adapter of another model.
    """
    found = read_adapter(adapter)
    source = ModelSource(model)
    reader = source.reader
    try:
        check_place(found, source.spec)
        _check_dense(source, found)
        with atomic_directory(output) as folder:
            writer, done = CheckpointWriter(folder), 0
            for name in reader.names():
                tensor = reader.tensor(name)
                addition = found.additions.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
                if addition is not None:
                    tensor = (tensor.float() + addition.product()).to(tensor.dtype)
                    done += 1
                    progress(done, len(found.additions))
                writer.add(name, tensor)
                reader.release()
            writer.finish(reader.config, reader.path)
    finally:
        source.close()
    return len(found.additions)


def _check_dense(source: ModelSource, adapter: Adapter) -> None:
    reader = source.reader
    for module in adapter.additions:
        name = module + ".weight"
        if not reader.has(name) or reader.info(name).dtype not in FLOATS:
            why = "is quantized: merge into the original checkpoint, then quantize"
            raise UnsupportedError(f"{reader.path}: {module} {why}")
