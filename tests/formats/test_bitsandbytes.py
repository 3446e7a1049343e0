"""bitsandbytes. The file beside this one was written and decoded by bitsandbytes 0.50.2 on a CPU, with the tensor names
of transformers; `expected` is what its functions give back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.base import resolve_format
from lmkit.formats.convert import convert
from lmkit.qtensor import QTensor, dequantize
from tests.formats.files import folder
from tests.formats.linears import MODULE, read, read_any

CT = "compressed-tensors"
ENTRY: dict[str, Any] = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "llm_int8_threshold": 6.0,
    "bnb_4bit_quant_storage": "uint8", "bnb_4bit_use_double_quant": True, "llm_int8_skip_modules": None,
}  # fmt: skip
STORED = load_file(Path(__file__).with_name("bitsandbytes.safetensors"))


def weight(path: Path, name: str, changes: dict[str, torch.Tensor] | None = None) -> torch.Tensor | QTensor:
    tensors = {key: tensor for key, tensor in STORED.items() if key.startswith(name + ".") and "expected" not in key}
    return read_any(folder(path, tensors | (changes or {}), {"quantization_config": ENTRY}), "bitsandbytes", name)


@pytest.mark.parametrize("name", ["nf4", "fp4", "nf4_plain"])
def test_four_bits_have_the_bits_of_bitsandbytes(tmp_path: Path, name: str) -> None:
    found = weight(tmp_path / "m", name)
    assert isinstance(found, torch.Tensor)
    assert found.dtype == STORED[name + ".expected"].dtype
    assert torch.equal(found, STORED[name + ".expected"])


def test_eight_bits_keep_their_codes(tmp_path: Path) -> None:
    found = weight(tmp_path / "m", "int8")
    assert isinstance(found, QTensor)
    assert torch.equal(found.codes.int() - 128, STORED["int8.weight"].int())
    torch.testing.assert_close(dequantize(found), STORED["int8.expected"], rtol=3e-7, atol=0)


def test_eight_bits_become_compressed_tensors(tmp_path: Path) -> None:
    tensors = {f"{MODULE}.{key[5:]}": tensor for key, tensor in STORED.items() if key.startswith("int8.")}
    tensors.pop(f"{MODULE}.expected")
    source = folder(tmp_path / "bytes", tensors, {"quantization_config": ENTRY})
    convert(source, tmp_path / "out", "compressed-tensors")
    found = [read(path, name, MODULE) for path, name in ((source, "bitsandbytes"), (tmp_path / "out", CT))]
    assert torch.equal(*map(dequantize, found))


NOT_UTF8 = torch.tensor([*b'{"dtype":"', 255, *b'"}'], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "part", "value", "message"),
    [
        ("nf4", "weight.absmax", torch.zeros(23, dtype=torch.uint8), r"absmax is U8 \[23\]"),
        ("nf4", "weight.quant_map", torch.full((16,), torch.nan), "quant_map holds numbers that are not finite"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", torch.tensor([123], dtype=torch.uint8), "nf4: .*truncated"),
        (
            "nf4",
            "weight.quant_state.bitsandbytes__nf4",
            NOT_UTF8,
            "nf4: .*utf-8",
        ),
        ("int8", "weight_format", torch.tensor(1, dtype=torch.uint8), "only weights in rows are read"),
        ("int8", "SCB", torch.ones(3), r"SCB is F32 \[3\]"),
    ],
)
def test_damage(tmp_path: Path, name: str, part: str, value: torch.Tensor, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        weight(tmp_path / "m", name, {f"{name}.{part}": value})


def test_other_storage_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="bnb_4bit_quant_storage is 'bfloat16', expected 'uint8'"):
        resolve_format({"quantization_config": ENTRY | {"bnb_4bit_quant_storage": "bfloat16"}})
