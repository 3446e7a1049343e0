"""The tensors that a linear needs in each format, found without reading any."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.parts import missing_parts
from lmkit.qtensor import QTensor, float8_scheme, int_scheme
from tests.formats.linears import random_linear, written

BYTES, BLOCKS = int_scheme(8, -1, True), float8_scheme(16, 16)


@pytest.mark.parametrize(
    ("name", "linear", "activations"),
    [
        ("awq", random_linear(int_scheme(4, 16)), "none"),
        ("gptq_v2", random_linear(int_scheme(4, 16)), "none"),
        ("compressed-tensors", random_linear(int_scheme(4, 16, True)), "none"),
        ("compressed-tensors", random_linear(BYTES), "int8"),
        ("fp8", random_linear(BLOCKS, dtype=torch.float32), "none"),
        ("awq", torch.ones(16, 64), "none"),
    ],
    ids=["awq", "gptq", "packed", "bytes", "fp8", "dense"],
)
def test_missing_parts(tmp_path: Path, name: str, linear: QTensor | torch.Tensor, activations: str) -> None:
    beside = {"other": random_linear(linear.scheme if isinstance(linear, QTensor) else int_scheme(4, 16))}
    path = written(tmp_path / "whole", name, {"m": linear, **beside}, activations=activations)  # type: ignore[arg-type]
    file = path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    with CheckpointReader(path) as reader:
        assert missing_parts(reader, "m") == missing_parts(reader, "other") == []
        assert missing_parts(reader, "gone") == ["gone.weight"]
    own = [part for part in tensors if part.startswith("m.") and part not in ("m.g_idx", "m.weight_zero_point")]
    for lost in own:
        if lost in ("m.weight_scale", "m.weight_scale_inv") and "m.weight" in tensors:
            continue  # then it is a weight of another type, which is refused when it is read
        safetensors.torch.save_file({part: tensor for part, tensor in tensors.items() if part != lost}, file)
        with CheckpointReader(path) as reader:
            assert missing_parts(reader, "m") == [lost]
