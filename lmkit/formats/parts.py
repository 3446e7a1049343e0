"""What the quantized formats share: fields of quantization_config, tensors of a module, and scales, all checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.qtensor import Linears, QuantScheme

# How an engine is to run 8-bit weights: with activations rounded to the same kind, per token, or exactly ("none").
Activations = Literal["none", "int8", "float8"]

# (field, its other spelling, allowed values, None among them if it may be absent)
Fields = tuple[tuple[str, str, tuple[Any, ...]], ...]
# What AutoRound adds to AWQ and GPTQ entries: how it searched, no meaning for the tensors.
AUTO_ROUND_NOTES = {
    "amp", "autoround_version", "batch_size", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input",
    "gradient_accumulate_steps", "iters", "low_gpu_mem_usage", "lr", "minmax_lr", "nsamples", "provider",
    "quant_block_list", "scale_dtype", "seqlen", "to_quant_block_names",
}  # fmt: skip
FLOATS = ("F16", "BF16", "F32")
MAX_GROUP_SIZE = 1 << 17
MARKS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")  # a module with one of these is quantized


def method_problem(config: dict[str, Any], method: str) -> str | None:
    """Why config.json's quantization_config is not of this `quant_method`; None if it is."""
    entry = config.get("quantization_config")
    if not isinstance(entry, dict):
        return "config.json has no quantization_config object"
    return None if entry.get("quant_method") == method else f"quant_method is {entry.get('quant_method')!r}"


def field_problem(entry: dict[str, Any], fields: Fields, others: Iterable[str]) -> str | None:
    """Why an entry is not one of these `fields`, with only `others` beside them; None if it is. Text has no case."""
    known = {name for field in fields for name in field[:2]} | {*others}
    if unknown := sorted(entry.keys() - known):
        return f"quantization_config has unknown fields {', '.join(unknown)}"
    for field, other, allowed in fields:
        for name in [name for name in (field, other) if name in entry] or [field]:
            value = entry.get(name)
            value = value.lower() if isinstance(value, str) else value
            if value not in allowed or type(value) not in map(type, allowed):
                expected = " or ".join(repr(choice) for choice in allowed if choice is not None)
                return f"{name} is {entry.get(name)!r}, expected {expected}"
    return None


def size_problem(size: Any) -> str | None:
    """Of a group size: a number of inputs, or -1 for all."""
    if type(size) is not int or (size != -1 and not 1 <= size <= MAX_GROUP_SIZE):
        return f"group_size is {size!r}, expected a positive number or -1"
    return None


def names_problem(field: str, names: Any) -> str | None:
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        return f"{field} is not a list of names"
    return None


def listed(module: str, names: list[str] | None) -> str | None:
    """The one of `names` that names `module` or a part of its path, in whole components."""
    return next((name for name in names or [] if f".{name}." in f".{module}."), None)


def one_scheme(linears: Linears, what: str) -> QuantScheme:
    """The scheme of all quantized linears, symmetric if all are. Raises UnsupportedError if `what` cannot mix them."""
    schemes = {scheme for scheme in linears.values() if scheme is not None}
    grids = {(scheme.bits, scheme.group_size, scheme.kind, scheme.rows) for scheme in schemes}
    if len(grids) > 1:
        found = ", ".join(sorted(f"{bits} bits in groups of {size}" for bits, size, *_ in grids))
        raise UnsupportedError(f"{what} has one scheme for a whole checkpoint, not {found}; use compressed-tensors")
    (bits, group_size, kind, rows) = grids.pop()
    return QuantScheme(bits, group_size, all(scheme.symmetric for scheme in schemes), kind, rows)


def refuse_extras(what: str, activations: Activations, kv_cache_scheme: dict[str, Any] | None) -> None:
    """Of a format that says nothing of activations or of the KV cache. Raises UnsupportedError."""
    if activations != "none":
        raise UnsupportedError(f"{what} has no place for {activations} activations; use compressed-tensors")
    if kv_cache_scheme is not None:
        raise UnsupportedError(f"{what} has no place for a kv_cache_scheme; use compressed-tensors")


def read_part(reader: CheckpointReader, name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> Tensor:
    """The tensor `name`, of one of these dtypes and shapes. Raises CheckpointError."""
    if not reader.has(name):
        raise CheckpointError(f"{reader.path}: tensor {name} is missing")
    info = reader.info(name)
    if info.dtype not in dtypes or info.shape not in shapes:
        expected = f"{' or '.join(dtypes)} {' or '.join(str([*shape]) for shape in shapes)}"
        raise CheckpointError(
            f"{reader.path}: {name} is {info.dtype} {[*info.shape]}; the module's other tensors and "
            f"quantization_config ask for {expected}"
        )
    return reader.tensor(name)


def matrix_shape(reader: CheckpointReader, name: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
    """[rows, columns] of a matrix that is not empty. Raises CheckpointError."""
    info = reader.info(name)
    if info.dtype not in dtypes or len(info.shape) != 2 or 0 in info.shape:
        expected = " or ".join(dtypes)
        raise CheckpointError(f"{reader.path}: {name} is {info.dtype} {[*info.shape]}, expected a matrix of {expected}")
    return info.shape[0], info.shape[1]


def read_scales(
    reader: CheckpointReader, name: str, *shapes: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS
) -> Tensor:
    """Scales in the dtype of the file, all finite. Raises CheckpointError."""
    scales = read_part(reader, name, dtypes, *shapes)
    if not bool(scales.isfinite().all()):
        raise CheckpointError(f"{reader.path}: {name} holds numbers that are not finite")
    return scales


def refuse_beside(reader: CheckpointReader, module: str, part: str, others: tuple[str, ...]) -> None:
    """A module with `part` has none of these. Raises CheckpointError."""
    for other in others:
        if reader.has(f"{module}.{other}"):
            raise CheckpointError(f"{reader.path}: {module} has both {part} and {other}")


def group_order(reader: CheckpointReader, name: str, in_features: int, group_size: int) -> Tensor | None:
    """For each `group_size` inputs, the index of their group, int64 [groups], from the tensor `name`, int32 [in]: the
    group of each input. None if there is no such tensor.

    Groups may lie in any order. Raises UnsupportedError if inputs of one group are not neighbours: activations would
    have to be gathered before every product. Raises CheckpointError if an index is out of range.
    """
    if not reader.has(name):
        return None
    size = in_features if group_size == -1 else group_size
    groups = read_part(reader, name, ("I32", "I64"), (in_features,)).long()
    num_groups = -(-in_features // size)
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise CheckpointError(f"{reader.path}: {name} names groups that there are not, outside 0 .. {num_groups - 1}")
    order = groups[::size]
    if not torch.equal(order.repeat_interleave(size)[:in_features], groups):
        raise UnsupportedError(
            f"{reader.path}: {name}: inputs of one group are not neighbours (activation order without static groups), "
            "so that every product would have to gather its inputs; such checkpoints are not read"
        )
    return order


def half_scales(scales: Tensor, module: str, what: str) -> Tensor:
    """Scales as float16. Raises UnsupportedError where that would change them."""
    half = scales.half()
    if not torch.equal(half.float(), scales.float()):
        raise UnsupportedError(f"{module}: {what} has float16 scales, which cannot hold these {scales.dtype} ones")
    return half


def read_float8(reader: CheckpointReader, name: str, shape: tuple[int, int]) -> Tensor:
    """float8 e4m3 codes, none of them NaN (the type has no infinities). Raises CheckpointError."""
    codes = read_part(reader, name, ("F8_E4M3",), shape)
    if bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise CheckpointError(f"{reader.path}: {name} holds numbers that are not finite")
    return codes
