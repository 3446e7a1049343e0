"""Gemma 4: what its configurations mean, what the KV cache holds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmkit.config import EngineConfig
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.kv_dtype import FLOAT32
from lmkit.layers.batch import whole_batch
from lmkit.models import load_spec
from lmkit.models.kv_layout import layout_of
from lmkit.models.kv_storage import KVStorage, allocate
from lmkit.models.loader import load_model
from lmkit.models.shard import Shard
from lmkit.models.source import ModelSource
from lmkit.models.stage import Stage
from lmkit.qtensor import QTensor
from lmkit.quant.budget import disk_bytes
from lmkit.quant.data.hidden_states import Stream
from lmkit.quant.layer.observe import sample_rows
from lmkit.quant.layer.passes import LayerPass
from lmkit.quant.report.evaluate import encode_text, evaluate
from lmkit.quant.run import prepare
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from tests.models import tiny
from tests.quant.helpers import CLIP, RTN, SCALE, recipe, tiny_checkpoint
from tests.quant.killed import digest

KINDS = ["sliding_attention", "full_attention"]
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
        ({"use_bidirectional_attention": "all"}, UnsupportedError, "through sliding windows"),
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


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with vectors for each token and layer, whose last two layers read the keys of others. Embeddings of few
    directions make the inputs of its linears alike, as those of trained models are."""
    layers = {"num_hidden_layers": 4, "layer_types": KINDS * 2, "num_kv_shared_layers": 2}
    path = tiny_checkpoint(tmp_path_factory.mktemp("shared"), "gemma4", **layers)
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    vocab, hidden = tensors[name].shape
    torch.manual_seed(0)
    few = torch.randn(vocab, 12) @ torch.randn(12, hidden) + 0.1 * torch.randn(vocab, hidden)
    save_file(tensors | {name: few.to(tensors[name].dtype)}, path / "model.safetensors", {"format": "pt"})
    return path


def test_each_stream_is_the_hidden_states_of_the_decoder(shared: Path, tmp_path: Path) -> None:
    """In whole layers and in their parts, from memory and from files, whatever keys the other stream has."""
    source, decoder = ModelSource(shared), load_model(shared, dtype="float32")
    rows = torch.randint(4096, (5, 24), generator=torch.Generator().manual_seed(1))
    decoder.kept = {index: torch.empty(rows.numel(), 64) for index in range(1, 5)}
    batch, num_blocks = whole_batch(rows.tolist(), 16)
    storages = [KVStorage(FLOAT32, FLOAT32)] * 4
    decoder.hidden(batch, allocate(decoder.spec.layers, storages, num_blocks, 16, 24))
    for folder, exact in ((None, False), (tmp_path, True)):
        stream = Stream.embedded(source, rows, exact=True, batch_tokens=50, folder=folder)
        for index in range(4):
            layer = source.layer(index, torch.float32)
            whole = torch.cat([output for _, output in stream.outputs(layer, exact=exact)])
            torch.testing.assert_close(whole, decoder.kept[index + 1], rtol=1e-4, atol=1e-4)
            in_parts = LayerPass(stream, layer, exact=exact)
            for tokens in (tokens for number in range(len(stream)) for tokens in stream.slices(number, 3)):
                in_parts.move(tokens, in_parts.end)
            other = layer.with_weights(layer.weights | {"attn.k_norm": torch.rand(layer.spec.head_dim)})
            for number, output in stream.outputs(other, exact=not exact):
                stream.put(number, output, exact=not exact)
            stream.keep(layer, exact=exact)
            stream.keep(other, exact=not exact)
            stream.advance()
            if folder is not None:
                stream = Stream.embedded(source, rows, exact=True, batch_tokens=50, folder=folder, layer=index + 1)
            found = stream.states(index + 1, exact=exact)
            torch.testing.assert_close(found, decoder.kept[index + 1], rtol=1e-4, atol=1e-4)
    file = tmp_path / "exact-kv-1.f32"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError, match=r"exact-kv-1\.f32: its bytes have changed"):
        Stream.embedded(source, rows, exact=True, batch_tokens=50, folder=tmp_path, layer=4)


def test_the_sample_of_attention_reads_the_keys_of_its_own_tokens(shared: Path) -> None:
    source = ModelSource(shared)
    rows = torch.randint(4096, (5, 24), generator=torch.Generator().manual_seed(1))
    stream = Stream.embedded(source, rows, batch_tokens=50)
    for index in range(2):
        layer = source.layer(index, torch.float32)
        for number, output in stream.outputs(layer):
            stream.put(number, output)
        stream.keep(layer)
        stream.advance()
    layer, every = source.layer(2, torch.float32), 2  # rows 0, 1 and 4
    ids, length = sample_rows(stream.rows_of(every), 24, 20, 10)
    assert ids.tolist() == [*range(10), *range(48, 58)]
    tokens = [*range(10), *range(4 * 24, 4 * 24 + 10)]
    whole = LayerPass(stream, layer)
    for number in range(len(stream)):
        whole.move(stream.slices(number)[0], layer.spec.part_of("attn.o"))
    expected = layer.attention.project(stream.scratch(torch.float32)[tokens, : layer.spec.inner_width(0)])
    sequences, hidden = stream.sampled(ids, length, every), stream.states(2)[tokens]
    stream.inputs(stream.slices(0)[0])  # of other tokens
    found = layer.attention(*layer.mixing.read(hidden)[:2], sequences.at)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_estimate_of_disk_space_counts_what_is_kept(shared: Path, tmp_path: Path) -> None:
    source, rows = ModelSource(shared), torch.zeros(3, 24, dtype=torch.int64)
    Stream.embedded(source, rows, folder=tmp_path)
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir() if file.suffix == ".f32"}
    assert {"vectors.f32", "hidden-kv-0.f32", "hidden-kv-1.f32"} < set(sizes)
    some, more = (recipe(calibration={"num_samples": count, "seq_len": 24}) for count in (3, 6))
    assert disk_bytes(source, more) - disk_bytes(source, some) == sum(sizes.values())


def divergence(path: Path, source: Path) -> float:
    ids = encode_text(path, None, source)
    found = evaluate(path, ids, against=source, activations="exact", kv_dtype="float32", seq_len=64, limit=512)
    assert found.divergence is not None
    return found.divergence.kl_mean


def test_layers_that_read_the_keys_of_others_are_calibrated(shared: Path, tmp_path: Path) -> None:
    """Better than plain rounding. An interrupted run gives the same bytes, and its output is served."""
    out, text = tmp_path / "out", {"num_samples": 12, "seq_len": 64}
    quantizer = prepare(shared, recipe(SCALE | {"grid": 4}, CLIP, rounder={"step": "gptq"}, calibration=text))
    quantizer.run(out)
    prepare(shared, recipe(calibration={"dataset": "none"})).run(tmp_path / "plain")
    kl, plain = divergence(out, shared), divergence(tmp_path / "plain", shared)
    assert kl < plain / 2
    weights = ModelSource(out).layer_weights(3)
    assert not isinstance(weights["per_layer.gate"], QTensor)
    assert isinstance(weights["attn.q"], QTensor)
    engine = Engine(str(out), EngineConfig(packed_cache=False, max_model_len=64, max_batch_size=1))
    assert len(generate(engine)) == 3
    engine.close()

    def stop(what: str, done: int, total: int) -> None:
        if what == "layers" and done > 3 * 4:  # inside the second layer that reads the keys of others
            raise InterruptedError

    again = tmp_path / "again"
    with pytest.raises(InterruptedError):
        quantizer.run(again, progress=stop)
    quantizer.run(again)
    assert digest(again) == digest(out)


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"average_bits": 5, "format": "compressed-tensors"}, "average_bits does not go with layers that read"),
        ({"rounder": None, "steps": [RTN, {"step": "signround"}]}, "signround does not go with layers that read"),
        ({"rounder": None, "steps": [RTN, {"step": "refine"}]}, "refine does not go with layers that read"),
    ],
)
def test_what_computes_layers_alone_is_refused(shared: Path, sections: dict[str, Any], line: str) -> None:
    with pytest.raises(UnsupportedError, match=line):
        prepare(shared, recipe(*sections.pop("steps", ()), calibration=SHORT, **sections))
