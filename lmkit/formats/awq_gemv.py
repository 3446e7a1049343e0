"""AWQ, versions "gemv" and "gemv_fast", read only: AutoAWQ's layouts for its kernels of single tokens.

    gemv        qweight  int32   [out, in / 8]          words in sequence, along in
                qzeros   int32   [out, columns / 8]     words in sequence, along the groups
                scales   float16 [out, columns]
    gemv_fast   qweight  int16   [out / 4, in]          codes of 4 outputs in turns of 64 inputs, see `_in_order`
                qzeros   float16 [columns, out]         -zero * scale; also named scaled_zeros
                scales   float16 [columns, out]

w = (code - zero) * scale. A column is a group of inputs; columns after the last group are padding. Version "llm-awq"
is gemv_fast under another name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmkit.errors import CheckpointError
from lmkit.formats.awq import entry_problem, group_size, read_if_dense
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.packing import unpack_words
from lmkit.formats.parts import matrix_shape, read_part, read_scales
from lmkit.formats.read_only import ReadOnlyFormat
from lmkit.qtensor import QTensor, QuantScheme, int_scheme

TURN = 64  # inputs of an output before the next output's


@dataclass(frozen=True)
class AwqGemvFormat(ReadOnlyFormat):
    """`name` is awq_gemv or awq_gemv_fast."""

    name: str

    def accepts(self, config: dict[str, Any]) -> str | None:
        return entry_problem(config["quantization_config"])

    def read_linear(self, reader: CheckpointReader, module: str) -> Tensor | QTensor:
        if (weight := read_if_dense(reader, module)) is not None:
            return weight
        return _read(reader, module) if self.name == "awq_gemv" else _read_fast(reader, module)


def _read(reader: CheckpointReader, module: str) -> QTensor:
    out_features, words = matrix_shape(reader, module + ".qweight", ("I32",))
    scheme, groups, columns = _columns(reader, module, 8 * words)
    qzeros = read_part(reader, module + ".qzeros", ("I32",), (out_features, columns // 8))
    scales = read_scales(reader, module + ".scales", (out_features, columns))
    codes = unpack_words(reader.tensor(module + ".qweight"), 4, 8 * words)
    return QTensor(codes, scales[:, :groups].contiguous(), unpack_words(qzeros, 4, groups), scheme)


def _read_fast(reader: CheckpointReader, module: str) -> QTensor:
    quarter, in_features = matrix_shape(reader, module + ".qweight", ("I16",))
    if in_features % TURN:
        raise CheckpointError(f"{reader.path}: {module}: {in_features} inputs are not a multiple of {TURN}")
    scheme, groups, columns = _columns(reader, module, in_features)
    name = next((name for part in ("scaled_zeros", "qzeros") if reader.has(name := f"{module}.{part}")), "")
    scales, offsets = (
        read_scales(reader, part, (columns, 4 * quarter))[:groups].T.contiguous()
        for part in (module + ".scales", name or module + ".qzeros")
    )
    zeros = (-offsets.float() / scales.float()).nan_to_num().round()
    fits = bool(((zeros >= 0) & (zeros <= scheme.max_code)).all())
    if not fits or not torch.equal((zeros * scales.float()).to(offsets.dtype), -offsets):
        raise CheckpointError(f"{reader.path}: {name} are not zeros from 0 to 15 times the scales")
    codes = _in_order(reader.tensor(module + ".qweight"))
    return QTensor(codes, scales, zeros.to(torch.uint8), scheme)


def _columns(reader: CheckpointReader, module: str, in_features: int) -> tuple[QuantScheme, int, int]:
    """(scheme, groups, columns with the padding) of a linear."""
    scheme = int_scheme(4, group_size(reader.config["quantization_config"]) or 128)
    groups, size = scheme.num_groups(in_features), in_features if scheme.group_size == -1 else scheme.group_size
    if in_features % size:
        raise CheckpointError(f"{reader.path}: {module}: {in_features} inputs are not a multiple of {size}, a group")
    whole = 8 * max(1, 128 // size)  # the kernel reads scales of 1024 inputs at a time
    return scheme, groups, -(-groups // whole) * whole


def _in_order(words: Tensor) -> Tensor:
    """int16 [out / 4, in] -> codes uint8 [out, in].

    A row of words holds, in sequence, 64 codes of the first output, 64 of the second, of the third and of the fourth,
    then the next 64 of each. Of 32 codes, nibble 8 a + 4 c + j is that of input 8 j + 2 a + c.
    """
    quarter, in_features = words.shape
    nibbles = unpack_words(words.contiguous().view(torch.int32), 4, 4 * in_features)
    rows = nibbles.view(quarter, -1, 4, TURN).transpose(1, 2)
    return rows.reshape(4 * quarter, -1, 4, 2, 4).permute(0, 1, 4, 2, 3).reshape(4 * quarter, in_features)
