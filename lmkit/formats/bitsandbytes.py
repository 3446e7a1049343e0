"""bitsandbytes as transformers writes it, read only: 4 bits by a table (nf4, fp4), or 8 bits (LLM.int8).

4 bits:  module.weight             uint8 [out * in / 2, 1]: the first of two weights in the high nibble
         module.weight.quant_map   float32 [16]: the values of the codes
         module.weight.absmax      float32 [blocks]: a factor for each block of the flat weight, or codes uint8 with
         module.weight.nested_quant_map [256] and nested_absmax [nested blocks] of their own, and an offset
         module.weight.quant_state.bitsandbytes__nf4   JSON: blocksize, shape, dtype, nested_blocksize, nested_offset
8 bits:  module.weight             int8 [out, in]
         module.SCB                float32 [out]: the largest magnitude of a row; w = code * SCB / 127

4-bit values lie on no uniform grid, so these weights become dense, of the dtype that the file names. 8-bit ones keep
their codes.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from lmkit.errors import JSON_ERRORS, CheckpointError
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.dense import read_dense
from lmkit.formats.parts import (
    Fields,
    field_problem,
    matrix_shape,
    read_part,
    read_scales,
)
from lmkit.formats.read_only import ReadOnlyFormat
from lmkit.qtensor import QTensor, int_scheme

BYTES = int_scheme(8, -1, symmetric=True)
STATE = ".weight.quant_state.bitsandbytes__"
MAX_STATE_BYTES = 1 << 16

_FIELDS: Fields = (
    ("bnb_4bit_quant_type", "bnb_4bit_quant_type", ("nf4", "fp4", None)),
    ("bnb_4bit_quant_storage", "bnb_4bit_quant_storage", ("uint8", None)),
    ("llm_int8_has_fp16_weight", "llm_int8_has_fp16_weight", (False, None)),
)


class State(msgspec.Struct, frozen=True):
    """How a 4-bit weight was quantized."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: int
    shape: tuple[int, int]
    dtype: Literal["bfloat16", "float16", "float32"]
    nested_blocksize: int = 0
    nested_dtype: Literal["float32"] = "float32"
    nested_offset: float = 0.0


class BitsAndBytesFormat(ReadOnlyFormat):
    name = "bitsandbytes"

    def accepts(self, config: dict[str, Any]) -> str | None:
        return field_problem(config["quantization_config"], _FIELDS)

    def read_linear(self, reader: CheckpointReader, module: str) -> Tensor | QTensor:
        if reader.has(module + ".SCB"):
            return _read_bytes(reader, module)
        kind = next((kind for kind in ("nf4", "fp4") if reader.has(module + STATE + kind)), None)
        return read_dense(reader, module) if kind is None else _read_table(reader, module, kind)


def _read_bytes(reader: CheckpointReader, module: str) -> QTensor:
    shape = matrix_shape(reader, module + ".weight", ("I8",))
    name = module + ".weight_format"
    if reader.has(name) and int(read_part(reader, name, ("U8",), (), (1,)).reshape(())) != 0:
        raise CheckpointError(f"{reader.path}: {name} is not 0: only weights in rows are read")
    largest = read_scales(reader, module + ".SCB", (shape[0],), dtypes=("F32",))
    codes = reader.tensor(module + ".weight").view(torch.uint8) + 128
    return QTensor(codes, (largest / 127).unsqueeze(1), torch.full((shape[0], 1), 128, dtype=torch.uint8), BYTES)


def _read_table(reader: CheckpointReader, module: str, kind: str) -> Tensor:
    """A 4-bit weight [out, in] of the dtype that the file names. Raises CheckpointError."""
    state, weight = _state(reader, module + STATE + kind), module + ".weight"
    count = math.prod(state.shape)
    packed = read_part(reader, weight, ("U8",), (count // 2, 1)).flatten()
    table = read_scales(reader, weight + ".quant_map", (16,), dtypes=("F32",))
    factors = _factors(reader, weight, state, -(-count // state.blocksize))
    codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten()
    values = table[codes.int()]
    for start in range(0, count, piece := state.blocksize << 12):  # repeated factors of all would take twice the room
        part = values[start : start + piece]
        of_part = factors[start // state.blocksize :][: -(-len(part) // state.blocksize)]
        part.mul_(of_part.repeat_interleave(state.blocksize)[: len(part)])
    return values.view(state.shape).to(getattr(torch, state.dtype))


def _state(reader: CheckpointReader, name: str) -> State:
    info = reader.info(name)
    if info.dtype != "U8" or len(info.shape) != 1 or info.nbytes > MAX_STATE_BYTES:
        raise CheckpointError(f"{reader.path}: {name} is {info.dtype} {[*info.shape]}, expected bytes of JSON")
    try:
        state = msgspec.json.decode(bytes(reader.tensor(name).tolist()), type=State)
    except JSON_ERRORS as error:
        raise CheckpointError(f"{reader.path}: {name}: {error}") from None
    if min(state.blocksize, *state.shape) < 1 or math.prod(state.shape) % 2:
        raise CheckpointError(f"{reader.path}: {name}: blocks of {state.blocksize} of a weight {[*state.shape]}")
    return state


def _factors(reader: CheckpointReader, weight: str, state: State, blocks: int) -> Tensor:
    """The factor of each block, float32 [blocks]."""
    name = weight + ".absmax"
    if not reader.has(weight + ".nested_absmax"):
        return read_scales(reader, name, (blocks,), dtypes=("F32",))
    if state.nested_blocksize < 1:
        raise CheckpointError(f"{reader.path}: {weight}: nested_blocksize is {state.nested_blocksize}")
    codes = read_part(reader, name, ("U8",), (blocks,))
    table = read_scales(reader, weight + ".nested_quant_map", (256,), dtypes=("F32",))
    nested = -(-blocks // state.nested_blocksize)
    largest = read_scales(reader, weight + ".nested_absmax", (nested,), dtypes=("F32",))
    return table[codes.int()] * largest.repeat_interleave(state.nested_blocksize)[:blocks] + state.nested_offset
