"""A writer of AWQ's layouts "gemv" and "gemv_fast", made from their description: code by code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from lmkit.formats.base import get_format
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.qtensor import QTensor
from tests.formats.files import folder


def tensors(weight: QTensor, version: str) -> dict[str, torch.Tensor]:
    codes, (outputs, inputs) = weight.codes.numpy().astype(np.int64), weight.codes.shape
    groups = weight.scales.shape[1]
    unit = 8 * max(1, 128 // (inputs // groups))
    padding = -groups % unit
    scales = torch.nn.functional.pad(weight.scales, (0, padding))
    zeros = torch.nn.functional.pad(weight.zeros, (0, padding))
    if version == "gemv":
        return {"qweight": words(codes), "qzeros": words(zeros.numpy().astype(np.int64)), "scales": scales}
    packed = np.zeros((outputs // 4, inputs), np.int64)
    for n in range(outputs):
        for k in range(inputs):
            turn, half, (j, a, c) = k // 64, k % 64 // 32, (k % 32 // 8, k % 8 // 2, k % 2)
            place = (turn * 4 + n % 4) * 64 + half * 32 + 8 * a + 4 * c + j
            packed[n // 4, place // 4] |= codes[n, k] << 4 * (place % 4)
    offsets = -(scales.float() * zeros).half()
    qweight = torch.from_numpy(packed.astype(np.uint16).view(np.int16))
    return {"qweight": qweight, "qzeros": offsets.T.contiguous(), "scales": scales.T.contiguous()}


def words(codes: np.ndarray) -> torch.Tensor:
    """int32 words of 8 codes in sequence."""
    shifted = codes.reshape(len(codes), -1, 8) << (4 * np.arange(8))
    return torch.from_numpy(shifted.sum(-1).astype(np.uint32).view(np.int32))


def repacked(awq: Path, path: Path, version: str) -> Path:
    """A checkpoint in version "gemm" of AWQ, in another version."""
    with CheckpointReader(awq) as reader:
        modules = [name.removesuffix(".qweight") for name in reader.names() if name.endswith(".qweight")]
        parts = {f"{module}.{part}" for module in modules for part in ("qweight", "qzeros", "scales")}
        content = {name: reader.tensor(name).clone() for name in reader.names() if name not in parts}
        for module in modules:
            weight = get_format("awq").read_linear(reader, module)
            assert isinstance(weight, QTensor)
            content |= {f"{module}.{part}": tensor for part, tensor in tensors(weight, version).items()}
    config = json.loads((awq / "config.json").read_text())
    config["quantization_config"]["version"] = version
    return folder(path, content, config)
