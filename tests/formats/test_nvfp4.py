"""NVFP4 in both of its forms, against a decoder that looks up one weight at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.base import resolve_format
from lmkit.formats.convert import convert
from lmkit.kernels import ops
from lmkit.models.source import placed
from lmkit.qtensor import QTensor, dequantize
from tests.formats.files import folder
from tests.formats.linears import read_any

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
           "dynamic": False, "scale_dtype": "torch.float8_e4m3fn"}  # fmt: skip
INPUTS = WEIGHTS | {"dynamic": "local"}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS,
                                  "format": "nvfp4-pack-quantized"}},
}  # fmt: skip
MODELOPT: dict[str, Any] = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"],
    "producer": {"name": "modelopt", "version": "0.37"},
}  # fmt: skip
FACTOR = torch.tensor([3.7])


def coded(inputs: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes [8, in / 2] with every value, scales float8 [8, in / 16])"""
    generator = torch.Generator().manual_seed(1)
    packed = torch.randint(0, 256, (8, inputs // 2), dtype=torch.uint8, generator=generator)
    return packed, (torch.rand(8, inputs // 16, generator=generator) * 400 + 0.01).to(torch.float8_e4m3fn)


def decoded(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Weights [8, in], from the factor of each group float32 [8, in / 16]."""
    rows = []
    for row, factors in zip(packed.tolist(), scales, strict=True):
        nibbles = [nibble for byte in row for nibble in (byte & 15, byte >> 4)]
        values = torch.tensor([E2M1[nibble & 7] * (-1 if nibble & 8 else 1) for nibble in nibbles])
        rows.append(values * torch.stack([factors[i // 16] for i in range(len(nibbles))]))
    return torch.stack(rows)


def test_compressed_tensors(tmp_path: Path) -> None:
    packed, scales = coded()
    tensors = {"m.weight_packed": packed, "m.weight_scale": scales, "m.weight_global_scale": FACTOR,
               "m.input_global_scale": FACTOR.clone()}  # fmt: skip
    path = folder(tmp_path / "m", tensors, {"quantization_config": COMPRESSED})
    assert (
        resolve_format({"quantization_config": COMPRESSED}).activations({"quantization_config": COMPRESSED}) == "none"
    )
    weight = read_any(path, "compressed-tensors", "m")
    assert isinstance(weight, QTensor)
    assert torch.equal(dequantize(weight), decoded(packed, scales.float() / FACTOR))
    kernel = ops.linear_w8a8.select("cpu", group_size=16, bits=8, values=weight.scheme.values)
    assert kernel.device == "cpu"
    x = torch.randn(3, 64)
    exact = x @ dequantize(weight).T
    assert (kernel(x, kernel.pack(weight), None) - exact).norm() < 0.01 * exact.norm()
    dense = placed(weight, "cuda", "cpu", torch.float32)
    assert isinstance(dense, torch.Tensor)
    assert torch.equal(dense, dequantize(weight))
    with pytest.raises(UnsupportedError, match="gptq has float16 scales"):
        convert(path, tmp_path / "out", "gptq")
    tensors["m.weight_global_scale"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"weight_global_scale is 0\.0, expected more than 0"):
        read_any(folder(tmp_path / "m", tensors, {"quantization_config": COMPRESSED}), "compressed-tensors", "m")


@pytest.mark.parametrize("shape", [(), (1,)])
def test_modelopt(tmp_path: Path, shape: tuple[int, ...]) -> None:
    packed, scales = coded()
    tensors = {"m.weight": packed, "m.weight_scale": scales, "m.weight_scale_2": FACTOR.reshape(shape),
               "n.weight": torch.ones(2, 3)}  # fmt: skip
    path = folder(tmp_path / "m", tensors, {"quantization_config": MODELOPT})
    weight = read_any(path, "modelopt", "m")
    assert isinstance(weight, QTensor)
    assert torch.equal(dequantize(weight), decoded(packed, scales.float() * FACTOR))
    assert torch.equal(read_any(path, "modelopt", "n"), torch.ones(2, 3))
    tensors["m.weight_scale"] = scales[:, 1:].contiguous()
    with pytest.raises(CheckpointError, match=r"weight_scale is F8_E4M3 \[8, 3\]"):
        read_any(folder(tmp_path / "m", tensors, {"quantization_config": MODELOPT}), "modelopt", "m")


def test_other_algorithms_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="modelopt: quant_algo is 'FP8', expected 'nvfp4'"):
        resolve_format({"quantization_config": MODELOPT | {"quant_algo": "FP8"}})
    wrong = COMPRESSED["config_groups"]["group_0"] | {"weights": WEIGHTS | {"group_size": 32}}
    with pytest.raises(UnsupportedError, match="weights are 4-bit floats"):
        resolve_format({"quantization_config": COMPRESSED | {"config_groups": {"group_0": wrong}}})
