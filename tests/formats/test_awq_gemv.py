"""AWQ's layouts "gemv" and "gemv_fast". AutoAWQ 0.2.9 packed the file beside this one from `expected`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.base import get_format, resolve_format
from lmkit.formats.convert import convert
from lmkit.qtensor import QTensor, dequantize, int_scheme
from tests.formats.awq_gemv import repacked, tensors
from tests.formats.files import folder
from tests.formats.linears import MODULE, random_linear, read, written

STORED = load_file(Path(__file__).with_name("awq_gemv.safetensors"))
VERSIONS = {"gemv": "awq_gemv", "gemv_fast": "awq_gemv_fast", "llm-awq": "awq_gemv_fast"}


def stored(path: Path, version: str, group: int, **changes: torch.Tensor | None) -> Path:
    """The packed linear as module `m` of a checkpoint."""
    start = f"{'gemv' if version == 'gemv' else 'gemv_fast'}.{group}."
    parts = {name.removeprefix(start): tensor for name, tensor in STORED.items() if name.startswith(start)} | changes
    entry = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": version}
    content = {f"m.{name}": tensor for name, tensor in parts.items() if tensor is not None}
    return folder(path, content, {"quantization_config": entry})


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("group", [64, 128, -1])
def test_what_autoawq_packed(tmp_path: Path, version: str, group: int) -> None:
    weight = read(stored(tmp_path / "m", version, group), VERSIONS[version], "m")
    assert weight.scheme == int_scheme(4, group)
    for name in ("codes", "zeros", "scales"):
        assert torch.equal(getattr(weight, name), STORED[f"expected.{group}.{name}"]), name
    if version != "gemv":  # the older name
        zeros = STORED[f"gemv_fast.{group}.qzeros"]
        older = read(stored(tmp_path / "n", version, group, qzeros=None, scaled_zeros=zeros), VERSIONS[version], "m")
        assert torch.equal(dequantize(older), dequantize(weight))


@pytest.mark.parametrize("version", ["gemv", "gemv_fast"])
@pytest.mark.parametrize("group", [32, 128])
def test_it_becomes_another_format(tmp_path: Path, version: str, group: int) -> None:
    """And the description that our writer follows is that of AutoAWQ's file."""
    weight = random_linear(int_scheme(4, group), (16, 256))
    source = written(tmp_path / "awq", "awq", {MODULE: weight})
    repacked(source, tmp_path / "gemv", version)
    convert(tmp_path / "gemv", tmp_path / "back", "awq")
    name = "model.safetensors"
    back, start = load_file(tmp_path / "back" / name), load_file(source / name)
    assert back.keys() == start.keys()
    assert all(torch.equal(tensor, start[name]) for name, tensor in back.items())
    expected = (STORED[f"expected.128.{name}"] for name in ("codes", "scales", "zeros"))
    for name, tensor in tensors(QTensor(*expected, int_scheme(4, 128)), version).items():
        assert torch.equal(tensor, STORED[f"{version}.128.{name}"]), name


@pytest.mark.parametrize(
    ("version", "changes", "message"),
    [
        ("gemv", {"qzeros": None}, "m.qzeros is missing"),
        ("gemv", {"qzeros": torch.ones(16, 2, dtype=torch.int32)}, r"m.qzeros is I32 \[16, 2\].*ask for I32 \[16, 1\]"),
        (
            "gemv",
            {"scales": torch.ones(16, 3).half()},
            r"m.scales is F16 \[16, 3\].*ask for F16 or BF16 or F32 \[16, 8\]",
        ),
        ("gemv", {"qweight": torch.ones(16, 24, dtype=torch.int16)}, "m.qweight is I16"),
        ("gemv", {"qweight": torch.ones(16, 47, dtype=torch.int32)}, "376 inputs are not a multiple of 128"),
        ("gemv", {"weight": torch.ones(16, 384)}, "has both qweight and weight"),
        ("gemv_fast", {"qzeros": None}, "m.qzeros is missing"),
        ("gemv_fast", {"qweight": torch.ones(4, 352, dtype=torch.int16)}, "352 inputs are not a multiple of 64"),
        (
            "gemv_fast",
            {"scales": torch.ones(8, 12).half()},
            r"m.scales is F16 \[8, 12\].*ask for F16 or BF16 or F32 \[8, 16\]",
        ),
        ("gemv_fast", {"scales": torch.full((8, 16), torch.inf).half()}, "not finite"),
        ("gemv_fast", {"qzeros": torch.full((8, 16), 0.5).half()}, "m.qzeros are not zeros from 0 to 15 times"),
    ],
)
def test_damage(tmp_path: Path, version: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(stored(tmp_path / "m", version, 128, **changes), VERSIONS[version], "m")


def test_it_is_not_written() -> None:
    weight_format = get_format("awq_gemv")
    assert weight_format.can_write((8, 64), int_scheme(4, 64)) == "awq_gemv weights are read, and not written"
    with pytest.raises(UnsupportedError, match="read, and not written"):
        weight_format.config_entry({"a": int_scheme(4, 64)})


def test_other_versions_are_refused() -> None:
    entry = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "exllama"}
    with pytest.raises(
        UnsupportedError, match=r"awq: version is 'exllama', expected gemm or gemv or gemv_fast or llm-awq$"
    ):
        resolve_format({"quantization_config": entry})
