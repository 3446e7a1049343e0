"""A checkpoint with an adapter's products added to its weights."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lmkit.errors import UnsupportedError
from lmkit.formats.checkpoint import CheckpointWriter, atomic_directory
from lmkit.formats.parts import FLOATS
from lmkit.formats.peft import Adapter, read_adapter
from lmkit.models.adapters import check_place, one_by_one
from lmkit.models.source import ModelSource

Progress = Callable[[int, int], None]  # (modules done, of how many)


def merge(
    model: str | Path, adapter: str | Path, output: str | Path, *, progress: Progress = lambda done, total: None
) -> int:
    """Write `model` with `adapter` merged to `output`, completely or not at all. Returns the number of changed linears.

    W + scale * B A is computed in float32 and stored in W's dtype. Linears that were in one tensor stand one by one
    then. Raises UnsupportedError if the weights are quantized, and CheckpointError for broken files or an adapter of
    another model.
    """
    found = read_adapter(adapter)
    source = ModelSource(model)
    reader = source.reader
    try:
        found = one_by_one(found, source.spec)
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
            writer.finish(source.config, reader.path)
    finally:
        source.close()
    return len(found.additions)


@contextmanager
def merged_beside(output: Path, model: str, adapter: Path | None) -> Iterator[str]:
    """`model`, or the model with `adapter` merged, in a folder beside `output`. The folder is removed at the end, but
    stays after an error: a run that resumes needs the same files. Raises as `merge` does.
    """
    if adapter is None:
        yield model
        return
    source = ModelSource(model)
    digests = source.reader.content_digest() + read_adapter(adapter).digest
    source.close()
    target = Path(os.path.realpath(output))
    folder = target.parent / f".{target.name}.merged-{hashlib.sha256(digests.encode()).hexdigest()[:12]}"
    if not folder.exists():
        merge(model, adapter, folder)
    yield str(folder)
    shutil.rmtree(folder)


def _check_dense(source: ModelSource, adapter: Adapter) -> None:
    reader = source.reader
    for module in adapter.additions:
        name = module + ".weight"
        if not reader.has(name) or reader.info(name).dtype not in FLOATS:
            why = "is quantized: merge into the original checkpoint, then quantize"
            raise UnsupportedError(f"{reader.path}: {module} {why}")
