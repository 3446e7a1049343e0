"""NVFP4 in both of its forms, against a decoder that looks up one weight at a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_args import FP4_E2M1_DATA
from safetensors.torch import load_file

from lmkit.codes import E2M1 as FLOAT4
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.base import resolve_format
from lmkit.formats.convert import convert
from lmkit.formats.nvfp4 import NVFP4
from lmkit.formats.verify import verify, weight_digest
from lmkit.kernels import ops
from lmkit.models.source import ModelSource, placed
from lmkit.qtensor import QTensor, dequantize, quantize
from tests.formats.files import folder
from tests.formats.linears import MODULE, assert_same, read, read_any, written
from tests.models import tiny
from tests.models.test_formats import SHAPE

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
    assert weight.input_factor == FACTOR
    assert torch.equal(dequantize(weight), decoded(packed, scales.float() / FACTOR))
    kernel = ops.linear_w8a8.select("cpu", group_size=16, bits=8, values=weight.scheme.codes.values)
    assert kernel.device == "cpu"
    x = torch.randn(3, 64)
    exact = x @ dequantize(weight).T
    assert (kernel(x, kernel.pack(weight), None) - exact).norm() < 0.01 * exact.norm()
    assert isinstance(placed(weight, "cuda", "cpu", torch.float32), QTensor)
    dense = placed(weight, "torch:cuda", "cpu", torch.float32)
    assert isinstance(dense, torch.Tensor)
    assert torch.equal(dense, dequantize(weight))
    with pytest.raises(UnsupportedError, match=r"float32 ones; a compressed-tensors checkpoint can$"):
        convert(path, tmp_path / "out", "gptq")
    tensors["m.weight_global_scale"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"weight_global_scale is 0\.0, expected more than 0"):
        read_any(folder(tmp_path / "m", tensors, {"quantization_config": COMPRESSED}), "compressed-tensors", "m")


def test_rounding_is_that_of_compressed_tensors() -> None:
    """Numbers between two of the table, too."""
    numbers = torch.cat(
        [torch.linspace(-7, 7, 5601), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0])]
    )
    assert torch.equal(
        FLOAT4.weights(FLOAT4.nearest(numbers)[:, None], torch.ones(len(numbers)), torch.empty(0))[:, 0],
        FP4_E2M1_DATA.cast_to_fp4(numbers),
    )


@pytest.mark.parametrize("largest", [None, 9.0])
def test_written_weights_are_read_here_and_by_compressed_tensors(tmp_path: Path, largest: float | None) -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 64) * torch.rand(24, 1)
    weight[3, 16:32] = 0
    q = quantize(weight, NVFP4, largest=None if largest is None else torch.tensor(largest))
    path = written(tmp_path / "m", "compressed-tensors", {MODULE: q})
    back = read(path, "compressed-tensors")
    assert_same(back, q)
    assert back.factor is not None
    assert q.factor is not None
    assert torch.equal(back.factor, q.factor)
    verify(path, {MODULE: weight_digest(q)})
    (group,) = json.loads((path / "config.json").read_text())["quantization_config"]["config_groups"].values()
    stored = load_file(path / "model.safetensors")
    names = ("weight_packed", "weight_scale", "weight_global_scale")
    state = {name: stored[f"{MODULE}.{name}"] for name in names}
    theirs = NVFP4PackedCompressor.decompress(state, QuantizationScheme.model_validate(group))["weight"]
    assert torch.equal(dequantize(q).to(theirs.dtype), theirs)  # it decodes to bfloat16
    bits = 8 * sum(tensor.nbytes for tensor in state.values())
    assert bits == weight.numel() * (NVFP4.bits + NVFP4.group_bits / 16) + 32
    error = (dequantize(q) - weight).norm() / weight.norm()
    assert 0.01 < error < 0.12
    assert not dequantize(q)[3, 16:32].any()


def test_a_wrong_nibble_is_seen_by_the_second_reader(tmp_path: Path) -> None:
    q = quantize(torch.randn(8, 32), NVFP4)
    path = written(tmp_path / "m", "compressed-tensors", {MODULE: q})
    codes = q.codes.clone()
    codes[2, 5] ^= 1
    with pytest.raises(CheckpointError, match="reads back as another weight"):
        verify(path, {MODULE: weight_digest(replace(q, codes=codes))})


@pytest.mark.parametrize("shape", [(), (1,)])
def test_modelopt(tmp_path: Path, shape: tuple[int, ...]) -> None:
    packed, scales = coded()
    tensors = {"m.weight": packed, "m.weight_scale": scales, "m.weight_scale_2": FACTOR.reshape(shape),
               "n.weight": torch.ones(2, 3)}  # fmt: skip
    path = folder(tmp_path / "m", tensors, {"quantization_config": MODELOPT})
    weight = read_any(path, "modelopt", "m")
    convert(path, tmp_path / "converted", "compressed-tensors")
    moved = read_any(tmp_path / "converted", "compressed-tensors", "m")
    assert isinstance(weight, QTensor)
    assert isinstance(moved, QTensor)
    assert torch.equal(dequantize(moved), dequantize(weight))
    assert torch.equal(dequantize(weight), decoded(packed, scales.float() * FACTOR))
    dense = read_any(path, "modelopt", "n")
    assert isinstance(dense, torch.Tensor)
    assert torch.equal(dense, torch.ones(2, 3))
    tensors["m.weight_scale"] = scales[:, 1:].contiguous()
    with pytest.raises(CheckpointError, match=r"weight_scale is F8_E4M3 \[8, 3\]"):
        read_any(folder(tmp_path / "m", tensors, {"quantization_config": MODELOPT}), "modelopt", "m")


def test_other_algorithms_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="modelopt: quant_algo is 'W4A8_AWQ', expected 'nvfp4' or 'fp8'"):
        resolve_format({"quantization_config": MODELOPT | {"quant_algo": "W4A8_AWQ"}})
    wrong = COMPRESSED["config_groups"]["group_0"] | {"weights": WEIGHTS | {"group_size": 32}}
    with pytest.raises(UnsupportedError, match="weights are 4-bit floats"):
        resolve_format({"quantization_config": COMPRESSED | {"config_groups": {"group_0": wrong}}})


@pytest.mark.parametrize(
    ("device", "activations", "bits", "group_bytes"),
    [("cpu", "int8", 4, 5), ("cpu", "exact", 8, 8), ("cuda", "auto", 4, 4)],
)
def test_the_plan_counts_what_is_loaded(
    tmp_path: Path, device: str, activations: str, bits: int, group_bytes: int
) -> None:
    """Codes of 4 or 8 bits and their groups' scales and, on a CPU, zeros."""
    tiny.make(tmp_path, "llama", **SHAPE)
    tensors, weights = load_file(tmp_path / "model.safetensors"), 0
    dense = sum(tensor.nbytes for tensor in tensors.values())
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, inputs = tensors.pop(name).shape
        tensors[name] = torch.zeros(rows, inputs // 2, dtype=torch.uint8)
        tensors[name + "_scale"] = torch.ones(rows, inputs // 16).to(torch.float8_e4m3fn)
        tensors[name + "_scale_2"] = torch.ones(())
        weights += rows * inputs
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": MODELOPT}
    source = ModelSource(folder(tmp_path / "coded", tensors, config))
    held = weights * bits // 8 + weights // 16 * group_bytes
    factors = 4 * sum(name.endswith("_scale_2") for name in tensors)
    assert source.weight_bytes("float32", "auto", device, activations) == dense - 4 * weights + held + factors
    if device == "cpu":
        weight = source.format.read_linear(source.reader, "model.layers.0.self_attn.o_proj")
        assert isinstance(weight, QTensor)
        large = replace(weight, codes=weight.codes.repeat(64, 16), scales=weight.scales.repeat(64, 16))
        op = ops.linear_w8a8 if activations == "int8" else ops.linear_w8a16
        packed = op.select("cpu", group_size=16, bits=8, values=weight.scheme.codes.values).pack(large)
        parts = [part.nbytes for part in vars(packed).values() if isinstance(part, torch.Tensor)]
        assert sum(parts) == large.codes.numel() * (bits / 8 + group_bytes / 16)
