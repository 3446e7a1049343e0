"""Checkpoints as other tools publish them: the tensors of one format under the quantization_config of another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.base import resolve_format
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.convert import convert
from lmkit.qtensor import QTensor, QuantScheme, dequantize, float8_scheme, int_scheme
from tests.formats.files import folder
from tests.formats.linears import MODULE, assert_same, random_linear, read, written

OTHER = "model.layers.0.mlp.gate_proj"
NOTES = {"autoround_version": "0.9.0", "iters": 200, "data_type": "int", "provider": "auto-round", "invented": [1, {}]}


def entry_of(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return dict(config["quantization_config"])


def republished(path: Path, entry: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """The same tensors with another quantization_config, None for no field."""
    kept = {name: value for name, value in entry.items() if value is not None}
    tensors = tensors or load_file(path / "model.safetensors")
    return folder(path.with_name("published"), tensors, {"quantization_config": kept})


def found(path: Path, module: str = MODULE) -> QTensor:
    """The linear of a checkpoint in whatever format it is."""
    with CheckpointReader(path) as reader:
        weight = resolve_format(reader.config).read_linear(reader, module)
    assert isinstance(weight, QTensor)
    return weight


@pytest.mark.parametrize(
    ("packing", "name", "symmetric"),
    [
        ("auto_round:auto_gptq", "gptq", True),
        ("auto_round:gptq:exllamav2", "gptq", True),
        ("auto_round", "gptq_v2", False),
        ("auto_round:gptqmodel", "gptq_v2", False),
        ("auto_round:auto_awq", "awq", False),
        (None, "gptq", True),
    ],
)
def test_auto_round(tmp_path: Path, packing: str | None, name: str, symmetric: bool) -> None:
    weight = random_linear(int_scheme(4, 16, symmetric))
    path = written(tmp_path / "m", name, {MODULE: weight})
    entry = {"quant_method": "auto-round", "bits": 4, "group_size": 16, "sym": symmetric, "packing_format": packing}
    assert_same(found(republished(path, entry | NOTES | {"block_name_to_quantize": "model.layers"})), weight)


def test_auto_round_in_other_kinds_of_weights(tmp_path: Path) -> None:
    weight = random_linear(float8_scheme(-1, -1), dtype=torch.float32)
    path = written(tmp_path / "m", "compressed-tensors", {MODULE: weight})
    entry = {"quant_method": "auto-round", "bits": 8, "data_type": "fp8", "packing_format": "auto_round:fp8_static"}
    assert_same(found(republished(path, entry)), weight)
    with pytest.raises(UnsupportedError, match="auto-round: packing_format is 'auto_round' with data_type 'mx_fp4'"):
        CheckpointReader(republished(path, entry | {"bits": 4, "data_type": "mx_fp4", "packing_format": "auto_round"}))


@pytest.mark.parametrize("field", ["extra_config", "dynamic"])
@pytest.mark.parametrize("own", [int_scheme(8, 32, True), int_scheme(2, 16, True), int_scheme(4, -1, True)])
def test_modules_with_schemes_of_their_own(tmp_path: Path, field: str, own: QuantScheme) -> None:
    """Each module's tensors tell its bits and its group size."""
    common, special = random_linear(int_scheme(4, 16, True)), random_linear(own)
    first = written(tmp_path / "a", "gptq", {OTHER: common})
    second = written(tmp_path / "b", "gptq", {MODULE: special})
    tensors = load_file(first / "model.safetensors") | load_file(second / "model.safetensors")
    changes = {field: {MODULE: {"bits": own.bits, "group_size": own.group_size}}}
    path = republished(first, entry_of(first) | changes, tensors)
    assert torch.equal(dequantize(found(path, OTHER)), dequantize(common))
    assert torch.equal(dequantize(found(path)), dequantize(special))


@pytest.mark.parametrize(("name", "delta"), [("gptq", 1), ("gptq_v2", -1)])
def test_zeros_of_symmetric_weights_as_the_other_version_stores_them(tmp_path: Path, name: str, delta: int) -> None:
    weight = random_linear(int_scheme(4, 16, True))
    path = written(tmp_path / "m", name, {MODULE: weight})
    tensors = load_file(path / "model.safetensors")
    tensors[f"{MODULE}.qzeros"] = tensors[f"{MODULE}.qzeros"] + delta * 0x11111111
    changed = republished(path, entry_of(path), tensors)
    assert_same(found(changed), weight)
    convert(changed, tmp_path / "back", "compressed-tensors")
    assert torch.equal(dequantize(read(tmp_path / "back", "compressed-tensors")), dequantize(weight))
    without = republished(path, entry_of(path) | {"sym": None, "checkpoint_format": None}, tensors)
    assert_same(found(without), weight)
    tensors[f"{MODULE}.qzeros"][0, 0] += 0x11111111
    with pytest.raises(CheckpointError, match="qzeros are not all 8, but `sym` is true"):
        found(republished(path, entry_of(path), tensors))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_of_awq_in_any_type(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = random_linear(int_scheme(4, 16))
    path = written(tmp_path / "m", "awq", {MODULE: weight})
    tensors = load_file(path / "model.safetensors")
    scales = torch.rand(tensors[f"{MODULE}.scales"].shape).to(dtype)
    tensors[f"{MODULE}.scales"] = scales
    changed = republished(path, entry_of(path), tensors)
    back = found(changed)
    assert torch.equal(back.scales, scales.T)
    assert torch.equal(back.codes, weight.codes)
    convert(changed, tmp_path / "back", "compressed-tensors")
    assert torch.equal(dequantize(read(tmp_path / "back", "compressed-tensors")), dequantize(back))


TENSOR = float8_scheme(-1, -1)
CHANNEL = float8_scheme()
BLOCK = float8_scheme(128, 128)


@pytest.mark.parametrize(
    ("entry", "scheme", "shape"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, TENSOR, ()),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}, TENSOR, ()),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, TENSOR, (1,)),
        ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, CHANNEL, (200,)),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, BLOCK, (2, 1, 3, 1)),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}}, TENSOR, ()),
        ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, TENSOR, ()),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None}, TENSOR, (1, 1)),
        ({"quant_method": "fp8"}, CHANNEL, (200, 1)),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, CHANNEL, (200, 1)),
        ({"quant_method": "fp8"}, BLOCK, (2, 3)),
    ],
)
def test_float8(tmp_path: Path, entry: dict[str, Any], scheme: QuantScheme, shape: tuple[int, ...]) -> None:
    for name in ("weight_scale",) if "quant_algo" in str(entry) else ("weight_scale", "weight_scale_inv"):
        check_float8(tmp_path / name, entry, scheme, shape, name)


def check_float8(path: Path, entry: dict[str, Any], scheme: QuantScheme, shape: tuple[int, ...], name: str) -> None:
    weight = random_linear(scheme, (200, 300), dtype=torch.float32)
    tensors = {
        f"{MODULE}.weight": weight.codes,
        f"{MODULE}.{name}": weight.scales.reshape(shape).clone(),
        f"{OTHER}.weight": torch.ones(4, 4),
    }
    folder(path, tensors, {"quantization_config": entry})
    assert_same(found(path), weight)
    with CheckpointReader(path) as reader:
        other = resolve_format(reader.config).read_linear(reader, OTHER)
    assert isinstance(other, torch.Tensor)
    assert torch.equal(other, torch.ones(4, 4))
    back = path.with_name(f"{name}-back")
    convert(path, back, "compressed-tensors")
    assert torch.equal(dequantize(read(back, "compressed-tensors")), dequantize(weight))


def test_inputs_that_would_have_to_be_scaled_are_refused(tmp_path: Path) -> None:
    tensors = {f"{MODULE}.weight": torch.ones(4, 4), f"{MODULE}.pre_quant_scale": torch.ones(4)}
    entry = {"quant_method": "modelopt", "quant_algo": "FP8"}
    with pytest.raises(CheckpointError, match="pre_quant_scale: inputs would have to be scaled"):
        found(folder(tmp_path / "m", tensors, {"quantization_config": entry}))


@pytest.mark.parametrize(
    ("file", "name", "content"),
    [
        ("quantize_config.json", "gptq", {"bits": 4, "group_size": 16, "desc_act": False, "sym": True}),
        ("quant_config.json", "awq", {"w_bit": 4, "q_group_size": 16, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_an_entry_beside_config_json(tmp_path: Path, file: str, name: str, content: dict[str, Any]) -> None:
    weight = random_linear(int_scheme(4, 16, name == "gptq"))
    path = written(tmp_path / "m", name, {MODULE: weight})
    bare = folder(tmp_path / "bare", load_file(path / "model.safetensors"), {})
    (bare / file).write_text(json.dumps(content))
    assert_same(found(bare), weight)
    dense = folder(tmp_path / "dense", {f"{MODULE}.weight": torch.ones(4, 4)}, {})
    (dense / file).write_text(json.dumps(content))
    with CheckpointReader(dense) as reader:  # a file that was left behind
        assert resolve_format(reader.config).name == "dense"


def test_an_entry_of_modelopt_beside_config_json(tmp_path: Path) -> None:
    weight = random_linear(TENSOR, dtype=torch.float32)
    tensors = {f"{MODULE}.weight": weight.codes, f"{MODULE}.weight_scale": weight.scales.reshape(()).clone()}
    path = folder(tmp_path / "m", tensors, {})
    (path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": []}})
    )
    assert_same(found(path), weight)


@pytest.mark.parametrize("symmetric", [True, False])
def test_frozen_weights_are_rounded_as_they_are_read(tmp_path: Path, symmetric: bool) -> None:
    weight = random_linear(int_scheme(4, 16, symmetric), dtype=torch.float32)
    weight.scales.abs_().add_(0.01)
    path = written(tmp_path / "m", "compressed-tensors", {MODULE: weight})
    tensors = load_file(path / "model.safetensors")
    for part in ("weight_packed", "weight_shape", "weight_zero_point"):
        tensors.pop(f"{MODULE}.{part}", None)
    tensors[f"{MODULE}.weight"] = dequantize(weight)
    if not symmetric:
        tensors[f"{MODULE}.weight_zero_point"] = (weight.zeros - 8).view(torch.int8)
    assert_same(found(republished(path, entry_of(path) | {"quantization_status": "frozen"}, tensors)), weight)


def test_a_refusal_has_one_reason() -> None:
    with pytest.raises(UnsupportedError) as refusal:
        resolve_format({"quantization_config": {"quant_method": "gptq", "bits": 5}})
    assert str(refusal.value) == "config.json: gptq: bits is 5, expected 2 or 3 or 4 or 8"
