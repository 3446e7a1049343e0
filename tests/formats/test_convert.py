"""From format to format and back: the same bits; what the second reader finds; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmkit.errors import CheckpointError, ConfigError, UnsupportedError
from lmkit.formats.convert import convert
from lmkit.formats.names import Activations
from lmkit.formats.verify import verify, weight_digest
from lmkit.qtensor import QTensor, QuantScheme, dequantize, float8_scheme, int_scheme
from tests.formats.files import folder
from tests.formats.linears import MODULE, assert_same, random_linear, read, written

OTHER = "model.layers.11.self_attn.q_proj"
DENSE = "model.layers.0.self_attn.o_proj"
FLOAT8 = float8_scheme(128, 128)


def checkpoint(path: Path, format_name: str, scheme: QuantScheme, **options: Any) -> Path:
    layers: dict[str, QTensor | torch.Tensor] = {
        MODULE: random_linear(scheme, (16, 128)), OTHER: random_linear(scheme, (8, 64)), DENSE: torch.randn(5, 3),
    }  # fmt: skip
    return written(path, format_name, layers, **options)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in load_file(path / "model.safetensors").items() if name != "x"}


@pytest.mark.parametrize("group_size", [16, -1])
@pytest.mark.parametrize("other", ["compressed-tensors", "gptq_v2", "gptq"])
def test_there_and_back_is_bit_identical(tmp_path: Path, other: str, group_size: int) -> None:
    """Version 1 of GPTQ: of symmetric weights, which AWQ stores with their zeros."""
    source = checkpoint(tmp_path / "awq", "awq", int_scheme(4, group_size, symmetric=other == "gptq"))
    (source / "kv_config.json").write_text("{}")
    linears = convert(source, tmp_path / "other", other)
    assert {module for module, scheme in linears.items() if scheme is not None} == {MODULE, OTHER}
    convert(tmp_path / "other", tmp_path / "back", "awq")
    assert weights(tmp_path / "back").keys() == weights(source).keys()
    for name, tensor in weights(source).items():
        assert torch.equal(weights(tmp_path / "back")[name], tensor), name
    for name in ("tokenizer.json", "kv_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    for module in (MODULE, OTHER):
        a, b = read(source, "awq", module), read(tmp_path / "other", other, module)
        assert torch.equal(a.codes, b.codes)
        assert torch.equal(a.scales, b.scales)
        assert torch.equal(a.zeros, b.zeros)


def test_activation_order_there_and_back(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "gptq", "gptq", int_scheme(4, 16, True, act_order=True))
    convert(source, tmp_path / "other", "gptq_v2")
    convert(tmp_path / "other", tmp_path / "back", "gptq")
    assert weights(tmp_path / "back").keys() == weights(source).keys()
    for name, tensor in weights(source).items():
        assert torch.equal(weights(tmp_path / "back")[name], tensor), name


@pytest.mark.parametrize("source_format", ["awq", "gptq_v2"])
def test_symmetric_weights_become_symmetric(tmp_path: Path, source_format: str) -> None:
    scheme = int_scheme(4, 16, symmetric=True)
    convert(checkpoint(tmp_path / "a", source_format, scheme), tmp_path / "ct", "compressed-tensors")
    assert read(tmp_path / "ct", "compressed-tensors").scheme == scheme


def test_blocks_of_float8(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "fp8", "fp8", FLOAT8)
    convert(source, tmp_path / "ct", "compressed-tensors")
    entry = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]
    assert entry["config_groups"]["group_0"]["input_activations"]["type"] == "float"
    convert(tmp_path / "ct", tmp_path / "back", "fp8")
    assert_same(read(tmp_path / "back", "fp8"), read(source, "fp8"))


@pytest.mark.parametrize(
    ("scheme", "source", "target", "options", "message"),
    [
        (int_scheme(4, 16), "awq", "gptq", {}, f"{MODULE}: gptq cannot store it: asymmetric weights.*use gptq_v2"),
        (int_scheme(8, 16), "gptq_v2", "awq", {}, f"{MODULE}: AWQ cannot store it: 8 bits, AWQ has 4"),
        (int_scheme(4, 16, act_order=True), "gptq_v2", "awq", {}, f"{MODULE}: AWQ cannot store it: activation order"),
        (int_scheme(4, 16), "awq", "fp8", {}, "fp8 cannot store it: 4-bit integers"),
        (FLOAT8, "fp8", "compressed-tensors", {"fmt": "x"}, "fmt is 'x'"),
        (FLOAT8, "fp8", "awq", {}, "AWQ has no place for float8 activations"),
        (int_scheme(4, 16), "compressed-tensors", "awq", {"kv_cache_scheme": {"num_bits": 8}}, "a kv_cache_scheme"),
        (
            int_scheme(8, -1, True),
            "compressed-tensors",
            "gptq",
            {"activations": "int8"},
            "no place for int8 activations",
        ),
    ],
)
def test_what_a_format_cannot_hold(
    tmp_path: Path, scheme: QuantScheme, source: str, target: str, options: dict[str, Any], message: str
) -> None:
    path = checkpoint(tmp_path / "a", source, scheme, **options)
    with pytest.raises(UnsupportedError, match=message):
        convert(path, tmp_path / "b", target)
    assert not [*tmp_path.glob("*b*")]


def test_scales_that_float16_cannot_hold(tmp_path: Path) -> None:
    weight = random_linear(int_scheme(4, 16), dtype=torch.float32)
    path = written(tmp_path / "a", "compressed-tensors", {MODULE: weight})
    with pytest.raises(UnsupportedError, match=f"{MODULE}: AWQ has float16 scales, which cannot hold these"):
        convert(path, tmp_path / "b", "awq")
    exact = QTensor(weight.codes, weight.scales.half().float(), weight.zeros, weight.scheme)
    path = written(tmp_path / "c", "compressed-tensors", {MODULE: exact})
    convert(path, tmp_path / "d", "awq")
    assert torch.equal(dequantize(read(tmp_path / "d", "awq")), dequantize(exact))


def test_several_schemes(tmp_path: Path) -> None:
    layers: dict[str, QTensor | torch.Tensor] = {
        MODULE: random_linear(int_scheme(4, 16)), OTHER: random_linear(int_scheme(4, 32)),
    }  # fmt: skip
    path = written(tmp_path / "a", "compressed-tensors", layers)
    with pytest.raises(UnsupportedError, match="AWQ has one scheme for a whole checkpoint, not 4 bits in groups of 16"):
        convert(path, tmp_path / "b", "awq")


def test_static_activation_scales(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "a", "compressed-tensors", int_scheme(8, -1, True), activations="int8")
    tensors = load_file(path / "model.safetensors") | {f"{MODULE}.input_scale": torch.ones(1)}
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"input_scale: static activation scales are not converted"):
        convert(path, tmp_path / "b", "gptq")


def test_only_from_one_quantized_format_to_another(tmp_path: Path) -> None:
    dense = folder(tmp_path / "dense", {"a.weight": torch.ones(2, 2)})
    for path, name in (
        (dense, "awq"),
        (checkpoint(tmp_path / "a", "awq", int_scheme(4, 16)), "awq"),
        (dense, "dense"),
    ):
        with pytest.raises(ConfigError, match="from one quantized format to another"):
            convert(path, tmp_path / "b", name)
    with pytest.raises(UnsupportedError, match="'exl2' is not one of dense, awq"):
        convert(dense, tmp_path / "b", "exl2")
    empty = written(tmp_path / "e", "awq", {MODULE: random_linear(int_scheme(4, 16))})
    folder(empty, {"a.weight": torch.ones(2, 2)}, json.loads((empty / "config.json").read_text()))
    with pytest.raises(CheckpointError, match="no linear is quantized"):
        convert(empty, tmp_path / "b", "gptq_v2")


EVERY: list[tuple[str, QuantScheme, Activations]] = [
    ("awq", int_scheme(4, 16), "none"),
    ("awq", int_scheme(4, -1), "none"),
    ("gptq", int_scheme(4, 16, True), "none"),
    ("gptq", int_scheme(8, 16, True), "none"),
    ("gptq_v2", int_scheme(4, 16), "none"),
    ("gptq_v2", int_scheme(4, 16, act_order=True), "none"),
    ("gptq_v2", int_scheme(8, -1), "none"),
    ("compressed-tensors", int_scheme(4, 16, True), "none"),
    ("compressed-tensors", int_scheme(4, -1), "none"),
    ("compressed-tensors", int_scheme(8, 16), "none"),
    ("compressed-tensors", int_scheme(8, -1, True), "int8"),
    ("compressed-tensors", int_scheme(8, 16), "int8"),
    ("compressed-tensors", float8_scheme(), "float8"),
    ("compressed-tensors", float8_scheme(-1, -1), "none"),
    ("compressed-tensors", FLOAT8, "float8"),
    ("fp8", FLOAT8, "float8"),
]


@pytest.mark.parametrize(("name", "scheme", "activations"), EVERY)
def test_the_second_reader(tmp_path: Path, name: str, scheme: QuantScheme, activations: Activations) -> None:
    """It finds what was meant, and any tensor that differs in one bit."""
    shape = (16, 64) if scheme.codes.uniform else (200, 300)
    layers: dict[str, QTensor | torch.Tensor] = {
        MODULE: random_linear(scheme, shape, dtype=torch.float16), DENSE: torch.ones(2, 2),
    }  # fmt: skip
    path = written(tmp_path / "m", name, layers, activations=activations)
    weight = layers[MODULE]
    meant = {MODULE: weight_digest(weight)}
    assert meant[MODULE] == weight_digest(dequantize(weight) if isinstance(weight, QTensor) else weight)
    verify(path, meant)
    tensors = load_file(path / "model.safetensors")
    for tensor_name, tensor in tensors.items():
        if tensor_name.startswith(MODULE):
            changed = tensor.clone()
            changed.view(-1).view(torch.uint8)[0] ^= 1
            save_file(tensors | {tensor_name: changed}, path / "model.safetensors")
            with pytest.raises((CheckpointError, ValueError, IndexError)):
                verify(path, meant)


def test_the_second_reader_counts(tmp_path: Path) -> None:
    path = written(tmp_path / "m", "awq", {MODULE: random_linear(int_scheme(4, 16)), DENSE: torch.ones(2, 2)})
    with pytest.raises(CheckpointError, match=f"{MODULE} is quantized, against what was to be written"):
        verify(path, {})
    with pytest.raises(CheckpointError, match=f"{DENSE} is not quantized"):
        verify(path, {MODULE: "", DENSE: ""})
    with pytest.raises(CheckpointError, match=f"{MODULE} reads back as another weight"):
        verify(path, {MODULE: ""})
