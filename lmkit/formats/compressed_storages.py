"""The packings of compressed-tensors: how a weight [out, in] of b bits lies in tensors.

pack-quantized   module.weight_packed      int32 [out, ceil(in * b / 32)]    words in sequence, along in
                 module.weight_zero_point  int32 [ceil(out * b / 32), groups]    words in sequence, along out;
                                           of asymmetric weights only
                 module.weight_shape       int64 [2] = (out, in)
                 module.weight_g_idx       int32 [in]: the group of each input, in files of older versions
int-quantized    module.weight             int8  [out, in]           code - 2**(b - 1)
                 module.weight_zero_point  int8  [out, groups]       zero - 2**(b - 1); of asymmetric weights only
float-quantized  module.weight             float8 e4m3 [out, in]
nvfp4-pack-quantized   see nvfp4.py
mxfp4-pack-quantized   see mxfp4.py
all              module.weight_scale       any float: [out, groups], [1] for a whole tensor, or one for each block


A packing is a value: which schemes it holds, and how it reads and writes them. A new one is a class here and an entry
of STORAGES.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from lmkit.codes import FLOAT8
from lmkit.errors import CheckpointError
from lmkit.formats import mxfp4, nvfp4
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.formats.dense import read_dense
from lmkit.formats.names import Activations
from lmkit.formats.packing import pack_words, unpack_words
from lmkit.formats.parts import (
    in_groups,
    matrix_shape,
    of_kernels,
    read_float8,
    read_part,
    read_scales,
    refuse_beside,
)
from lmkit.qtensor import QTensor, QuantScheme

Read = Callable[[CheckpointReader, str], QTensor]
Write = Callable[[CheckpointWriter, str, QTensor], None]


class Storage(Protocol):
    """A packing. `name` is its `format` in config.json, `others` are names that other writers have for it."""

    others: ClassVar[tuple[str, ...]]

    @property
    def name(self) -> str: ...

    def holds(self, scheme: QuantScheme) -> bool:
        """Whether weights of this scheme can be read."""

    def writes(self, scheme: QuantScheme, activations: Activations) -> bool:
        """Whether weights of this scheme are written so. `activations` is as in `config_entry`."""

    def read(self, reader: CheckpointReader, module: str, scheme: QuantScheme) -> QTensor:
        """The weight [out, in]. Raises CheckpointError."""

    def write(self, writer: CheckpointWriter, module: str, weight: QTensor) -> None:
        """Add the weight's tensors."""


class PackQuantized:
    name: ClassVar[str] = "pack-quantized"
    others: ClassVar[tuple[str, ...]] = ()

    def holds(self, scheme: QuantScheme) -> bool:
        return scheme.codes.uniform

    def writes(self, scheme: QuantScheme, activations: Activations) -> bool:
        return scheme.codes.uniform

    def read(self, reader: CheckpointReader, module: str, scheme: QuantScheme) -> QTensor:
        refuse_beside(reader, module, "packed weights by config.json", ("weight",))
        out_features, in_features = _stated_shape(reader, module)
        words = -(-in_features * scheme.bits // 32)
        packed = read_part(reader, module + ".weight_packed", ("I32",), (out_features, words))
        codes = unpack_words(packed, scheme.bits, in_features)
        scales = _read_scales(reader, module, scheme, (out_features, in_features))
        groups = scheme.num_groups(in_features)
        if scheme.symmetric:
            zeros = scheme.codes.zeros((out_features, groups))
        else:
            shape = -(-out_features * scheme.bits // 32), groups
            stored = read_part(reader, module + ".weight_zero_point", ("I32",), shape)
            zeros = unpack_words(stored.T.contiguous(), scheme.bits, out_features).T.contiguous()
        return in_groups(reader, module + ".weight_g_idx", of_kernels(QTensor(codes, scales, zeros, scheme)))

    def write(self, writer: CheckpointWriter, module: str, weight: QTensor) -> None:
        bits = weight.scheme.bits
        writer.add(module + ".weight_packed", pack_words(weight.codes, bits))
        writer.add(module + ".weight_shape", torch.tensor([*weight.codes.shape]))
        writer.add(module + ".weight_scale", weight.scales.contiguous())
        if not weight.scheme.symmetric:
            zeros = pack_words(weight.zeros.T.contiguous(), bits).T.contiguous()
            writer.add(module + ".weight_zero_point", zeros)


class IntQuantized:
    name: ClassVar[str] = "int-quantized"
    others: ClassVar[tuple[str, ...]] = ("naive-quantized",)

    def holds(self, scheme: QuantScheme) -> bool:
        return scheme.codes.uniform

    def writes(self, scheme: QuantScheme, activations: Activations) -> bool:
        """8-bit integers with exact activations are packed, like 4-bit ones."""
        return scheme.codes.uniform and scheme.bits == 8 and activations == "int8"

    def read(self, reader: CheckpointReader, module: str, scheme: QuantScheme) -> QTensor:
        name = module + ".weight"
        refuse_beside(reader, module, "8-bit weights by config.json", ("weight_packed",))
        shape = _weight_shape(reader, module, ("I8",))
        codes = _from_signed(reader, name, reader.tensor(name), scheme)
        scales = _read_scales(reader, module, scheme, shape)
        groups = shape[0], scheme.num_groups(shape[1])
        if scheme.symmetric:
            zeros = scheme.codes.zeros(groups)
        else:
            zero_name = module + ".weight_zero_point"
            zeros = _from_signed(reader, zero_name, read_part(reader, zero_name, ("I8",), groups), scheme)
        return in_groups(reader, module + ".weight_g_idx", of_kernels(QTensor(codes, scales, zeros, scheme)))

    def write(self, writer: CheckpointWriter, module: str, weight: QTensor) -> None:
        writer.add(module + ".weight", _to_signed(weight.codes, weight.scheme))
        writer.add(module + ".weight_scale", weight.scales.contiguous())
        if not weight.scheme.symmetric:
            writer.add(module + ".weight_zero_point", _to_signed(weight.zeros, weight.scheme))


class FloatQuantized:
    name: ClassVar[str] = "float-quantized"
    others: ClassVar[tuple[str, ...]] = ("naive-quantized",)

    def holds(self, scheme: QuantScheme) -> bool:
        return scheme.codes == FLOAT8

    def writes(self, scheme: QuantScheme, activations: Activations) -> bool:
        return self.holds(scheme)

    def read(self, reader: CheckpointReader, module: str, scheme: QuantScheme) -> QTensor:
        out_features, in_features = shape = _weight_shape(reader, module, ("F8_E4M3",))
        groups = scheme.num_row_groups(out_features), scheme.num_groups(in_features)
        whole = [(), (1,), (1, 1)] if scheme.rows == -1 else []
        scales = read_scales(reader, module + ".weight_scale", groups, *whole).reshape(groups)
        return QTensor(read_float8(reader, module + ".weight", shape), scales, FLOAT8.zeros(groups), scheme)

    def write(self, writer: CheckpointWriter, module: str, weight: QTensor) -> None:
        scales = weight.scales.reshape(1) if weight.scheme.rows == -1 else weight.scales
        writer.add(module + ".weight", weight.codes)
        writer.add(module + ".weight_scale", scales.contiguous())


class Float4Packed:
    others: ClassVar[tuple[str, ...]] = ()

    def __init__(self, name: str, scheme: QuantScheme, read: Read, write: Write) -> None:
        self.name, self._scheme, self._read, self._write = name, scheme, read, write

    def holds(self, scheme: QuantScheme) -> bool:
        return scheme == self._scheme

    def writes(self, scheme: QuantScheme, activations: Activations) -> bool:
        return self.holds(scheme)

    def read(self, reader: CheckpointReader, module: str, scheme: QuantScheme) -> QTensor:
        return self._read(reader, module)

    def write(self, writer: CheckpointWriter, module: str, weight: QTensor) -> None:
        self._write(writer, module, weight)


# Of several that hold a scheme, the first one is written.
STORAGES: tuple[Storage, ...] = (
    IntQuantized(),
    PackQuantized(),
    FloatQuantized(),
    Float4Packed("nvfp4-pack-quantized", nvfp4.NVFP4, nvfp4.read_compressed, nvfp4.write_compressed),
    Float4Packed("mxfp4-pack-quantized", mxfp4.MXFP4, mxfp4.read_compressed, mxfp4.write_compressed),
)


def read_rounded(reader: CheckpointReader, module: str, scheme: QuantScheme) -> QTensor:
    """A weight that is stored as floats, with the scales of its codes ("frozen", not compressed). Engines round it as
    it is used."""
    weight = read_dense(reader, module).float()
    scales = _read_scales(reader, module, scheme, (len(weight), weight.shape[1]))
    zeros = scheme.codes.zeros(tuple(scales.shape))
    if not scheme.symmetric:
        name = module + ".weight_zero_point"
        zeros = _from_signed(reader, name, read_part(reader, name, ("I8",), tuple(scales.shape)), scheme)
    if weight.shape[1] % scales.shape[1]:
        raise CheckpointError(f"{reader.path}: {module}.weight_scale has {scales.shape[1]} groups: they do not fit")
    grouped = weight.unflatten(1, (scales.shape[1], -1))  # type: ignore[no-untyped-call]
    codes = (grouped / scales.float()[..., None]).round() + zeros[..., None]
    codes = codes.clamp(0, scheme.max_code).to(torch.uint8).flatten(1)
    return in_groups(reader, module + ".weight_g_idx", of_kernels(QTensor(codes, scales, zeros, scheme)))


def _to_signed(codes: Tensor, scheme: QuantScheme) -> Tensor:
    """uint8 -> int8, shifted down by half of the range."""
    return (codes - (1 << (scheme.bits - 1))).view(torch.int8)


def _from_signed(reader: CheckpointReader, name: str, values: Tensor, scheme: QuantScheme) -> Tensor:
    """int8 -> uint8, shifted up by half of the range. Raises CheckpointError for a value beyond the scheme's bits."""
    half = 1 << (scheme.bits - 1)
    if scheme.bits < 8 and bool(((values < -half) | (values >= half)).any()):
        raise CheckpointError(f"{reader.path}: {name} holds values beyond {scheme.bits} bits")
    return values.view(torch.uint8) + half


def _stated_shape(reader: CheckpointReader, module: str) -> tuple[int, int]:
    """(out, in) of `weight_shape`. Raises CheckpointError."""
    shape = read_part(reader, module + ".weight_shape", ("I64", "I32"), (2,)).tolist()
    if not all(0 < size < 1 << 31 for size in shape):
        raise CheckpointError(f"{reader.path}: {module}.weight_shape is {shape}, expected two positive sizes")
    return shape[0], shape[1]


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
