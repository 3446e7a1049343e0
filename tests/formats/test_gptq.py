"""GPTQ in both versions: known words, there and back, and everything that a file must not leave open."""

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
from lmkit.formats.packing import pack_words
from lmkit.formats.parts import of_kernels
from lmkit.qtensor import QTensor, dequantize, int_scheme
from tests.formats.files import folder
from tests.formats.linears import MODULE, assert_same, random_linear, read, written

ENTRY: dict[str, Any] = {
    "quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, "desc_act": False, "checkpoint_format": "gptq",
}  # fmt: skip


@pytest.mark.parametrize("name", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("group_size", "act_order"), [(16, False), (-1, False), (16, True), (32, True)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_there_and_back(
    tmp_path: Path, name: str, bits: int, group_size: int, act_order: bool, symmetric: bool
) -> None:
    weight = random_linear(int_scheme(bits, group_size, symmetric, act_order=act_order), (32, 64))
    if name == "gptq" and not symmetric:
        with pytest.raises(UnsupportedError, match=f"{MODULE}: gptq cannot store it: asymmetric.*gptq_v2"):
            written(tmp_path / "m", name, {MODULE: weight})
        return
    path = written(tmp_path / "m", name, {MODULE: weight})
    assert_same(read(path, name), of_kernels(weight))
    assert json.loads((path / "config.json").read_text())["quantization_config"]["desc_act"] == act_order


def packed_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int [n, columns] -> int32 words [n * bits / 32, columns], as AutoGPTQ packs them: 32 codes of 3 bits in 3 words,
    of which the 11th and the 22nd lie in two."""
    words: list[list[int]] = []
    for column in codes.T.tolist():
        row: list[int] = []
        for i in range(0, len(column), 32):
            part = column[i : i + 32]
            if bits == 2:
                row += [sum(code << 2 * j for j, code in enumerate(part[k : k + 16])) for k in (0, 16)]
                continue
            row.append(sum(part[j] << 3 * j for j in range(10)) | (part[10] & 3) << 30)
            row.append(part[10] >> 2 | sum(part[11 + j] << 3 * j + 1 for j in range(10)) | (part[21] & 1) << 31)
            row.append(part[21] >> 1 | sum(part[22 + j] << 3 * j + 2 for j in range(10)))
        words.append([word - (1 << 32) if word >> 31 else word for word in row])
    return torch.tensor(words, dtype=torch.int32).T.contiguous()


@pytest.mark.parametrize("name", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("symmetric", [True, False])
def test_two_and_three_bits_are_read_as_four(tmp_path: Path, name: str, bits: int, symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(bits)
    inputs, outputs, group, offset = 96, 64, 32, 1 if name == "gptq" else 0
    codes = torch.randint(0, 1 << bits, (inputs, outputs), generator=generator)
    assert torch.equal(pack_words(codes.T.to(torch.uint8), bits).T, packed_rows(codes, bits))
    zeros = torch.randint(offset, 1 << bits, (inputs // group, outputs), generator=generator)
    if symmetric:
        zeros.fill_(1 << (bits - 1))
    scales = torch.rand(inputs // group, outputs, generator=generator).half()
    tensors = {
        "m.qweight": packed_rows(codes, bits), "m.scales": scales,
        "m.qzeros": packed_rows((zeros - offset).T, bits).T.contiguous(),
    }  # fmt: skip
    entry = ENTRY | {"bits": bits, "group_size": group, "sym": symmetric, "checkpoint_format": name}
    weight = read(folder(tmp_path / "m", tensors, {"quantization_config": entry}), name, "m")
    assert isinstance(weight, QTensor)
    assert weight.scheme == int_scheme(4, group)
    expected = (codes - zeros.repeat_interleave(group, 0)).float() * scales.float().repeat_interleave(group, 0)
    assert torch.equal(dequantize(weight), expected.T)


def one_group(codes: list[int], zeros: list[int]) -> QTensor:
    """8 outputs with the same 8 codes."""
    scheme = int_scheme(4, -1, symmetric=set(zeros) == {8})
    rows = torch.tensor([codes] * 8, dtype=torch.uint8)
    return QTensor(rows, torch.ones(8, 1).half(), torch.tensor(zeros, dtype=torch.uint8)[:, None], scheme)


def test_known_words(tmp_path: Path) -> None:
    """Codes along the inputs, zeros along the outputs, one less in version 1."""
    v1 = load_file(written(tmp_path / "v1", "gptq", {"m": one_group([*range(8)], [8] * 8)}) / "model.safetensors")
    v2 = load_file(
        written(tmp_path / "v2", "gptq_v2", {"m": one_group([*range(8, 16)], [*range(8)])}) / "model.safetensors"
    )
    assert v1["m.qweight"].tolist() == [[0x76543210] * 8]
    assert v1["m.qzeros"].tolist() == [[2004318071]]  # 0x77777777
    assert v2["m.qweight"].tolist() == [[0xFEDCBA98 - (1 << 32)] * 8]
    assert v2["m.qzeros"].tolist() == [[0x76543210]]
    for tensors in (v1, v2):
        assert tensors["m.g_idx"].tolist() == [0] * 8
        assert (tensors["m.g_idx"].dtype, tensors["m.scales"].dtype) == (torch.int32, torch.float16)


def test_config_entry_is_mirrored(tmp_path: Path) -> None:
    weight = random_linear(int_scheme(4, 16, True))
    dense = {f"model.layers.{i}.mlp.down_proj": torch.ones(2, 2) for i in (0, 10, 2)}
    path = written(tmp_path / "m", "gptq", {MODULE: weight, "lm_head": torch.ones(2, 2), **dense})
    entry = json.loads((path / "config.json").read_text())["quantization_config"]
    assert json.loads((path / "quantize_config.json").read_text()) == entry
    assert entry == {
        "quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True,
        "checkpoint_format": "gptq", "pack_dtype": "int32", "lm_head": False,
        "dynamic": {r"-:lm_head$": {}, r"-:model\.layers\.(0|2|10)\.mlp\.down_proj$": {}},
    }  # fmt: skip
    with CheckpointReader(path) as reader:
        for module in dense:
            assert torch.equal(get_format("gptq").read_linear(reader, module), torch.ones(2, 2))  # type: ignore[arg-type]


def test_an_asymmetric_file_of_version_1(tmp_path: Path) -> None:
    """Zeros of 1 and more are clear; the largest code stands for 16 with one reader, for 0 with another."""
    clear = random_linear(int_scheme(4, 16), smallest_zero=1)
    path = written(tmp_path / "v2", "gptq_v2", {MODULE: clear})
    tensors = load_file(path / "model.safetensors")
    less = clear.zeros.T.contiguous() - 1
    as_v1 = tensors | {f"{MODULE}.qzeros": tensors[f"{MODULE}.qzeros"] - 0x11111111}  # no borrow: no zero is 0
    assert int(less.max()) < 15
    v1 = folder(tmp_path / "v1", as_v1, {"quantization_config": ENTRY | {"sym": False}})
    assert_same(read(v1, "gptq"), clear)
    as_v1[f"{MODULE}.qzeros"][0, 0] = 0x7777776F  # zeros 0, 8, 8, ... with a borrow across the word
    with pytest.raises(CheckpointError, match="qzeros holds 15, which stands for a zero of 16, or of 0"):
        read(folder(tmp_path / "v1", as_v1, {"quantization_config": ENTRY | {"sym": False}}), "gptq")


def test_sym_must_be_true(tmp_path: Path) -> None:
    path = written(tmp_path / "m", "gptq_v2", {MODULE: random_linear(int_scheme(4, 16))}, sym=True)
    with pytest.raises(CheckpointError, match="qzeros are not all 8, but `sym` is true"):
        read(path, "gptq_v2")


def with_g_idx(tmp_path: Path, weight: QTensor, g_idx: list[int]) -> Path:
    path = written(tmp_path / "plain", "gptq_v2", {MODULE: weight})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    tensors = load_file(path / "model.safetensors") | {f"{MODULE}.g_idx": torch.tensor(g_idx, dtype=torch.int32)}
    return folder(tmp_path / "changed", tensors, config)


def test_groups_in_any_order(tmp_path: Path) -> None:
    weight = random_linear(int_scheme(4, 16), (16, 48))
    back = read(with_g_idx(tmp_path, weight, [2] * 16 + [0] * 16 + [1] * 16), "gptq_v2")
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.scales, weight.scales[:, [2, 0, 1]])
    assert torch.equal(back.zeros, weight.zeros[:, [2, 0, 1]])


def test_activation_order(tmp_path: Path) -> None:
    """w[n, k] = (code[n, k] - zero[n, g_idx[k]]) * scale[n, g_idx[k]]: the definition, bit by bit."""
    stored = random_linear(int_scheme(4, 16), (16, 48))
    groups = (torch.randperm(48) // 16).tolist()
    back = read(with_g_idx(tmp_path, stored, groups), "gptq_v2")
    expected = (stored.codes.float() - stored.zeros[:, groups].float()) * stored.scales[:, groups].float()
    assert torch.equal(dequantize(back), expected)
    assert back.order is not None
    assert torch.equal(back.codes, stored.codes[:, back.order])
    assert torch.equal(back.scales, stored.scales)


def test_groups_of_several_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="g_idx: some group has not 16 inputs"):
        read(with_g_idx(tmp_path, random_linear(int_scheme(4, 16), (16, 32)), [0, 1] * 15 + [0, 0]), "gptq_v2")


def test_an_impossible_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"g_idx names groups that there are not, outside 0 \.\. 1"):
        read(with_g_idx(tmp_path, random_linear(int_scheme(4, 16), (16, 32)), [0] * 16 + [2] * 16), "gptq_v2")


def test_dynamic_overrides(tmp_path: Path) -> None:
    """The tensors tell the bits and the group size."""
    weight = random_linear(int_scheme(8, 32, True))
    dynamic = {r"+:.*\.up_proj$": {"bits": 8, "group_size": 32}, r"-:.*": {}}
    path = written(tmp_path / "m", "gptq", {MODULE: weight}, bits=4, group_size=16, dynamic=dynamic)
    assert_same(read(path, "gptq"), weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 5}, "gptq: bits is 5, expected 2 or 3 or 4 or 8"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"checkpoint_format": "gptq_v2", "bits": 6}, "gptq_v2: bits is 6"),
        ({"format": "gptq_v2"}, "gptq: format is 'gptq_v2', expected gptq"),
        ({"sym": "yes"}, "sym is 'yes'"),
        ({"group_size": 0}, "group_size is 0"),
        ({"rotation": "hadamard"}, "rotation is 'hadamard'"),
        ({"adapter": {"type": "lora"}}, "adapter is"),
        ({"rotation_config": {"kind": "hadamard"}}, "rotation_config is"),
    ],
)
def test_config_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        resolve_format({"quantization_config": ENTRY | changes})


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"format": "gptq"}, {"checkpoint_format": "gptq_v2"}, {"damp_percent": 0.1}, {"lm_head": True},
        {"desc_act": True}, {"dynamic": {}}, {"bits": 8, "group_size": -1}, {"dynamic": {"lm_head": {"mse": 2.4}}},
        {"sym": None, "bits": None, "group_size": None}, {"adapter": {}, "invented": 1, "lm_head": "yes"},
    ],
)  # fmt: skip
def test_config_accepted(changes: dict[str, Any]) -> None:
    entry = ENTRY | changes
    assert resolve_format({"quantization_config": entry}).name == entry["checkpoint_format"]
    old = {name: value for name, value in ENTRY.items() if name != "checkpoint_format"}
    assert resolve_format({"quantization_config": old}).name == "gptq"  # as files were before there was a version 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.ones(16, 64)}, "has both qweight and weight"),
        ({"qzeros": None}, "qzeros is missing"),
        ({"scales": torch.ones(4, 15).half()}, r"scales is F16 \[4, 15\]"),
        ({"scales": torch.full((4, 16), torch.inf).half()}, "not finite"),
        ({"qweight": torch.ones(7, 16, dtype=torch.int32)}, "56 inputs are not a multiple of the group size 16"),
        ({"qweight": torch.ones(8, 12, dtype=torch.int32)}, "12 outputs are not a multiple of 8"),
        ({"g_idx": torch.zeros(63, dtype=torch.int32)}, r"g_idx is I32 \[63\]"),
    ],
)
def test_tensors_that_disagree(tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str) -> None:
    path = written(tmp_path / "m", "gptq", {MODULE: random_linear(int_scheme(4, 16, True))})
    tensors = load_file(path / "model.safetensors") | {f"{MODULE}.{name}": part for name, part in changes.items()}
    folder(path, {name: part for name, part in tensors.items() if part is not None},
           json.loads((path / "config.json").read_text()))  # fmt: skip
    with pytest.raises(CheckpointError, match=message):
        read(path, "gptq")


def test_one_scheme_for_a_checkpoint() -> None:
    with pytest.raises(
        UnsupportedError, match="4 bits in groups of 16, 8 bits in groups of -1; use compressed-tensors"
    ):
        get_format("gptq_v2").config_entry({"a": int_scheme(4, 16), "b": int_scheme(8, -1)})
    with pytest.raises(UnsupportedError, match="no place for int8 activations"):
        get_format("gptq_v2").config_entry({"a": int_scheme(8, -1)}, activations="int8")
