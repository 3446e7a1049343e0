"""MXFP4 against the decoder of transformers, and gpt-oss as it is published."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lmkit.codes import Integers
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.kernels import ops
from lmkit.kv_dtype import FLOAT32
from lmkit.layers.batch import allocate_kv, whole_batch
from lmkit.models import load_spec
from lmkit.models.families.gpt_oss import BUILT
from lmkit.models.loader import load_model
from lmkit.models.source import ModelSource
from lmkit.qtensor import QTensor, dequantize, plain
from tests.models import tiny

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}


def packed(folder: Path) -> tuple[Path, Path]:
    """gpt-oss with random experts in MXFP4, and the same in floats, which transformers decodes."""
    tiny.make(folder / "plain", "gpt-oss", **SIZES)
    tensors, dense = (load_file(folder / "plain" / "model.safetensors") for _ in range(2))
    config = json.loads((folder / "plain" / "config.json").read_text())
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        tensors[name + "_blocks"], tensors[name + "_scales"] = blocks, scales
        dense[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    for path, content, entry in (("mxfp4", tensors, {"quantization_config": {"quant_method": "mxfp4"}}),
                                 ("dense", dense, {})):  # fmt: skip
        (folder / path).mkdir()
        save_file(content, folder / path / "model.safetensors", {"format": "pt"})
        (folder / path / "config.json").write_text(json.dumps(config | entry))
    return folder / "mxfp4", folder / "dense"


def logits(path: Path) -> Tensor:
    decoder = load_model(path, activations="exact")
    batch, num_blocks = whole_batch([list(range(3, 30))], 8)
    kv = [allocate_kv(num_blocks, x.num_kv_heads, 8, x.head_dim, (FLOAT32, FLOAT32)) for x in decoder.spec.layers]
    return decoder(batch, kv)


def test_experts_keep_their_values(tmp_path: Path) -> None:
    coded, dense = (ModelSource(path).layer_weights(1) for path in packed(tmp_path))
    for role, weight in coded.items():
        if role.startswith("mlp.experts.") and not role.endswith(".bias"):
            assert isinstance(weight, QTensor)
            weight = dequantize(weight)
        assert isinstance(weight, Tensor)
        assert torch.equal(weight, dense[role]), role


@pytest.mark.parametrize(
    ("device", "activations", "bits", "group_bytes"),
    [("cpu", "int8", 4, 5), ("cpu", "exact", 8, 8), ("cuda", "auto", 4, 4)],
)
def test_the_plan_counts_what_is_loaded(
    tmp_path: Path, device: str, activations: str, bits: int, group_bytes: int
) -> None:
    """Codes of 4 or 8 bits, and for each group a float32 scale and, on a CPU, a zero (tests/formats/test_nvfp4.py)."""
    path, _ = packed(tmp_path)
    source = ModelSource(path)
    loaded = 0
    for index in range(source.spec.num_layers):
        for weight in source.layer_weights(index).values():
            if isinstance(weight, QTensor):
                loaded += weight.codes.numel() * bits // 8 + weight.scales.numel() * group_bytes
            else:
                loaded += weight.nbytes
    loaded += sum(
        source.reader.info(f"{name}.weight").nbytes for name in ("model.embed_tokens", "lm_head", "model.norm")
    )
    assert source.weight_bytes("float32", "auto", device, activations) == loaded


def test_the_same_logits(tmp_path: Path) -> None:
    coded, dense = map(logits, packed(tmp_path))
    torch.testing.assert_close(coded, dense, rtol=1e-4, atol=1e-4)


def test_four_bits_stay_four(tmp_path: Path) -> None:
    """The product has the bits of one with codes of 8 bits."""
    expert = ModelSource(packed(tmp_path)[0]).layer_weights(0)["mlp.experts.0.up"]
    assert isinstance(expert, QTensor)
    x, kernel = torch.randn(9, 64), ops.linear_w8a8.select("cpu", group_size=32)
    of_bytes = replace(plain(expert), scheme=replace(expert.scheme.plain, codes=Integers(8, symmetric=True)))
    short, wide = kernel.pack(expert), kernel.pack(of_bytes)
    assert 2 * short.codes.numel() == wide.codes.numel()
    assert torch.equal(kernel(x, short, None), kernel(x, wide, None))


def test_scales_of_all_sizes(tmp_path: Path) -> None:
    """The smallest one is below the normal numbers of float32."""
    path, _ = packed(tmp_path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.experts.down_proj"
    scales = torch.arange(tensors[name + "_scales"].numel()).remainder(255).to(torch.uint8)
    tensors[name + "_scales"] = scales.view(tensors[name + "_scales"].shape)
    save_file(tensors, file, {"format": "pt"})
    weights = ModelSource(path).layer_weights(0)
    expected = convert_moe_packed_tensors(tensors[name + "_blocks"], tensors[name + "_scales"], dtype=torch.float32)
    for expert in range(5):
        weight = weights[f"mlp.experts.{expert}.down"]
        assert isinstance(weight, QTensor)
        assert torch.equal(dequantize(weight), expected[expert].T)
    tensors[name + "_scales"].fill_(255)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="not finite"):
        ModelSource(path).layer_weights(0)


def test_what_is_not_built_is_refused(tmp_path: Path) -> None:
    assert {"swiglu_limit": ops.CLAMP, "swiglu_alpha": ops.SWISH} == BUILT
    path, _ = packed(tmp_path)
    config = json.loads((path / "config.json").read_text())
    with pytest.raises(UnsupportedError, match=r"swiglu_limit = 5\.0 is not supported; lmkit runs 7\.0"):
        load_spec(config | {"swiglu_limit": 5.0})
    config["quantization_config"]["rotation"] = "hadamard"
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="mxfp4: rotation is 'hadamard'"):
        ModelSource(path)


@pytest.mark.parametrize("lost", ["gate_up_proj_blocks", "down_proj_scales", "gate_up_proj_bias"])
def test_a_lost_tensor_is_named(tmp_path: Path, lost: str) -> None:
    path, _ = packed(tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors[f"model.layers.1.mlp.experts.{lost}"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.0\.\w+_proj\.\w+ is missing"):
        ModelSource(path)
