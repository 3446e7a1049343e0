"""Which storage each layer gets: what is asked for, then kv_config.json, then kv_cache_scheme, then the dense type."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmkit.errors import CheckpointError
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.formats.kv_config import KVConfig, KVLayerConfig, save_kv_config
from lmkit.formats.kv_scheme import KVScheme
from lmkit.kernels import ops
from lmkit.kernels.reference.kv import mean_keys, read_blocks
from lmkit.kv_dtype import BFLOAT16, FLOAT32, FP8, INT4, INT8, KVDtype
from lmkit.models import load_spec
from lmkit.models.kv_storage import KVStorage, allocate, resolve_storage, table_bytes
from lmkit.models.kv_transform import KVTransform
from lmkit.models.spec import ModelSpec

SIZES = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 64,
}  # fmt: skip
MEAN = (((1, 9.0, -4.0),), ())


def spec(**changes: Any) -> ModelSpec:
    return load_spec(SIZES | changes)


def reader(
    folder: Path, tensors: dict[str, Tensor] | None = None, scheme: dict[str, Any] | None = None
) -> CheckpointReader:
    (folder / "source").mkdir()
    (folder / "model").mkdir()
    writer = CheckpointWriter(folder / "model")
    for name, tensor in ({"x": torch.zeros(1)} | (tensors or {})).items():
        writer.add(name, tensor)
    entry = {} if scheme is None else {"quantization_config": {"kv_cache_scheme": scheme}}
    writer.finish(SIZES | entry, folder / "source")
    return CheckpointReader(folder / "model")


def scales(k: Any, v: Any) -> dict[str, Tensor]:
    where = ("model.layers.0.self_attn.", "model.layers.1.self_attn.")
    return {at + name: torch.tensor(x) for at in where for name, x in (("k_scale", k), ("v_scale", v))}


def test_nothing_said(tmp_path: Path) -> None:
    source = reader(tmp_path)
    assert resolve_storage(source, spec(), None, BFLOAT16) == [KVStorage(BFLOAT16, BFLOAT16)] * 2
    assert resolve_storage(source, spec(), FP8, BFLOAT16) == [KVStorage(FP8, FP8)] * 2


def test_kv_config(tmp_path: Path) -> None:
    source = reader(tmp_path, scheme=KVScheme(type="int").entry())  # the file goes first
    layers = (
        KVLayerConfig(k="int4", v="dense", key_mean=MEAN, hadamard=True),
        KVLayerConfig(k="dense", v="fp8", key_mean=MEAN, hadamard=True),
    )
    save_kv_config(KVConfig(num_kv_heads=2, head_dim=16, layers=layers), source.path)
    first, second = resolve_storage(source, spec(), None, FLOAT32)
    assert first == KVStorage(INT4, FLOAT32, KVTransform(MEAN, hadamard=True))
    assert second == KVStorage(FLOAT32, FP8)
    int8 = KVStorage(INT8, INT8, KVTransform(MEAN, hadamard=True))
    assert resolve_storage(source, spec(), INT8, FLOAT32) == [int8] * 2
    assert resolve_storage(source, spec(), BFLOAT16, FLOAT32) == [KVStorage(BFLOAT16, BFLOAT16)] * 2
    assert table_bytes(spec(), [first, second], 100) == 4 * 16 * 100
    assert table_bytes(spec(), [second, second], 100) == 0
    rope = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}
    with pytest.raises(CheckpointError, match="layer 0: key_mean: angles depend on"):
        resolve_storage(source, spec(rope_parameters=rope), None, FLOAT32)
    layer = spec().layers[0]
    layer = layer.having(rope=dataclasses.replace(layer.rope, rotary_dim=2))
    partial = dataclasses.replace(spec(), layers=(layer, layer))
    with pytest.raises(CheckpointError, match="pair 1 does not turn, RoPE has 1 pairs"):
        resolve_storage(source, partial, None, FLOAT32)


def test_heads_with_fewer_pairs(tmp_path: Path) -> None:
    storage = KVStorage(FLOAT32, FLOAT32, KVTransform((((1, 9.0, -4.0), (0, 1.0, 2.0)), ((7, 3.0, 1.0),))))
    (layer,) = allocate(spec().layers[:1], [storage], 4, 8, 30)
    mean = layer.k.mean
    assert mean is not None
    assert [len(set(pairs)) for pairs in mean.pairs.tolist()] == [2, 2]
    at_zero = mean_keys(mean, 1)[:, 0]
    assert at_zero.nonzero().tolist() == [[0, 0], [0, 1], [0, 8], [0, 9], [1, 7], [1, 15]]
    assert at_zero[1, [7, 15]].tolist() == [3.0, 1.0]


@pytest.mark.parametrize(("kind", "dtype"), [("int", INT8), ("float", FP8)])
def test_static_scales_quantize(tmp_path: Path, kind: Any, dtype: KVDtype) -> None:
    scheme = KVScheme(type=kind, strategy="attn_head").entry()
    source = reader(tmp_path, scales([[[0.5]], [[0.25]]], [[[0.125]], [[0.5]]]), scheme)
    storage = resolve_storage(source, spec(), None, FLOAT32)[1]
    assert storage == KVStorage(dtype, dtype, k_scales=(0.5, 0.25), v_scales=(0.125, 0.5))
    kv = allocate(spec().layers[:1], [storage], 1, 4, 4)[0]
    x = torch.tensor([1.26, -3.1, 1000.0, -1000.0] * 4).expand(4, 2, 16)
    ops.kv_append.select("cpu", num_heads=4, num_kv_heads=2, head_dim=16)(x, x, kv.k, kv.v, torch.arange(4).int())
    scale = torch.tensor([0.125, 0.5])[:, None, None]
    back = read_blocks(kv.v, torch.tensor([0]), 4)
    if kind == "int":
        expected = (x.transpose(0, 1) / scale).round().clamp(-128, 127) * scale
    else:
        expected = (x.transpose(0, 1) / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(back, expected)


def test_other_schemes(tmp_path: Path) -> None:
    scheme = KVScheme(type="float").entry()
    source = reader(tmp_path, scales([0.1], 0.2), scheme)
    (k_scale, _), (v_scale, _) = (
        getattr(resolve_storage(source, spec(), None, FLOAT32)[0], n) for n in ("k_scales", "v_scales")
    )
    assert (k_scale, v_scale) == (pytest.approx(0.1, rel=2**-11), pytest.approx(0.2, rel=2**-11))
    assert resolve_storage(source, spec(), INT4, FLOAT32) == [KVStorage(INT4, INT4)] * 2
    source.config["quantization_config"]["kv_cache_scheme"]["dynamic"] = True
    assert resolve_storage(source, spec(), None, FLOAT32) == [KVStorage(FP8, FP8)] * 2


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "has a kv_cache_scheme, but tensor model.layers.0.self_attn.k_scale is missing"),
        (scales([0.1, 0.1], [0.1]), r"k_scale is \[2\], expected 1 numbers"),
        (scales([0.1], [0.0]), "v_scale is not within"),
        (scales([float("nan")], [0.1]), "k_scale is not within"),
        (scales([1e4], [0.1]), "k_scale is not within"),
    ],
)
def test_scales_that_cannot_be_used(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    source = reader(tmp_path, tensors, KVScheme(type="float").entry())
    with pytest.raises(CheckpointError, match=message):
        resolve_storage(source, spec(), None, FLOAT32)
