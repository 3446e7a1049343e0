"""Lossless conversion between quantized formats: the same codes, scales and zeros in another packing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from lmkit.errors import CheckpointError, ConfigError, UnsupportedError
from lmkit.formats.atomic import copy_file
from lmkit.formats.base import WeightFormat, get_format, resolve_format
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter, atomic_directory
from lmkit.formats.kv_config import FILE_NAME
from lmkit.formats.parts import FLOATS
from lmkit.formats.published import MARKS
from lmkit.formats.verify import verify, weight_digest
from lmkit.qtensor import Linears, QTensor, QuantScheme, plain

CODED = (*MARKS, "SCB")  # a module with one of these has codes that other formats may hold
PARTS = (
    *CODED,
    "weight_format",
    "weight",
    "qzeros",
    "scaled_zeros",
    "scales",
    "g_idx",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
)
STATIC = ("input_scale", "input_zero_point")
Progress = Callable[[int, int], None]  # (modules done, of how many)


def convert(
    model: str | Path, output: str | Path, format_name: str, *, progress: Progress = lambda done, total: None
) -> dict[str, QuantScheme | None]:
    """Write the quantized checkpoint `model` to `output` in another format, completely or not at all, and verify it.

    Everything but the linears stays unchanged, including kv_config.json and the tokenizer's files. Returns every
    matrix's scheme by its module. Raises ConfigError if `output` is occupied or `model` is not quantized,
    UnsupportedError if the other format cannot hold the weights, and CheckpointError for a broken checkpoint.
    """
    target = get_format(format_name)
    with CheckpointReader(model) as reader:
        source = resolve_format(reader.config)
        if format_name == "dense" or source.name in ("dense", format_name):
            raise ConfigError(f"{reader.path}: is {source.name}; convert goes from one quantized format to another")
        linears = _linears(reader, source, target)
        entry = target.config_entry(
            linears,
            activations=source.activations(reader.config),
            kv_cache_scheme=reader.config["quantization_config"].get("kv_cache_scheme"),
        )
        with atomic_directory(output) as folder:
            writer = CheckpointWriter(folder)
            digests = _write(reader, source, target, writer, linears, progress)
            writer.finish(reader.config | {"quantization_config": entry}, reader.path)
            if (reader.path / FILE_NAME).is_file():
                copy_file(reader.path / FILE_NAME, folder / FILE_NAME)
            verify(folder, digests)
    return dict(linears)


def _linears(reader: CheckpointReader, source: WeightFormat, target: WeightFormat) -> Linears:
    """Every matrix's module and its scheme, None = dense.

    Some formats store every zero and do not say whether weights are symmetric; others hold only symmetric weights.
    Here, integers are symmetric if all zeros of all modules are in the middle.
    """
    linears: dict[str, QuantScheme | None] = {}
    is_symmetric = True
    for module, is_quantized in _matrices(reader):
        weight = _as_held(source.read_linear(reader, module), target) if is_quantized else None
        if isinstance(weight, Tensor):
            raise UnsupportedError(f"{reader.path}: {module} lies on no grid of integers; use --format dense")
        linears[module] = weight.scheme if isinstance(weight, QTensor) else None
        if isinstance(weight, QTensor):
            is_symmetric = is_symmetric and weight.scheme.codes.suits(weight.zeros)
        if static := next((part for part in STATIC if reader.has(f"{module}.{part}")), None):
            raise UnsupportedError(f"{reader.path}: {module}.{static}: static activation scales are not converted")
        reader.release()
    if not any(linears.values()):
        raise CheckpointError(f"{reader.path}: no linear is quantized in codes that move; try --format dense")
    return {
        module: replace(scheme, codes=scheme.codes.made_symmetric()) if scheme and is_symmetric else scheme
        for module, scheme in linears.items()
    }


def _as_held(weight: Tensor | QTensor, target: WeightFormat) -> Tensor | QTensor:
    """The weight in codes that the target has, if there are such."""
    if isinstance(weight, Tensor) or weight.scheme.codes == weight.scheme.codes.plain:
        return weight
    out_features, in_features = weight.codes.shape
    return weight if target.can_write((out_features, in_features), weight.scheme) is None else plain(weight)


def _matrices(reader: CheckpointReader) -> list[tuple[str, bool]]:
    """(module, whether it is quantized) of every quantized weight and every float matrix, including embeddings."""
    found = {}
    for name in reader.names():
        module, _, part = name.rpartition(".")
        info = reader.info(name)
        if part in CODED:
            found[module] = True
        elif part == "weight" and info.dtype in FLOATS and len(info.shape) == 2:
            found.setdefault(module, False)
    return sorted(found.items())


def _write(
    reader: CheckpointReader,
    source: WeightFormat,
    target: WeightFormat,
    writer: CheckpointWriter,
    linears: Linears,
    progress: Progress,
) -> dict[str, str]:
    """Write every tensor. Returns the digests of the quantized weights by their modules."""
    activations, digests = source.activations(reader.config), {}
    quantized = {module: scheme for module, scheme in linears.items() if scheme is not None}
    for number, (module, scheme) in enumerate(quantized.items()):
        weight = _as_held(source.read_linear(reader, module), target)
        assert isinstance(weight, QTensor)
        weight = replace(weight, scheme=scheme)
        digests[module] = weight_digest(weight)
        target.write_linear(writer, module, weight, activations=activations)
        progress(number + 1, len(quantized))
    for name in reader.names():
        module, _, part = name.rpartition(".")
        if module not in quantized or part not in PARTS:
            writer.add(name, reader.tensor(name))
    return digests
