"""GPTQ, versions 1 and 2: codes of b = 2, 3, 4 or 8 bits, one float16 scale and one zero per group of inputs.

    module.qweight  int32   [in * b / 32, out]      words in sequence, along in
    module.qzeros   int32   [in / group, out * b / 32]      words in sequence, along out
    module.scales   float16 [in / group, out]       w = (code - zero) * scale
    module.g_idx    int32   [in]                    the group of each input

Version 2 (`checkpoint_format` gptq_v2) stores zeros unchanged, version 1 (gptq) stores zero - 1. A version 1 file
cannot hold zero 0: one writer's -1 wraps around to the largest code, another's borrows from the next zero in the word,
and one reader takes the largest code as 2**b. Therefore only symmetric weights are written in version 1, and an
asymmetric file is read only if no zero is stored as the largest code.

Some writers store the zeros of symmetric weights unchanged in version 1, or minus 1 in version 2. With `sym`, a weight
whose stored zeros are all the middle of the codes, or all one less, has its zeros in the middle.

Codes of 2 and 3 bits are read as codes of 4 with the same zeros and scales. The shapes of a module's tensors tell its
bits and its group size, so `dynamic` and `extra_config`, which tell them again for some modules, are not read.
`dynamic` is written: "-:pattern" leaves the modules dense that a pattern matches from the name's beginning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.formats.dense import read_dense
from lmkit.formats.names import Activations
from lmkit.formats.packing import pack_words, unpack_words
from lmkit.formats.parts import (
    FLOATS,
    HEAD,
    Fields,
    by_input,
    field_problem,
    half_scales,
    in_groups,
    matrix_shape,
    of_kernels,
    one_scheme,
    read_part,
    read_scales,
    refuse_beside,
    refuse_extras,
    size_problem,
    stated_or_equal,
)
from lmkit.formats.patterns import names_pattern
from lmkit.qtensor import Linears, QTensor, QuantScheme, int_scheme

BITS = (2, 3, 4, 8)
_FIELDS: Fields = (
    ("bits", "bits", (*BITS, None)),
    ("sym", "sym", (True, False, None)),
    ("data_type", "data_type", ("int", None)),
    ("is_marlin_format", "is_marlin_format", (False, None)),
)
_PER_MODULE = ("dynamic", "extra_config")


@dataclass(frozen=True)
class GptqFormat:
    """`name` is the `checkpoint_format`: gptq or gptq_v2."""

    name: str = "gptq"

    @property
    def zero_offset(self) -> int:
        """The number that is subtracted from a zero before it is stored."""
        return 1 if self.name == "gptq" else 0

    def accepts(self, config: dict[str, Any]) -> str | None:
        entry = config["quantization_config"]
        size = entry.get("group_size")
        return field_problem(entry, _FIELDS) or (None if size is None else size_problem(size))

    def activations(self, config: dict[str, Any]) -> Activations:
        return "none"

    def read_linear(self, reader: CheckpointReader, module: str) -> Tensor | QTensor:
        if not reader.has(module + ".qweight"):
            return read_dense(reader, module)
        refuse_beside(reader, module, "qweight", ("weight",))
        words, out_features = matrix_shape(reader, module + ".qweight", ("I32",))
        entry = reader.config["quantization_config"]
        bits = stored_bits(reader, module)
        in_features, (num_groups, _) = words * 32 // bits, matrix_shape(reader, module + ".scales", FLOATS)
        scheme = int_scheme(bits, stated_or_equal(entry.get("group_size"), in_features, num_groups))
        if reason := _shape_problem((out_features, in_features), scheme):
            raise CheckpointError(f"{reader.path}: {module}: {reason}")
        groups = scheme.num_groups(in_features)
        qzeros = read_part(reader, module + ".qzeros", ("I32",), (groups, out_features * bits // 32))
        scales = read_scales(reader, module + ".scales", (groups, out_features)).T.contiguous()
        codes = unpack_words(reader.tensor(module + ".qweight").T.contiguous(), bits, in_features)
        zeros, symmetric = self._zeros(reader, module, unpack_words(qzeros, bits, out_features), bits)
        weight = QTensor(codes, scales, zeros.T.contiguous(), int_scheme(bits, scheme.group_size, symmetric))
        return in_groups(reader, module + ".g_idx", of_kernels(weight))

    def _zeros(self, reader: CheckpointReader, module: str, stored: Tensor, bits: int) -> tuple[Tensor, bool]:
        """Zeros [groups, out] as stored -> (zeros, whether the weight is symmetric). Raises CheckpointError if they are
        ambiguous."""
        entry, middle, top = reader.config["quantization_config"], 1 << (bits - 1), (1 << bits) - 1
        where, is_symmetric = f"{reader.path}: {module}.qzeros", entry.get("sym") is not False
        if is_symmetric and any(bool((stored == zero).all()) for zero in (middle, middle - 1)):
            return torch.full_like(stored, middle), True
        if self.zero_offset and bool((stored == top).any()):
            raise CheckpointError(
                f"{where} holds {top}, which stands for a zero of {top + 1}, or of 0 in this version 1 of the format; "
                "a file of version 2 says which"
            )
        zeros = stored + self.zero_offset
        if entry.get("sym") and not any(entry.get(name) for name in _PER_MODULE):
            raise CheckpointError(f"{where} are not all {middle}, but `sym` is true")
        return zeros, False

    def can_write(self, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
        if not scheme.codes.uniform:
            return f"{scheme.codes.words}, GPTQ has integers"
        if self.zero_offset and not scheme.symmetric:
            return "asymmetric weights: version 1 of GPTQ cannot hold a zero of 0; use gptq_v2"
        return _shape_problem(shape, scheme)

    def write_linear(
        self, writer: CheckpointWriter, module: str, weight: Tensor | QTensor, *, activations: Activations = "none"
    ) -> None:
        if not isinstance(weight, QTensor):
            writer.add(module + ".weight", weight)
            return
        (out_features, in_features), scheme = weight.codes.shape, weight.scheme
        if reason := self.can_write((out_features, in_features), scheme):
            raise UnsupportedError(f"{module}: {self.name} cannot store it: {reason}")
        scales = half_scales(weight.scales, module, self.name)
        codes, groups = by_input(weight)
        zeros = (weight.zeros - self.zero_offset).T.contiguous()
        writer.add(module + ".qweight", pack_words(codes, scheme.bits).T.contiguous())
        writer.add(module + ".qzeros", pack_words(zeros, scheme.bits))
        writer.add(module + ".scales", scales.T.contiguous())
        writer.add(module + ".g_idx", groups)

    def config_entry(
        self, linears: Linears, *, activations: Activations = "none", kv_cache_scheme: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        refuse_extras(self.name, activations, kv_cache_scheme)
        scheme = one_scheme(linears, self.name)
        dense = [module for module, scheme in linears.items() if scheme is None]
        return {
            "quant_method": "gptq",
            "bits": scheme.bits,
            "group_size": scheme.group_size,
            "desc_act": scheme.act_order,
            "sym": scheme.symmetric,
            "checkpoint_format": self.name,
            "pack_dtype": "int32",
            "lm_head": linears.get(HEAD) is not None,
            "dynamic": {f"-:{pattern}": {} for pattern in names_pattern(dense)},
        }


def _shape_problem(shape: tuple[int, int], scheme: QuantScheme) -> str | None:
    """The reason why a weight [out, in] does not fill whole words and groups; None if it does."""
    (out_features, in_features), whole = shape, 32 // math.gcd(32, scheme.bits)  # codes that fill words
    if out_features % whole:
        return f"{out_features} outputs are not a multiple of {whole}"
    if in_features % whole:
        return f"{in_features} inputs are not a multiple of {whole}"
    if scheme.group_size != -1 and in_features % scheme.group_size:
        return f"{in_features} inputs are not a multiple of the group size {scheme.group_size}"
    return None


def stored_bits(reader: CheckpointReader, module: str) -> int:
    """The bits of a module's codes, by the shapes of its tensors."""
    entry = reader.config["quantization_config"]
    _, words = matrix_shape(reader, module + ".qzeros", ("I32",))
    _, out_features = matrix_shape(reader, module + ".scales", FLOATS)
    found = next((bits for bits in BITS if out_features * bits == 32 * words), None)
    return found or int(entry.get("bits") or 4)
