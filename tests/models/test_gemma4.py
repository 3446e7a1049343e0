"""Gemma 4: what its configurations mean, what the KV cache holds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmkit.config import EngineConfig
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.kv_dtype import FLOAT32
from lmkit.models import load_spec
from lmkit.models.kv_layout import layout_of
from lmkit.models.shard import Shard
from lmkit.models.source import ModelSource
from lmkit.models.stage import Stage
from lmkit.qtensor import QTensor
from lmkit.quant.run import prepare
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from tests.models import tiny
from tests.quant.helpers import CLIP, SCALE, recipe, tiny_checkpoint

SHORT = {"num_samples": 2, "seq_len": 24}


def config(tmp_path: Path, name: str, **changes: Any) -> dict[str, Any]:
    tiny.make(tmp_path, name)
    found: dict[str, Any] = json.loads((tmp_path / "config.json").read_text()) | changes
    return {key: value for key, value in found.items() if value != "absent"}


def generate(engine: Engine) -> list[int]:
    engine.add(Request(request_id="a", prompt_ids=[5, 6, 7], params=SamplingParams(max_tokens=3, ignore_eos=True)))
    outputs = [output for _ in iter(engine.has_work, False) for output in engine.step()]
    assert [output.error for output in outputs if output.error] == []
    return [token for output in outputs for token in output.token_ids]


def test_published_sizes_of_layers_without_a_window_are_read(tmp_path: Path) -> None:
    """Files of before transformers 5.23 name them once."""
    written = config(tmp_path, "gemma4-values")
    older = config(tmp_path, "gemma4-values", per_layer_config="absent", global_head_dim=32,
                   num_global_key_value_heads=1)  # fmt: skip
    assert load_spec(older) == load_spec(written)
    assert [(layer.num_kv_heads, layer.head_dim) for layer in load_spec(older).layers] == [(2, 16), (2, 16), (1, 32)]


def test_layers_that_read_the_keys_of_others_take_no_memory(tmp_path: Path) -> None:
    spec = load_spec(config(tmp_path, "gemma4"))
    layout = layout_of(spec, 0, [(FLOAT32, FLOAT32)] * 7)
    places = layout.places()
    assert [layer.kv_from for layer in spec.layers] == [None, None, None, None, 2, 3, 3]
    assert [places[4], places[5], places[6]] == [places[2], places[3], places[3]]
    assert [layer.kv_token_bytes(FLOAT32, FLOAT32) for layer in spec.layers] == [256, 512, 256, 512, 0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "error", "line"),
    [
        ({"use_bidirectional_attention": "all"}, UnsupportedError, "causal models only"),
        ({"num_kv_shared_layers": 6}, CheckpointError, "num_kv_shared_layers leaves layers of .*full_attention"),
        ({"per_layer_config": {"1": {"hidden_size": 8}}}, UnsupportedError, "layer 1 has more than head_dim"),
        ({"rope_parameters": {"full_attention": {}}}, CheckpointError, "nothing for sliding_attention"),
        ({"vocab_size_per_layer_input": 198}, CheckpointError, "198 is less than vocab_size 199"),
    ],
)
def test_configurations_that_cannot_run_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], line: str
) -> None:
    with pytest.raises(error, match=line):
        load_spec(config(tmp_path, "gemma4", **changes))


def test_several_processes_are_refused(tmp_path: Path) -> None:
    tiny.make(tmp_path / "experts", "gemma4-moe")
    with pytest.raises(UnsupportedError, match="tp=2: experts beside a dense MLP"):
        Shard(0, 2).model(ModelSource(tmp_path / "experts").spec)
    tiny.make(tmp_path, "gemma4")
    with pytest.raises(UnsupportedError, match="pp=2: layers of this model share keys and values"):
        Stage(0, 2).layers(ModelSource(tmp_path).spec)


def test_decode_steps_are_captured(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "gemma4", num_hidden_layers=7)
    engine = Engine(str(tmp_path), EngineConfig(packed_cache=False, max_model_len=64, max_batch_size=2))
    assert len(generate(engine)) == 3
    captured = engine.runner._captured._captured
    engine.close()
    assert captured
    assert all(captured.values()), "a decode step computes something with torch"


@pytest.mark.parametrize("name", ["gemma4-values", "gemma4-moe"])
def test_it_is_quantized_with_text_and_served(tmp_path: Path, name: str) -> None:
    source, out = tiny_checkpoint(tmp_path / "source", name, num_hidden_layers=2), tmp_path / "out"
    prepare(source, recipe(SCALE, CLIP, rounder={"step": "gptq"}, calibration=SHORT)).run(out)
    before, found = ModelSource(source), ModelSource(out)
    weights = found.layer_weights(1)
    assert "attn.v" not in weights
    assert all(isinstance(weights[role], QTensor) for role in ("attn.q", "attn.k", "attn.o"))
    assert float(weights["stream_scale"]) == float(before.layer_weights(1)["stream_scale"])
    engine = Engine(str(out), EngineConfig(packed_cache=False, max_model_len=64, max_batch_size=1, kv_dtype="int8"))
    assert len(generate(engine)) == 3
    engine.close()


def test_layers_that_read_the_keys_of_others_are_rounded_alone(tmp_path: Path) -> None:
    source, out = tiny_checkpoint(tmp_path / "source", "gemma4", num_hidden_layers=7), tmp_path / "out"
    with pytest.raises(UnsupportedError, match="only rounded: use a recipe of rtn_"):
        prepare(source, recipe(calibration=SHORT))
    prepare(source, recipe(calibration={"dataset": "none"})).run(out)
    weights = ModelSource(out).layer_weights(6)
    assert not isinstance(weights["per_layer.gate"], QTensor)
    assert isinstance(weights["attn.q"], QTensor)
    engine = Engine(str(out), EngineConfig(packed_cache=False, max_model_len=64, max_batch_size=1))
    assert len(generate(engine)) == 3
    engine.close()
