"""FP8 in blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.base import get_format, resolve_format
from lmkit.qtensor import QuantScheme, float8_scheme, int_scheme
from tests.formats.files import folder
from tests.formats.linears import MODULE, assert_same, random_linear, read, written

SCHEME = float8_scheme(128, 128)


def test_there_and_back(tmp_path: Path) -> None:
    """The last blocks are cut off in both directions."""
    weight = random_linear(SCHEME, (200, 300), dtype=torch.float32)
    path = written(tmp_path / "m", "fp8", {MODULE: weight, "a.b": torch.ones(2, 2)})
    assert_same(read(path, "fp8"), weight)
    tensors = load_file(path / "model.safetensors")
    assert tensors[f"{MODULE}.weight_scale_inv"].shape == (2, 3)
    assert tensors[f"{MODULE}.weight"].dtype == torch.float8_e4m3fn
    assert json.loads((path / "config.json").read_text())["quantization_config"] == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["a.b", "lm_head"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        (SCHEME, None),
        (float8_scheme(), "blocks; use compressed-tensors"),
        (float8_scheme(-1, -1), "blocks; use compressed-tensors"),
        (int_scheme(8, 128), "8-bit integers, fp8 has floats"),
    ],
)
def test_can_write(scheme: QuantScheme, reason: str | None) -> None:
    said = get_format("fp8").can_write((256, 256), scheme)
    assert said is None if reason is None else reason in str(said)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.full((200, 300), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)}, "not finite"),
        ({"weight": torch.ones(200, 300)}, "weight is F32"),
        (
            {"weight_scale_inv": torch.ones(2, 2)},
            r"weight_scale_inv is F32 \[2, 2\].*ask for F16 or BF16 or F32 \[2, 3\]",
        ),
        ({"weight": None}, "weight is missing"),
        ({"weight_scale_inv": None}, "weight is F8_E4M3"),
    ],
)
def test_tensors_that_disagree(tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str) -> None:
    path = written(tmp_path / "m", "fp8", {MODULE: random_linear(SCHEME, (200, 300), dtype=torch.float32)})
    tensors = load_file(path / "model.safetensors") | {f"{MODULE}.{name}": part for name, part in changes.items()}
    folder(path, {name: part for name, part in tensors.items() if part is not None},
           json.loads((path / "config.json").read_text()))  # fmt: skip
    with pytest.raises(CheckpointError, match=message):
        read(path, "fp8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        ({"weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\]"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is not a list"),
        ({"expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
    ],
)
def test_config_refused(changes: dict[str, Any], message: str) -> None:
    entry = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    assert resolve_format({"quantization_config": entry}).name == "fp8"
    with pytest.raises(UnsupportedError, match=message):
        resolve_format({"quantization_config": entry | changes})
