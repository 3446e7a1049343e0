"""Common parts of the quantized formats: checked fields of quantization_config, tensors of a module, and scales."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lmkit.codes import Integers
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.names import Activations
from lmkit.qtensor import Linears, QTensor, QuantScheme, int_scheme

# (field, its other spelling, allowed values; None is among them if the field is optional)
Fields = tuple[tuple[str, str, tuple[Any, ...]], ...]
# Fields that ask for more than the weights: activations would have to be turned, or an adapter added.
CHANGES = ("rotation", "rotation_config", "transform_config", "adapter")
FLOATS = ("F16", "BF16", "F32")
MAX_GROUP_SIZE = 1 << 17
HEAD = "lm_head"  # the module of a model's output head
# (tensors of which a module has any, tensors that it then needs); weight_scale also goes with an 8-bit weight
_NEEDED = (
    (("scaled_zeros",), ("qweight", "scaled_zeros", "scales")),
    (("qweight", "qzeros", "scales"), ("qweight", "qzeros", "scales")),
    (("weight_global_scale",), ("weight_packed", "weight_scale")),
    (("weight_packed", "weight_shape"), ("weight_packed", "weight_scale", "weight_shape")),
    (("mxfp4_blocks", "mxfp4_scales"), ("mxfp4_blocks", "mxfp4_scales")),
)


def field_problem(entry: dict[str, Any], fields: Fields) -> str | None:
    """The reason why a quantization_config does not fit `fields`, or asks for one of CHANGES; None if it fits. Other
    fields have no effect. Case is ignored."""
    for field, other, allowed in fields:
        for name in [name for name in (field, other) if name in entry] or [field]:
            value = entry.get(name)
            value = value.lower() if isinstance(value, str) else value
            if value not in allowed or type(value) not in map(type, allowed):
                expected = " or ".join(repr(choice) for choice in allowed if choice is not None)
                return f"{name} is {entry.get(name)!r}, expected {expected}"
    if changed := next((name for name in CHANGES if entry.get(name)), None):
        return f"{changed} is {entry[changed]!r:.80}: more than the weights would have to be changed"
    return None


def size_problem(size: Any) -> str | None:
    """The reason why `size` is not a group size (a number of inputs, or -1 for all); None if it is."""
    if type(size) is not int or (size != -1 and not 1 <= size <= MAX_GROUP_SIZE):
        return f"group_size is {size!r}, expected a positive number or -1"
    return None


def stated_or_equal(stated: Any, in_features: int, num_groups: int) -> int:
    """The group size of a weight with so many groups: the stated one if it gives them, else the size of equal groups,
    which is a multiple of 8. If there is no such size, it is the stated one."""
    size, rest = divmod(in_features, num_groups)
    if stated is not None and (rest or size % 8 or int_scheme(8, stated).num_groups(in_features) == num_groups):
        return int(stated)
    return -1 if num_groups == 1 else size


def names_problem(field: str, names: Any) -> str | None:
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        return f"{field} is not a list of names"
    return None


def listed(module: str, names: list[str] | None) -> str | None:
    """The name among `names` that is `module` or a part of its path, in whole components."""
    return next((name for name in names or [] if f".{name}." in f".{module}."), None)


def one_scheme(linears: Linears, what: str) -> QuantScheme:
    """The scheme of all quantized linears, symmetric if all are.

    Raises UnsupportedError for mixtures; `what` names the format.
    """
    schemes = {scheme for scheme in linears.values() if scheme is not None}
    grids = {(str(scheme.codes), scheme.group_size, scheme.rows) for scheme in schemes}
    if len(grids) > 1:
        found = ", ".join(sorted({f"{scheme.bits} bits in groups of {scheme.group_size}" for scheme in schemes}))
        raise UnsupportedError(f"{what} has one scheme for a whole checkpoint, not {found}; use compressed-tensors")
    least = min(schemes, key=lambda scheme: scheme.symmetric)
    return replace(least, act_order=any(scheme.act_order for scheme in schemes))


def of_kernels(weight: QTensor) -> QTensor:
    """The same weight as kernels hold it: codes of 2 and 3 bits become such of 4."""
    return replace(weight, scheme=replace(weight.scheme, codes=Integers(4))) if weight.scheme.bits < 4 else weight


def refuse_extras(what: str, activations: Activations, kv_cache_scheme: dict[str, Any] | None) -> None:
    """For a format without activations and KV cache: raise UnsupportedError if either is given."""
    if activations != "none":
        raise UnsupportedError(f"{what} has no place for {activations} activations; use compressed-tensors")
    if kv_cache_scheme is not None:
        raise UnsupportedError(f"{what} has no place for a kv_cache_scheme; use compressed-tensors")


def missing_parts(reader: CheckpointReader, module: str) -> list[str]:
    """Names of tensors that a linear needs in any format and that the checkpoint lacks. No tensor is read."""
    packed = f"{module}.weight_packed"
    if reader.has(packed) and reader.info(packed).dtype == "U8":  # float4; of NVFP4 the factor is asked for when read
        return [name for name in (f"{module}.weight_scale",) if not reader.has(name)]
    found = (needed for marks, needed in _NEEDED if any(reader.has(f"{module}.{mark}") for mark in marks))
    return [name for part in next(found, ("weight",)) if not reader.has(name := f"{module}.{part}")]


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
    """[rows, columns] of a matrix. Raises CheckpointError if it is missing, not a matrix, or empty."""
    if not reader.has(name):
        raise CheckpointError(f"{reader.path}: tensor {name} is missing")
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
    """Raise CheckpointError if a module with `part` has any of these."""
    for other in others:
        if reader.has(f"{module}.{other}"):
            raise CheckpointError(f"{reader.path}: {module} has both {part} and {other}")


def in_groups(reader: CheckpointReader, name: str, weight: QTensor) -> QTensor:
    """A weight whose codes stand in the order of the inputs, with its codes by group.

    The tensor `name`, int32 [in], has the group of each input; without it, each `group_size` inputs are a group. Groups
    may come in any order, and their inputs may lie apart (QTensor.order). Raises CheckpointError if an index is out of
    range or the groups have several sizes.
    """
    if not reader.has(name):
        return weight
    in_features, num_groups = weight.codes.shape[1], weight.scales.shape[1]
    groups = read_part(reader, name, ("I32", "I64"), (in_features,)).long()
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise CheckpointError(f"{reader.path}: {name} names groups that there are not, outside 0 .. {num_groups - 1}")
    size = weight.scheme.group_size if num_groups > 1 else in_features
    first = groups[::size]
    if torch.equal(first.repeat_interleave(size)[:in_features], groups):
        scales, zeros = weight.scales[:, first].contiguous(), weight.zeros[:, first].contiguous()
        return replace(weight, scales=scales, zeros=zeros)
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], torch.arange(in_features) // size):
        raise CheckpointError(f"{reader.path}: {name}: some group has not {size} inputs")
    scheme = replace(weight.scheme, act_order=True)
    return replace(weight, codes=weight.codes[:, order], scheme=scheme, order=order.int())


def by_input(weight: QTensor) -> tuple[Tensor, Tensor]:
    """(codes in the order of the inputs, the group of each input int32 [in]): what `in_groups` reads."""
    in_features, num_groups = weight.codes.shape[1], weight.scales.shape[1]
    groups = torch.arange(in_features, dtype=torch.int32) // -(-in_features // num_groups)
    if weight.order is None:
        return weight.codes, groups
    places = weight.order.argsort()
    return weight.codes[:, places], groups[places]


def half_scales(scales: Tensor, module: str, what: str) -> Tensor:
    """Scales as float16. Raises UnsupportedError if that would change them."""
    half = scales.half()
    if not torch.equal(half.float(), scales.float()):
        raise UnsupportedError(
            f"{module}: {what} has float16 scales, which cannot hold these {str(scales.dtype)[6:]} ones; "
            "a compressed-tensors checkpoint can"
        )
    return half


def read_float8(reader: CheckpointReader, name: str, shape: tuple[int, int]) -> Tensor:
    """float8 e4m3 codes, none of them NaN (the type has no infinities). Raises CheckpointError."""
    codes = read_part(reader, name, ("F8_E4M3",), shape)
    if bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise CheckpointError(f"{reader.path}: {name} holds numbers that are not finite")
    return codes
