"""A GGUF file as a checkpoint folder, as Hugging Face's tools read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lmkit.errors import CheckpointError, ConfigError, UnsupportedError
from lmkit.formats.base import get_format
from lmkit.formats.checkpoint import CheckpointWriter, atomic_directory, resolve_model_path
from lmkit.formats.gguf import GgufReader
from lmkit.formats.verify import verify, weight_digest
from lmkit.models.fused import OF_ENCODERS, stored_name
from lmkit.models.source import ModelSource
from lmkit.models.spec import ModelSpec
from lmkit.qtensor import Linears
from lmkit.small_files import exists

Progress = Callable[[int, int], None]  # (tensors done, of how many)
MIXED = "compressed-tensors"  # holds several schemes, and every scheme of a GGUF file


def convert_gguf(
    model: str | Path, output: str | Path, format_name: str | None, *, progress: Progress = lambda done, total: None
) -> tuple[str, Linears]:
    """Write a GGUF model as a Hugging Face folder, completely or not at all, and verify its quantized linears.

    `format_name` "dense" stores all linears as floats; None takes the format that holds what the file has. Tokenizer
    and sampling defaults are written from the metadata. Returns the format and each linear's scheme. Raises ConfigError
    if `output` is occupied, CheckpointError for a damaged file, and UnsupportedError for linears that the format cannot
    store.
    """
    path = resolve_model_path(model)
    if not exists(path / "tokenizer.json"):
        raise CheckpointError(f"{path}: has no tokenizer, and there is no tokenizer.json beside it")
    coded, plain = ModelSource(path), ModelSource(path, floats=True)
    assert isinstance(coded.reader, GgufReader)
    coded.reader.move()
    linears = _linears(coded)
    if format_name is None:
        format_name = MIXED if any(linears.values()) else "dense"
    target = get_format(format_name)
    linears = dict.fromkeys(linears) if target.name == "dense" else linears
    for module, scheme in linears.items():
        shape = coded.reader.info(module + ".weight").shape
        if scheme is not None and (reason := target.can_write((shape[0], shape[1]), scheme)):
            raise UnsupportedError(f"{module}: {target.name} cannot store it: {reason}; use another --format, or dense")
    if target.name != "dense" and not any(linears.values()):
        raise ConfigError(f"{path}: no linear is quantized in codes that move; use --format dense")
    renamed = _renamed(plain.spec)
    with atomic_directory(output) as folder:
        writer, digests = CheckpointWriter(folder, written=plain.reader.release), {}
        names = plain.reader.names()
        for number, name in enumerate(names):
            module = name.removesuffix(".weight")
            if linears.get(module) is None:
                writer.add(renamed.get(name, name), plain.reader.tensor(name))
            else:
                weight = coded.format.read_linear(coded.reader, module)
                digests[module] = weight_digest(weight)
                target.write_linear(writer, module, weight)
            progress(number + 1, len(names))
        entry = {"quantization_config": target.config_entry(linears)} if any(linears.values()) else {}
        writer.finish(plain.config | entry, path)
        verify(folder, digests)
    return target.name, linears


def _linears(source: ModelSource) -> Linears:
    """Every linear of the layers and its scheme in the file; None = floats."""
    assert isinstance(source.reader, GgufReader)
    layers = enumerate(source.spec.layers)
    modules = [layer.module_name(index, role) for index, layer in layers for role in layer.linears]
    return {module: source.reader.scheme(module + ".weight") for module in modules}


def _renamed(spec: ModelSpec) -> dict[str, str]:
    """Names of the model's tensors -> those that other programs know, where they differ."""
    renamed = {}
    for index, layer in enumerate(spec.layers):
        for role in (*layer.vectors, *layer.matrices):
            renamed[spec.tensor_name(index, role)] = stored_name(spec, index, role)
    if spec.embed_norm:
        for theirs, ours in OF_ENCODERS.items():
            renamed |= {f"{ours}.{part}": f"embeddings.{theirs}.{part}" for part in ("weight", "bias")}
    return renamed
