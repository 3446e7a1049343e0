"""Models whose tokens see the whole text: the hidden states, classes and scores of transformers."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from lmkit.config import EngineConfig
from lmkit.errors import ConfigError, LMKitError, RequestError, UnsupportedError
from lmkit.models.loader import load_model
from lmkit.models.registry import BASE
from lmkit.models.resolved import resolved
from lmkit.quant.report.evaluate import evaluate
from lmkit.quant.run import prepare
from lmkit.serve.embeddings.vectors import scores
from lmkit.turbo.engine.classes import read_classes
from lmkit.turbo.engine.describe import describe_model
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Classes, Pooling, Request, SamplingParams
from tests.emulator.device import EmulatedDevice
from tests.models import tiny
from tests.quant.helpers import recipe
from tests.turbo.engine.test_embeddings import SMALL, embedding, engine_for, vectors
from tests.turbo.engine.test_engine import run

TEXTS = [[(7 * i + n) % 190 + 5 for i in range(n)] for n in (27, 1, 12, 26)]  # without the id of padding


def requests(*kinds: Pooling) -> list[Request]:
    return [embedding(f"{kind}{i}", ids, kind) for kind in kinds for i, ids in enumerate(TEXTS)]


def states_of(model: torch.nn.Module, ids: list[int], **inputs: Any) -> np.ndarray:
    with torch.no_grad():
        states: np.ndarray = model(torch.tensor([ids]), **inputs).last_hidden_state[0].numpy()
    return states


def tokenizer(path: Path) -> None:
    """Write one whose words are t0, t1 ... and that puts 5 before a text, 6 after it, as BERT's does."""
    words = {f"t{i}" if i != 1 else "<pad>": i for i in range(199)}
    made = Tokenizer(models.WordLevel(words, unk_token="t3"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.BertProcessing(("t6", 6), ("t5", 5))
    made.save(str(path / "tokenizer.json"))


def test_the_page_names_every_encoder() -> None:
    page = (Path(__file__).parents[3] / "docs" / "embeddings.md").read_text()
    assert all(f"`{name}{BASE}`" in page for name in tiny.ENCODERS | tiny.EMBEDDING)


@pytest.mark.parametrize("name", tiny.ENCODERS | tiny.EMBEDDING)
def test_an_encoder_gives_the_hidden_states_of_transformers(tmp_path: Path, name: str) -> None:
    """Some texts wait for a step with room for them as a whole, or for blocks."""
    model = tiny.make_encoder(tmp_path, name)
    wanted = requests("cls", "mean", "last")
    got = vectors(run(engine_for(tmp_path, max_step_tokens=32), wanted))
    for i, ids in enumerate(TEXTS):
        states = states_of(model, ids)
        for kind, want in (("cls", states[0]), ("mean", states.mean(0)), ("last", states[-1])):
            found = np.frombuffer(got[f"{kind}{i}"], np.float32)
            np.testing.assert_allclose(found, want, atol=1e-4, rtol=1e-4, err_msg=f"{kind} of {len(ids)}")
    if name in tiny.EMBEDDING:
        return
    block = 8 * 3 * 2 * 48 * 4
    assert vectors(run(engine_for(tmp_path, max_step_tokens=64, kv_memory=4 * block), wanted)) == got


def test_a_decoder_whose_tokens_see_later_ones(tmp_path: Path) -> None:
    model = tiny.make(tmp_path, "qwen2")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    got = vectors(run(engine_for(tmp_path), requests("mean", "last")))
    for i, ids in enumerate(TEXTS):
        nothing_hidden = torch.zeros(1, 1, len(ids), len(ids))
        states = states_of(model.model, ids, attention_mask={"full_attention": nothing_hidden})
        for kind, want in (("mean", states.mean(0)), ("last", states[-1])):
            np.testing.assert_allclose(np.frombuffer(got[f"{kind}{i}"], np.float32), want, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("emulated")
def test_a_gpu_gives_about_the_embeddings_of_the_cpu(tmp_path: Path) -> None:
    tiny.make_encoder(tmp_path, "Bert").half().save_pretrained(tmp_path)
    config = EngineConfig(**(SMALL | {"max_step_tokens": 32}))
    gpu = Engine.of(load_model(tmp_path, device="cuda"), config, device=EmulatedDevice())
    wanted = requests("cls", "mean")
    got, want = vectors(run(gpu, wanted)), vectors(run(engine_for(tmp_path), wanted))
    for name, vector in got.items():
        ours, theirs = (np.frombuffer(v, np.float32) for v in (vector, want[name]))
        assert ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs) > 0.9999, name


def classes_of(path: Path) -> Classes:
    with resolved(path) as opened:
        classes = read_classes(opened.source)
    assert classes is not None
    return classes


@pytest.mark.parametrize("name", tiny.ENCODERS)
@pytest.mark.parametrize("labels", [1, 3])
def test_classes_of_pairs_are_those_of_transformers(tmp_path: Path, name: str, labels: int) -> None:
    model = tiny.make_encoder(tmp_path, name, labels)
    classes, has_types = classes_of(tmp_path), name == "Bert"
    pooling = model.config.to_dict().get("classifier_pooling", "cls")
    assert (classes.pooling, classes.reads_pairs, len(classes.labels)) == (pooling, True, labels)
    wanted = [replace(request, second_start=len(request.prompt_ids) // 2) for request in requests(pooling)]
    wanted.append(embedding("alone", TEXTS[0], pooling))
    states = vectors(run(engine_for(tmp_path), wanted))
    for request in wanted:
        ids, start = request.prompt_ids, request.second_start
        types = [int(has_types and start is not None and i >= start) for i in range(len(ids))]
        with torch.no_grad():
            logits = model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits
        state = np.frombuffer(states[request.request_id], np.float32)[None]
        np.testing.assert_allclose(scores(state, classes, raw=True), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("file", "field", "want"),
    [
        ("config.json", {}, "sigmoid"),
        ("config.json", {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "none"),
        ("config.json", {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "sigmoid"),
        ("config_sentence_transformers.json", {"activation_fn": "torch.nn.modules.linear.Identity"}, "none"),
        ("config_sentence_transformers.json", {"activation_fn": "torch.nn.modules.activation.Tanh"}, None),
    ],
)
def test_a_cross_encoder_names_what_makes_scores(
    tmp_path: Path, file: str, field: dict[str, Any], want: str | None
) -> None:
    tiny.make_encoder(tmp_path, "Bert", 1)
    config = json.loads((tmp_path / file).read_text()) if (tmp_path / file).exists() else {}
    (tmp_path / file).write_text(json.dumps(config | field))
    if want is None:
        with pytest.raises(UnsupportedError, match="neither Sigmoid nor Identity"):
            classes_of(tmp_path)
    else:
        assert classes_of(tmp_path).activation == want


def test_an_encoder_runs_from_its_folder(tmp_path: Path) -> None:
    """Rounded to 8 bits, too. The mean is the embedding unless files of sentence-transformers say otherwise."""
    model = tiny.make_encoder(tmp_path, "XLMRoberta")
    tokenizer(tmp_path)
    want = states_of(model, TEXTS[0]).mean(0)
    for quantize, near in (("none", 0.9999), ("fp8", 0.99)):
        options = EngineConfig(**(SMALL | {"device": "cpu", "quantize": quantize, "packed_cache": False}))
        engine = Engine(str(tmp_path), options)
        assert (engine.info.pooling, engine.info.max_model_len) == ("mean", 32)
        (out,) = run(engine, [embedding("a", TEXTS[0], "mean")])["a"]
        found = np.frombuffer(out.embedding, np.float32)
        assert found @ want / np.linalg.norm(found) / np.linalg.norm(want) > near
        with pytest.raises(RequestError, match="no head to generate with"):
            engine.add(Request(request_id="b", prompt_ids=[1], params=SamplingParams()))
        engine.close()


def test_what_is_said_of_an_encoder_has_no_kv_cache_and_no_context(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny.make_encoder(tmp_path, "Bert")
    tokenizer(tmp_path)
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.Transformer", "path": ""}]')
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 24}')
    options = EngineConfig(**(SMALL | {"device": "cpu", "packed_cache": False}))
    with caplog.at_level(logging.INFO, "lmkit"):
        engine = Engine(str(tmp_path), options)
    has_head, memory = engine.info.has_head, engine.info.memory["kv"]
    engine.close()
    assert not has_head
    lines = [record.getMessage() for record in caplog.records]
    assert "longest text: 32 tokens" in lines
    assert "embeddings: mean pooling, 48 numbers, of a text's first 24 tokens" in lines
    assert any(re.fullmatch(r"texts: float32, \S+ MiB for [\d,]+ tokens", line) for line in lines)
    assert not [line for line in lines if "KV" in line or "context" in line]
    report = describe_model(str(tmp_path), options)
    assert (report["kv_cache"], report["sampling_defaults"]) == (None, None)
    serving = report["serving"]
    assert [serving[name] for name in ("kv_bytes", "kv_blocks", "kv_tokens", "context")] == [None] * 4
    assert (serving["text_bytes"], serving["longest_text"]) == (memory, 32)
    shape = {"pooling": "mean", "size": 48, "unit_length": False, "cut_to_tokens": 24, "prompts": [], "classes": []}
    assert report["embeddings"] == shape


def test_little_memory_for_texts_is_a_shortage(tmp_path: Path) -> None:
    tiny.make_encoder(tmp_path, "Bert")
    block = 8 * 3 * 2 * 48 * 4
    options = SMALL | {"device": "cpu", "kv_memory": 2 * block, "max_model_len": None}
    said = describe_model(str(tmp_path), EngineConfig(**options))["serving"]["problem"]
    assert said.startswith("texts of more than 16 of the model's 64 tokens find no room")
    assert "KV" not in said


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"tp": 2}, "reads each text as a whole, in one process"),
        ({"adapter_root": "."}, "reads each text as a whole; leave out adapter_root"),
        ({"kv_host_memory": 1 << 20, "kv_events": "tcp://127.0.0.1:0"}, "leave out kv_host_memory, kv_events"),
        ({"max_step_tokens": 16}, "max_model_len 32: this model reads a text in one step; raise max_step_tokens"),
        ({"pooling": "mean"}, "the classes of this model need cls"),
        ({"kv_dtype": "int4"}, "reads each text as a whole; leave out kv_dtype"),
        (
            {"max_model_len": 32, "kv_memory": 1 << 15},
            r"needs \S+ MiB of memory and \S+ MiB is planned.*raise kv_memory$",
        ),
    ],
)
def test_options_that_do_not_go_with_whole_texts_are_refused(
    tmp_path: Path, options: dict[str, Any], line: str
) -> None:
    tiny.make_encoder(tmp_path, "Bert", 1)
    tokenizer(tmp_path)
    with pytest.raises((ConfigError, UnsupportedError), match=line):
        Engine(str(tmp_path), EngineConfig(**(SMALL | {"device": "cpu", "packed_cache": False} | options)))


def test_commands_for_models_that_write_text_refuse_it(tmp_path: Path) -> None:
    tiny.make_encoder(tmp_path, "Bert")
    tokenizer(tmp_path)
    with pytest.raises(UnsupportedError, match="reads each text as a whole"):
        prepare(tmp_path, recipe())
    with pytest.raises(UnsupportedError, match="no head that predicts tokens"):
        evaluate(tmp_path, list(range(64)), seq_len=16)


def test_a_window_is_refused(tmp_path: Path) -> None:
    tiny.make(tmp_path, "mistral-window")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    with pytest.raises(UnsupportedError, match="through sliding windows"):
        load_model(tmp_path)


def test_tensors_of_another_shape_are_refused(tmp_path: Path) -> None:
    tiny.make_encoder(tmp_path, "Bert")
    config = json.loads((tmp_path / "config.json").read_text())
    changes = {"type_vocab_size": 3}, {"max_position_embeddings": 95}, {"position_embedding_type": "relative_key"}
    for change in changes:
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(LMKitError, match=r"config\.json"):
            load_model(tmp_path)
