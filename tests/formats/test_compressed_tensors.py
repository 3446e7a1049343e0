"""compressed-tensors: known words, every scheme there and back, several in one checkpoint, and its own library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.base import get_format, resolve_format
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.names import Activations
from lmkit.formats.parts import of_kernels
from lmkit.formats.verify import verify, weight_digest
from lmkit.qtensor import QTensor, QuantScheme, dequantize, float8_scheme, int_scheme
from tests.formats.files import folder
from tests.formats.linears import MODULE, assert_same, random_linear, read, written

NAME = "compressed-tensors"
FLOAT8 = {kind: float8_scheme(columns, rows)
          for kind, rows, columns in (("channel", 1, -1), ("tensor", -1, -1), ("block", 128, 128))}  # fmt: skip
SCHEMES: list[tuple[QuantScheme, Activations, str]] = [
    *((int_scheme(bits, group, symmetric), "none", "pack-quantized")
      for bits in (2, 3, 4, 8) for group in (16, -1) for symmetric in (True, False)),
    (int_scheme(8, -1, True), "int8", "int-quantized"),
    (int_scheme(8, 16, False), "int8", "int-quantized"),
    *((scheme, activations, "float-quantized") for scheme in FLOAT8.values() for activations in ("none", "float8")),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("scheme", "activations", "storage"), SCHEMES)
def test_there_and_back(
    tmp_path: Path, scheme: QuantScheme, activations: Activations, storage: str, dtype: torch.dtype
) -> None:
    """Outputs that fill no word: zeros are packed along them."""
    weight = random_linear(scheme, (13, 64) if scheme.codes.uniform else (200, 300), dtype=dtype)
    path = written(tmp_path / "m", NAME, {MODULE: weight}, activations=activations)
    assert_same(read(path, NAME), of_kernels(weight))
    verify(path, {MODULE: weight_digest(weight)})
    entry = json.loads((path / "config.json").read_text())["quantization_config"]
    group = entry["config_groups"]["group_0"]
    assert entry["format"] == group["format"] == storage
    assert group["targets"] == ["Linear"]
    assert entry["ignore"] == ["lm_head"]
    assert (group["input_activations"] is None) == (activations == "none")
    assert get_format(NAME).activations({"quantization_config": entry}) == activations


def test_known_words(tmp_path: Path) -> None:
    codes = torch.tensor([[*range(8)]] * 9, dtype=torch.uint8)
    zeros = torch.arange(9, dtype=torch.uint8)[:, None]
    weight = QTensor(codes, torch.ones(9, 1).half(), zeros, int_scheme(4, -1))
    tensors = load_file(written(tmp_path / "m", NAME, {"m": weight}) / "model.safetensors")
    assert tensors["m.weight_packed"].tolist() == [[1985229328]] * 9  # 0x76543210
    assert tensors["m.weight_zero_point"].tolist() == [[1985229328], [8]]  # along the outputs
    assert tensors["m.weight_shape"].tolist() == [9, 8]
    assert tensors["m.weight_scale"].shape == (9, 1)


def test_int8_values(tmp_path: Path) -> None:
    codes = torch.tensor([[0, 1, 127, 128, 255]], dtype=torch.uint8)
    weight = QTensor(codes, torch.ones(1, 1), torch.tensor([[128]], dtype=torch.uint8), int_scheme(8, -1, True))
    path = written(tmp_path / "m", NAME, {"m": weight}, activations="int8")
    assert load_file(path / "model.safetensors")["m.weight"].tolist() == [[-128, -127, -1, 0, 127]]


def mixed() -> dict[str, QTensor | torch.Tensor]:
    layers: dict[str, QTensor | torch.Tensor] = {}
    for i in (0, 1, 10):
        layers[f"model.layers.{i}.mlp.up_proj"] = random_linear(int_scheme(4, 16, True))
        layers[f"model.layers.{i}.mlp.down_proj"] = random_linear(int_scheme(8, -1, True))
        layers[f"model.layers.{i}.self_attn.q_proj"] = random_linear(FLOAT8["channel"])
        layers[f"model.layers.{i}.self_attn.o_proj"] = torch.ones(2, 2)
    return layers


def test_several_schemes(tmp_path: Path) -> None:
    layers = mixed()
    path = written(tmp_path / "m", NAME, layers, activations="int8")
    entry = json.loads((path / "config.json").read_text())["quantization_config"]
    assert entry["format"] == "mixed-precision"
    assert [group["targets"] for group in entry["config_groups"].values()] == [
        [r"re:model\.layers\.(0|1|10)\.mlp\.up_proj$"],
        [r"re:model\.layers\.(0|1|10)\.mlp\.down_proj$"],
        [r"re:model\.layers\.(0|1|10)\.self_attn\.q_proj$"],
    ]
    formats = [group["format"] for group in entry["config_groups"].values()]
    assert formats == ["pack-quantized", "int-quantized", "float-quantized"]
    with CheckpointReader(path) as reader:
        for module, weight in layers.items():
            back = resolve_format(reader.config).read_linear(reader, module)
            if isinstance(weight, QTensor):
                assert isinstance(back, QTensor)
                assert_same(back, weight)
            else:
                assert torch.equal(weight, back)  # type: ignore[arg-type]


def test_the_most_specific_target_counts(tmp_path: Path) -> None:
    layers = {f"model.layers.0.mlp.{name}": random_linear(int_scheme(bits, -1, True))
              for name, bits in (("a", 4), ("b", 8), ("c", 4))}  # fmt: skip
    group = {"weights": {"num_bits": 4, "strategy": "channel"}, "format": "pack-quantized"}
    wide = group | {"weights": {"num_bits": 8, "group_size": -1}}
    groups = {"0": {"targets": ["Linear"], **group}, "1": {"targets": ["re:.*b"], **wide},
              "2": {"targets": ["re:.*c$"], **wide}, "3": {"targets": ["model.layers.0.mlp.c"], **group}}  # fmt: skip
    path = written(tmp_path / "m", NAME, {**layers}, config_groups=groups, ignore=["re:.*q_proj"])
    with CheckpointReader(path) as reader:
        for module, weight in layers.items():
            back = get_format(NAME).read_linear(reader, module)
            assert isinstance(back, QTensor)
            assert_same(back, weight)


def entry(**changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
    group = {"targets": ["Linear"], "weights": weights | changes.pop("weights", {}), **changes.pop("group", {})}
    whole = {
        "quant_method": NAME, "format": "pack-quantized", "config_groups": {"group_0": group},
        "quantization_status": "compressed", "ignore": ["lm_head"],
    }  # fmt: skip
    return {"quantization_config": whole | changes}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weights": {"actorder": "static", "observer": "mse", "observer_kwargs": {"x": 1}, "zp_dtype": "torch.int8"}},
        {"weights": {"strategy": None}},
        {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}, "version": "0.20.0"},
        {"group": {"input_activations": {"num_bits": 8, "strategy": "tensor", "dynamic": False}}},
        {"sparsity_config": {}, "transform_config": {}, "ignore": None, "global_compression_ratio": 1.5},
        {"quantization_status": "frozen", "provider": "auto-round", "version": 7, "weights": {"clip": [0.9]}},
        {"format": "dense", "group": {"format": "pack-quantized"}},
    ],
)
def test_config_accepted(changes: dict[str, Any]) -> None:
    assert resolve_format(entry(**changes)).name == NAME


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": {"num_bits": 5}}, "group_0: weights have 5 bits"),
        ({"weights": {"num_bits": "4"}}, "Expected `int`"),
        ({"weights": {"strategy": "block", "block_structure": [16, 16]}}, "strategy 'block' of integers"),
        ({"weights": {"group_size": 0}}, "group_size is 0"),
        ({"weights": {"dynamic": True}}, "dynamic is True for weights"),
        ({"weights": {"actorder": "other"}}, "actorder is 'other'"),
        ({"weights": {"type": "float"}}, "4-bit floats"),
        ({"weights": {"type": "float", "num_bits": 8}}, "strategy 'group' of 8-bit floats"),
        ({"format": "marlin-24"}, "format 'marlin-24' with 4-bit weights"),
        ({"format": "mixed-precision"}, "format 'mixed-precision'"),
        ({"format": "float-quantized"}, "format 'float-quantized' with 4-bit weights of type int"),
        ({"quantization_status": "calibration"}, "status is 'calibration', expected 'compressed' or 'frozen'"),
        ({"group": {"output_activations": {}}}, "output_activations are not computed"),
        ({"group": {"input_activations": {"num_bits": 4}}}, "input_activations have 4 bits"),
        ({"transform_config": {"config_groups": {"r": {}}}}, "transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask' weights"),
        ({"ignore": ["re:("]}, "not a regular expression"),
        ({"ignore": ["re:(a*)*b"]}, "repeats a group"),
        ({"config_groups": []}, "Expected `object`"),
    ],
)
def test_config_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        resolve_format(entry(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.ones(13, 64)}, "has both packed weights by config.json and weight"),
        ({"weight_shape": torch.tensor([13, 40])}, r"weight_packed is I32 \[13, 8\].*I32 \[13, 5\]"),
        ({"weight_shape": torch.tensor([12, 64])}, r"weight_packed is I32 \[13, 8\]"),
        ({"weight_shape": torch.tensor([-1, 64])}, r"weight_shape is \[-1, 64\]"),
        ({"weight_shape": None}, "weight_shape is missing"),
        ({"weight_scale": torch.full((13, 4), torch.nan)}, "not finite"),
        ({"weight_zero_point": torch.ones(13, 4, dtype=torch.int32)}, r"weight_zero_point is I32 \[13, 4\]"),
        ({"weight_zero_point": None}, "weight_zero_point is missing"),
        ({"weight_g_idx": torch.arange(64, dtype=torch.int32) % 3}, "weight_g_idx: some group has not 16 inputs"),
    ],
)
def test_tensors_that_disagree(tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str) -> None:
    path = written(tmp_path / "m", NAME, {MODULE: random_linear(int_scheme(4, 16), (13, 64))})
    tensors = load_file(path / "model.safetensors") | {f"{MODULE}.{name}": part for name, part in changes.items()}
    folder(path, {name: part for name, part in tensors.items() if part is not None},
           json.loads((path / "config.json").read_text()))  # fmt: skip
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        read(path, NAME)


@pytest.mark.parametrize("activations", ["none", "int8"])
def test_activation_order_of_older_files(tmp_path: Path, activations: Activations) -> None:
    """w[n, k] = (code[n, k] - zero[n, g_idx[k]]) * scale[n, g_idx[k]]."""
    stored = random_linear(int_scheme(8, 16), (13, 64))
    path = written(tmp_path / "m", NAME, {MODULE: stored}, activations=activations)
    groups = torch.randperm(64) // 16
    tensors = load_file(path / "model.safetensors") | {f"{MODULE}.weight_g_idx": groups.int()}
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    back = read(folder(tmp_path / "older", tensors, config), NAME)
    expected = (stored.codes.float() - stored.zeros[:, groups].float()) * stored.scales[:, groups].float()
    assert torch.equal(dequantize(back), expected)
    with pytest.raises(UnsupportedError, match="cannot store it: activation order, which the format no longer has"):
        written(tmp_path / "again", NAME, {MODULE: back})


def test_an_ignored_module_must_be_dense(tmp_path: Path) -> None:
    path = written(tmp_path / "m", NAME, {MODULE: random_linear(int_scheme(4, 16))}, ignore=["re:.*mlp"])
    with pytest.raises(CheckpointError, match=r"has a weight_packed, but config\.json leaves it dense"):
        read(path, NAME)


@pytest.mark.parametrize(("scheme", "activations", "storage"), SCHEMES)
def test_its_own_library_reads_the_same(
    tmp_path: Path, scheme: QuantScheme, activations: Activations, storage: str
) -> None:
    """The values of the library that defines the format; known words hold where it is not installed."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weight = random_linear(scheme, (13, 64) if scheme.codes.uniform else (256, 384), dtype=torch.float32)
    path = written(tmp_path / "m", NAME, {"m": weight}, activations=activations)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    parsed = quantization.QuantizationConfig.model_validate(config)
    parts = {name[2:]: part for name, part in load_file(path / "model.safetensors").items() if name.startswith("m.")}
    compressor = compressors.BaseCompressor.get_value_from_registry(storage)
    back = compressor.decompress(parts, parsed.config_groups["group_0"])["weight"]
    assert torch.equal(back.float(), dequantize(weight))
