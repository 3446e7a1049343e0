"""A second reader of written checkpoints, which shares no code with the writer.

It decodes each format again from its description, with numpy and the safetensors library. A mistake in packing, in the
order of words or in a zero's offset would have to be made twice to stay unseen.

Take the `weight_digest` of every weight when it is written, then call `verify(folder, digests)`. No weight has to stay
in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from lmkit.errors import CheckpointError
from lmkit.qtensor import QTensor, dequantize, plain

Array = NDArray[Any]
CHUNK_ROWS = 1024  # outputs converted to float32 at a time
AWQ_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of output 8c + i in word c
MARKS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")  # a module with one of these is quantized


def weight_digest(weight: Tensor | QTensor) -> str:
    """A digest of a weight's float32 values [out, in] and of its shape."""
    digest = _digest((weight.codes if isinstance(weight, QTensor) else weight).shape)
    parts = _row_chunks(plain(weight)) if isinstance(weight, QTensor) else weight.split(CHUNK_ROWS)
    for part in parts:
        values = dequantize(part) if isinstance(part, QTensor) else part.float()
        _update(digest, values.numpy())
    return str(digest.hexdigest())


def verify(folder: Path, digests: Mapping[str, str]) -> None:
    """Read every quantized linear of a checkpoint again. `digests`: each weight's digest by its module.

    Raises CheckpointError that names the first weight that is missing, unexpected, or different.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    places = {name: path for path in sorted(folder.glob("*.safetensors")) for name in _names(path)}
    found = {name.rpartition(".")[0] for name in places if name.rpartition(".")[2] in MARKS}
    if differing := sorted(found ^ digests.keys()):
        state = "is quantized" if differing[0] in found else "is not quantized"
        raise CheckpointError(f"{folder}: {differing[0]} {state}, against what was to be written")
    reader = _Reader(places, config.get("quantization_config", {}))
    for module, expected in digests.items():
        if reader.digest(module) != expected:
            raise CheckpointError(f"{folder}: {module} reads back as another weight than was to be written")


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


@dataclass(frozen=True)
class _Coded:
    """w[n, k] = (codes[n, k] - zeros[n, groups[k]]) * scales[n // rows, groups[k]]"""

    codes: Array  # float32 or integers [out, in]
    zeros: Array | None  # [out, groups]
    scales: Array  # float32 [row groups, groups]
    rows: int
    groups: Array  # integers [in], the group of each input


class _Reader:
    def __init__(self, places: dict[str, Path], entry: dict[str, Any]) -> None:
        self.places, self.entry = places, entry

    def digest(self, module: str) -> str:
        coded = self._coded(module)
        out_features = len(coded.codes)
        digest = _digest(coded.codes.shape)
        for start in range(0, out_features, CHUNK_ROWS):
            row = np.arange(start, min(start + CHUNK_ROWS, out_features))
            values = coded.codes[row].astype(np.float32)
            if coded.zeros is not None:
                values -= coded.zeros[row].astype(np.float32)[:, coded.groups]
            values *= coded.scales[row // coded.rows][:, coded.groups]
            _update(digest, values)
        return str(digest.hexdigest())

    def _coded(self, module: str) -> _Coded:
        if f"{module}.qweight" in self.places:
            return self._awq(module) if self.entry["quant_method"] == "awq" else self._gptq(module)
        if f"{module}.weight_packed" in self.places:
            return self._packed(module) if f"{module}.weight_shape" in self.places else self._float4(module)
        return self._unpacked(module)

    def _awq(self, module: str) -> _Coded:
        codes, zeros = (self._interleaved(f"{module}.{name}") for name in ("qweight", "qzeros"))
        return _Coded(codes.T, zeros.T, self._scales(f"{module}.scales").T, 1, _groups(len(codes), len(zeros)))

    def _interleaved(self, name: str) -> Array:
        words = self._array(name).view(np.uint32)
        nibbles = np.stack([words >> np.uint32(4 * i) & 15 for i in AWQ_NIBBLE], axis=-1)
        return nibbles.reshape(len(words), -1).astype(np.uint8)

    def _gptq(self, module: str) -> _Coded:
        bits = int(self.entry["bits"])
        offset = 0 if self.entry["checkpoint_format"] == "gptq_v2" else 1
        codes = _unpack(self._array(f"{module}.qweight").T, bits)
        zeros = _unpack(self._array(f"{module}.qzeros"), bits) + offset
        return _Coded(codes, zeros.T, self._scales(f"{module}.scales").T, 1, self._array(f"{module}.g_idx"))

    def _packed(self, module: str) -> _Coded:
        out_features, in_features = self._array(f"{module}.weight_shape").tolist()
        words, scales = self._array(f"{module}.weight_packed"), self._scales(f"{module}.weight_scale")
        if len(words) != out_features:
            raise CheckpointError(f"{module}.weight_shape has {out_features} outputs, weight_packed {len(words)}")
        bits = next(bits for bits in (4, 8, 3, 2) if words.shape[1] == -(-in_features * bits // 32))
        zeros = np.full(scales.shape, 1 << (bits - 1))
        if f"{module}.weight_zero_point" in self.places:
            zeros = _unpack(self._array(f"{module}.weight_zero_point").T, bits)[:, :out_features].T
        codes = _unpack(words, bits)[:, :in_features]
        return _Coded(codes, zeros, scales, 1, _groups(in_features, scales.shape[1]))

    def _float4(self, module: str) -> _Coded:
        packed, stored = self._array(f"{module}.weight_packed"), self._tensor(f"{module}.weight_scale")
        nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
        if stored.dtype == torch.uint8:
            scales = np.ldexp(np.float32(1), stored.numpy().astype(np.int32) - 127)
        else:
            scales = _E4M3[stored.view(torch.uint8).numpy()] / self._scales(f"{module}.weight_global_scale")
        return _Coded(_E2M1[nibbles], None, scales, 1, _groups(nibbles.shape[1], scales.shape[1]))

    def _unpacked(self, module: str) -> _Coded:
        stored = self._tensor(f"{module}.weight")
        if stored.dtype == torch.float8_e4m3fn:
            return self._float8(module, _E4M3[stored.view(torch.uint8).numpy()])
        codes, scales, zeros = stored.numpy(), self._scales(f"{module}.weight_scale"), None
        if f"{module}.weight_zero_point" in self.places:
            zeros = self._array(f"{module}.weight_zero_point")
        return _Coded(codes, zeros, scales, 1, _groups(codes.shape[1], scales.shape[1]))

    def _float8(self, module: str, codes: Array) -> _Coded:
        name = "weight_scale_inv" if f"{module}.weight_scale_inv" in self.places else "weight_scale"
        scales = self._scales(f"{module}.{name}")
        scales = scales.reshape(1, 1) if scales.ndim < 2 else scales
        (out_features, in_features), (row_groups, groups) = codes.shape, scales.shape
        rows, columns = out_features // row_groups, in_features
        if groups > 1 or row_groups not in (1, out_features):
            rows, columns = self._block()
        return _Coded(codes, None, scales, rows, np.arange(in_features) // columns)

    def _block(self) -> tuple[int, int]:
        """(outputs, inputs) that share a scale."""
        size = self.entry.get("weight_block_size")
        if size is None:
            every = (group["weights"].get("block_structure") for group in self.entry["config_groups"].values())
            size = next(block for block in every if block is not None)
        return int(size[0]), int(size[1])

    def _tensor(self, name: str) -> Tensor:
        with safe_open(self.places[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def _array(self, name: str) -> Array:
        return self._tensor(name).numpy()

    def _scales(self, name: str) -> Array:
        """The scales. numpy has no bfloat16, so they are widened to float32, which is exact."""
        return self._tensor(name).float().numpy()


def _groups(in_features: int, count: int) -> Array:
    """The group of each input, for `count` groups of neighbours."""
    return np.arange(in_features) // (in_features // count)


def _unpack(words: Array, bits: int) -> Array:
    """int32 [rows, words] -> integers [rows, words * 32 / bits]: value i of a row at its bit i * bits."""
    if bits == 3:  # a value may lie in two words
        stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
        whole = stream[:, : stream.shape[1] // 3 * 3].reshape(len(words), -1, 3)
        return (whole @ np.array([1, 2, 4], np.uint8)).astype(np.int16)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    values = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return values.reshape(len(words), -1).astype(np.int16)


def _e4m3_values() -> Array:
    """The value of each byte: a sign, 4 bits of exponent with bias 7, 3 of mantissa. 0x7f and 0xff are NaN."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[[0x7F, 0xFF]] = np.nan
    return np.where(byte & 128, -magnitude, magnitude).astype(np.float32)


_E4M3 = _e4m3_values()
_E2M1 = np.array([sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)


def _row_chunks(q: QTensor) -> list[QTensor]:
    """Pieces of CHUNK_ROWS outputs of a weight with scales for each output."""
    pieces = zip(*(part.split(CHUNK_ROWS) for part in (q.codes, q.scales)), strict=True)
    zeros = q.zeros.split(CHUNK_ROWS) if len(q.zeros) else [q.zeros] * -(-len(q.codes) // CHUNK_ROWS)
    return [
        replace(q, codes=codes, scales=scales, zeros=zero) for (codes, scales), zero in zip(pieces, zeros, strict=True)
    ]


def _digest(shape: tuple[int, ...] | torch.Size) -> Any:
    return hashlib.sha256(repr(tuple(shape)).encode())


def _update(digest: Any, values: Array) -> None:
    digest.update(np.ascontiguousarray(values + np.float32(0)).data)  # -0 is 0
