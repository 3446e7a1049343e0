"""Models with linear attention are quantized a layer at a time, and served in 4 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit.config import EngineConfig
from lmkit.errors import ConfigError
from lmkit.formats.kv_config import load_kv_config
from lmkit.kv_dtype import INT8
from lmkit.layers.batch import whole_batch
from lmkit.layers.blocks.delta import DeltaSpec
from lmkit.models.kv_storage import KVStorage, allocate
from lmkit.models.loader import load_model
from lmkit.models.source import ModelSource
from lmkit.qtensor import QTensor
from lmkit.quant.run import prepare
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from tests.quant.helpers import CLIP, RTN, SCALE, recipe, tiny_checkpoint

SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "linear_value_head_dim": 16}  # one layer of each kind
SHORT = {"num_samples": 2, "seq_len": 24}


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
def test_it_is_quantized_and_served(tmp_path: Path, name: str) -> None:
    source, out = tiny_checkpoint(tmp_path / "source", name, **SHAPE), tmp_path / "out"
    steps: list[Any] = [SCALE, CLIP]
    prepare(source, recipe(*steps, rounder={"step": "gptq"}, kv={"bits": 8}, calibration=SHORT)).run(out)
    before, found = ModelSource(source), ModelSource(out)
    delta = found.spec.layers[0].mixer
    assert isinstance(delta, DeltaSpec)
    weights = found.layer_weights(0)
    assert all(isinstance(weights[role], QTensor) for role in (*delta.inputs, "attn.o"))
    assert not any(isinstance(weights[role], QTensor) for role in delta.gates)
    for role in delta.matrices:
        assert torch.equal(weights[role], before.layer_weights(0)[role])
    gated = found.layer_weights(1)
    assert all(isinstance(gated[role], QTensor) for role in ("attn.q", "attn.gate", "attn.o"))
    kv = load_kv_config(out)
    assert kv is not None
    assert [(layer.k, layer.v) for layer in kv.layers] == [("dense", "dense"), ("int8", "int8")]
    engine = Engine(str(out), EngineConfig(packed_cache=False, max_model_len=64, max_batch_size=2))
    assert engine.info.kv_dtype == "int8"
    for i in range(2):
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        engine.add(Request(request_id=str(i), prompt_ids=[5, 6, 7 + i], params=params))
    tokens = [token for _ in iter(engine.has_work, False) for output in engine.step() for token in output.token_ids]
    captured = engine.runner._captured._captured
    engine.close()
    assert len(tokens) == 6
    assert captured
    assert all(captured.values()), "a decode step computes something with torch"


def test_rounding_while_it_loads_leaves_the_same_linears(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "qwen3.5", **SHAPE)
    weights = ModelSource(source, rounding="int4").layer_weights(0)
    assert {role for role, weight in weights.items() if isinstance(weight, QTensor)} == {
        "attn.qkv", "attn.z", "attn.o", "mlp.gate", "mlp.up", "mlp.down"
    }  # fmt: skip


def logits(path: Path) -> torch.Tensor:
    decoder = load_model(path)
    batch, num_blocks = whole_batch([list(range(40, 70))], 16)
    storages = [KVStorage(INT8, INT8)] * decoder.spec.num_layers
    return decoder(batch, allocate(decoder.spec.layers, storages, num_blocks, 16, 64))


@pytest.mark.parametrize("steps", [(RTN,), (RTN, {"step": "signround", "iters": 2, "batch": 1})])
def test_eight_bits_come_close(tmp_path: Path, steps: tuple[dict[str, Any], ...]) -> None:
    """Also with gradients through the states."""
    kinds = ["linear_attention", "full_attention"]
    source = tiny_checkpoint(tmp_path / "source", "qwen3-next-dense", layer_types=kinds, **SHAPE)
    out, scheme = tmp_path / "out", {"bits": 8, "group_size": 32}
    prepare(source, recipe(*steps, rounder=None, scheme=scheme, format="compressed-tensors", calibration=SHORT)).run(
        out
    )
    exact, rounded = logits(source), logits(out)
    assert (rounded - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["lfm2", "mamba2", "granite-hybrid"])
def test_other_recurrent_blocks_are_quantized_and_served(tmp_path: Path, family: str, bits: int) -> None:
    """By the steps of the default recipe. All linears are rounded, and nothing else; the KV cache has as few bits."""
    source, out = tiny_checkpoint(tmp_path / "source", family), tmp_path / "out"
    steps: list[Any] = [SCALE, CLIP]
    scheme = {"bits": bits, "group_size": 32}
    rounder = {"step": "gptq"}
    sections: dict[str, Any] = {"scheme": scheme, "format": "compressed-tensors"}
    if ModelSource(source).spec.has_kv:
        sections["kv"] = {"bits": bits}
    prepare(source, recipe(*steps, rounder=rounder, calibration=SHORT, **sections)).run(out)
    before, found = ModelSource(source), ModelSource(out)
    for index, layer in enumerate(found.spec.layers):
        weights = found.layer_weights(index)
        assert all(isinstance(weights[role], QTensor) for role in layer.linears)
        assert all(torch.equal(weights[role], before.layer_weights(index)[role]) for role in layer.matrices)
    exact, rounded = logits(source), logits(out)
    assert (rounded - exact).norm() < {4: 0.5, 8: 0.05}[bits] * exact.norm()
    engine = Engine(str(out), EngineConfig(packed_cache=False, max_model_len=64, max_batch_size=2))
    if found.spec.has_kv:
        assert engine.info.kv_dtype == f"int{bits}"
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    engine.add(Request(request_id="a", prompt_ids=[5, 6, 7], params=params))
    tokens = [token for _ in iter(engine.has_work, False) for output in engine.step() for token in output.token_ids]
    engine.close()
    assert len(tokens) == 3


def test_a_storage_for_a_layer_without_keys_is_refused(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "qwen3-next", **SHAPE)
    with pytest.raises(ConfigError, match=r"kv\.layers: layer 0 has no keys and values"):
        prepare(source, recipe(kv={"bits": 8, "layers": {0: {"k_bits": 4}}}, calibration=SHORT))
