"""compressed-tensors: weights of several schemes in one checkpoint. For a weight [out, in] of b bits:

pack-quantized   module.weight_packed      int32 [out, ceil(in * b / 32)]    words in sequence, along in
                 module.weight_zero_point  int32 [ceil(out * b / 32), groups]    words in sequence, along out;
                                           of asymmetric weights only
                 module.weight_shape       int64 [2] = (out, in)
                 module.weight_g_idx       int32 [in]: the group of each input, in files of older versions
int-quantized    module.weight             int8  [out, in]           code - 2**(b - 1)
                 module.weight_zero_point  int8  [out, groups]       zero - 2**(b - 1); of asymmetric weights only
float-quantized  module.weight             float8 e4m3 [out, in]
nvfp4-pack-quantized   see nvfp4.py
all              module.weight_scale       any float: [out, groups], [1] for a whole tensor, or one for each block

w = (code - zero) * scale; for floats, code * scale. Scales keep the dtype that they have in memory, because the codes
were chosen for them. A module without these tensors is dense. compressed_config.py decides a module's scheme.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats import compressed_config
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.formats.compressed_config import Rule, read_rules, storage_of
from lmkit.formats.dense import read_dense
from lmkit.formats.nvfp4 import read_compressed
from lmkit.formats.packing import pack_words, unpack_words
from lmkit.formats.parts import (
    FLOATS,
    Activations,
    in_groups,
    matrix_shape,
    of_kernels,
    read_float8,
    read_part,
    read_scales,
    refuse_beside,
)
from lmkit.qtensor import Linears, QTensor, QuantScheme

PARTS = ("weight_packed", "weight_shape", "weight_scale")  # a module without these is dense


class CompressedTensorsFormat:
    name = "compressed-tensors"

    def accepts(self, config: dict[str, Any]) -> str | None:
        return compressed_config.problem(config["quantization_config"])

    def activations(self, config: dict[str, Any]) -> Activations:
        return read_rules(config["quantization_config"]).activations

    def read_linear(self, reader: CheckpointReader, module: str) -> Tensor | QTensor:
        rule = read_rules(reader.config["quantization_config"]).of(module)
        if rule is None:
            for part in ("weight_packed", "weight_scale"):
                if reader.has(f"{module}.{part}"):
                    raise CheckpointError(f"{reader.path}: {module} has a {part}, but config.json leaves it dense")
            return read_dense(reader, module)
        if not any(reader.has(f"{module}.{part}") for part in PARTS):
            return read_dense(reader, module)
        if rule.scheme.kind == "int" and _is_float(reader, module):
            return _round(reader, module, rule.scheme)
        if rule.storage == "nvfp4-pack-quantized":
            return read_compressed(reader, module)
        if rule.storage == "pack-quantized":
            return _read_packed(reader, module, rule.scheme)
        return _read_floats(reader, module, rule) if rule.scheme.kind == "float" else _read_bytes(reader, module, rule)

    def can_write(self, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
        size = scheme.group_size
        if scheme.act_order:
            return "activation order, which the format no longer has"
        if scheme.kind == "int" and size != -1 and shape[1] % size:
            return f"{shape[1]} inputs are not a multiple of the group size {size}"
        return None

    def write_linear(
        self, writer: CheckpointWriter, module: str, weight: Tensor | QTensor, *, activations: Activations = "none"
    ) -> None:
        """Add the weight's tensors. `activations` is as in `config_entry`."""
        if not isinstance(weight, QTensor):
            writer.add(module + ".weight", weight)
            return
        (out_features, in_features), scheme = weight.codes.shape, weight.scheme
        if reason := self.can_write((out_features, in_features), scheme):
            raise UnsupportedError(f"{module}: compressed-tensors cannot store it: {reason}")
        storage = storage_of(scheme, activations)
        if storage == "float-quantized":
            writer.add(module + ".weight", weight.codes)
        elif storage == "int-quantized":
            writer.add(module + ".weight", _to_signed(weight.codes, scheme))
        else:
            writer.add(module + ".weight_packed", pack_words(weight.codes, scheme.bits))
            writer.add(module + ".weight_shape", torch.tensor([out_features, in_features]))
        scales = weight.scales.reshape(1) if scheme.rows == -1 else weight.scales
        writer.add(module + ".weight_scale", scales.contiguous())
        if not scheme.symmetric and scheme.kind == "int":
            packed = pack_words(weight.zeros.T.contiguous(), scheme.bits).T.contiguous()
            signed = _to_signed(weight.zeros, scheme)
            writer.add(module + ".weight_zero_point", signed if storage == "int-quantized" else packed)

    def config_entry(
        self, linears: Linears, *, activations: Activations = "none", kv_cache_scheme: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """The entry.

        `activations` are those of 8-bit weights of the same kind; other weights have exact activations.
        """
        return compressed_config.make_entry(linears, activations, kv_cache_scheme)


def _to_signed(codes: Tensor, scheme: QuantScheme) -> Tensor:
    """uint8 -> int8, shifted down by half of the range."""
    return (codes - (1 << (scheme.bits - 1))).view(torch.int8)


def _from_signed(reader: CheckpointReader, name: str, values: Tensor, scheme: QuantScheme) -> Tensor:
    """int8 -> uint8, shifted up by half of the range. Raises CheckpointError for a value beyond the scheme's bits."""
    half = 1 << (scheme.bits - 1)
    if scheme.bits < 8 and bool(((values < -half) | (values >= half)).any()):
        raise CheckpointError(f"{reader.path}: {name} holds values beyond {scheme.bits} bits")
    return values.view(torch.uint8) + half


def _read_packed(reader: CheckpointReader, module: str, scheme: QuantScheme) -> QTensor:
    refuse_beside(reader, module, "packed weights by config.json", ("weight",))
    out_features, in_features = _stated_shape(reader, module)
    words = -(-in_features * scheme.bits // 32)
    packed = read_part(reader, module + ".weight_packed", ("I32",), (out_features, words))
    codes = unpack_words(packed, scheme.bits, in_features)
    scales = _read_scales(reader, module, scheme, (out_features, in_features))
    groups = scheme.num_groups(in_features)
    if scheme.symmetric:
        zeros = torch.full((out_features, groups), 1 << (scheme.bits - 1), dtype=torch.uint8)
    else:
        shape = -(-out_features * scheme.bits // 32), groups
        stored = read_part(reader, module + ".weight_zero_point", ("I32",), shape)
        zeros = unpack_words(stored.T.contiguous(), scheme.bits, out_features).T.contiguous()
    return in_groups(reader, module + ".weight_g_idx", of_kernels(QTensor(codes, scales, zeros, scheme)))


def _stated_shape(reader: CheckpointReader, module: str) -> tuple[int, int]:
    """(out, in) of `weight_shape`. Raises CheckpointError."""
    shape = read_part(reader, module + ".weight_shape", ("I64", "I32"), (2,)).tolist()
    if not all(0 < size < 1 << 31 for size in shape):
        raise CheckpointError(f"{reader.path}: {module}.weight_shape is {shape}, expected two positive sizes")
    return shape[0], shape[1]


def _read_bytes(reader: CheckpointReader, module: str, rule: Rule) -> QTensor:
    scheme, name = rule.scheme, module + ".weight"
    refuse_beside(reader, module, "8-bit weights by config.json", ("weight_packed",))
    shape = _weight_shape(reader, module, ("I8",))
    codes = _from_signed(reader, name, reader.tensor(name), scheme)
    scales = _read_scales(reader, module, scheme, shape)
    groups = shape[0], scheme.num_groups(shape[1])
    if scheme.symmetric:
        zeros = torch.full(groups, 1 << (scheme.bits - 1), dtype=torch.uint8)
    else:
        zero_name = module + ".weight_zero_point"
        zeros = _from_signed(reader, zero_name, read_part(reader, zero_name, ("I8",), groups), scheme)
    return in_groups(reader, module + ".weight_g_idx", of_kernels(QTensor(codes, scales, zeros, scheme)))


def _read_floats(reader: CheckpointReader, module: str, rule: Rule) -> QTensor:
    scheme = rule.scheme
    out_features, in_features = shape = _weight_shape(reader, module, ("F8_E4M3",))
    groups = scheme.num_row_groups(out_features), scheme.num_groups(in_features)
    whole = [(), (1,), (1, 1)] if scheme.rows == -1 else []
    scales = read_scales(reader, module + ".weight_scale", groups, *whole).reshape(groups)
    return QTensor(read_float8(reader, module + ".weight", shape), scales, torch.zeros(0, dtype=torch.uint8), scheme)


def _is_float(reader: CheckpointReader, module: str) -> bool:
    name = module + ".weight"
    return reader.has(name) and reader.info(name).dtype in FLOATS and not reader.has(module + ".weight_packed")


def _round(reader: CheckpointReader, module: str, scheme: QuantScheme) -> QTensor:
    """A weight that is stored as floats, with the scales of its codes ("frozen", not compressed). Engines round it as
    it is used."""
    weight = read_dense(reader, module).float()
    scales = _read_scales(reader, module, scheme, (len(weight), weight.shape[1]))
    zeros = torch.full(scales.shape, 1 << (scheme.bits - 1), dtype=torch.uint8)
    if not scheme.symmetric:
        name = module + ".weight_zero_point"
        zeros = _from_signed(reader, name, read_part(reader, name, ("I8",), tuple(scales.shape)), scheme)
    if weight.shape[1] % scales.shape[1]:
        raise CheckpointError(f"{reader.path}: {module}.weight_scale has {scales.shape[1]} groups: they do not fit")
    grouped = weight.unflatten(1, (scales.shape[1], -1))  # type: ignore[no-untyped-call]
    codes = (grouped / scales.float()[..., None]).round() + zeros[..., None]
    codes = codes.clamp(0, scheme.max_code).to(torch.uint8).flatten(1)
    return in_groups(reader, module + ".weight_g_idx", of_kernels(QTensor(codes, scales, zeros, scheme)))


def _weight_shape(reader: CheckpointReader, module: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
    if not reader.has(module + ".weight"):
        raise CheckpointError(f"{reader.path}: tensor {module}.weight is missing")
    return matrix_shape(reader, module + ".weight", dtypes)


def _read_scales(reader: CheckpointReader, module: str, scheme: QuantScheme, shape: tuple[int, int]) -> Tensor:
    """For integers: scales [out, groups]."""
    out_features, groups = shape[0], scheme.num_groups(shape[1])
    whole = [(), (1,), (1, 1)] if scheme.group_size == -1 else []  # one scale for the tensor
    scales = read_scales(reader, module + ".weight_scale", (out_features, groups), *whole)
    return scales.reshape(-1, groups).expand(out_features, groups).contiguous()
