"""Embeddings: the final hidden states of transformers, pooled, whatever the chunks and the other sequences are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lmkit.config import EngineConfig
from lmkit.errors import CheckpointError, RequestError
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.models.loader import load_model
from lmkit.models.resolved import resolved
from lmkit.serve.embeddings.vectors import scores
from lmkit.turbo.engine.classes import read_classes
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Pooling, Request, SamplingParams, StepOutput
from tests.emulator.device import EmulatedDevice
from tests.models import tiny
from tests.turbo.engine.test_engine import run

TEXTS = [[(7 * i + n) % 199 for i in range(n)] for n in (27, 1, 12, 26)]
SMALL: dict[str, Any] = {"block_size": 8, "max_batch_size": 4, "max_step_tokens": 64, "max_model_len": 32}
BLOCK_BYTES = 8 * 3 * 2 * 2 * 16 * 4  # of the tiny qwen3


def engine_for(path: Path, **options: Any) -> Engine:
    exact: dict[str, Any] = {"device": "cpu", "kv_dtype": "float32"}
    return Engine.of(load_model(path), EngineConfig(**(SMALL | exact | options)))


def embedding(name: str, ids: list[int], pooling: Pooling) -> Request:
    return Request(request_id=name, prompt_ids=ids, params=SamplingParams(max_tokens=0), pooling=pooling)


def embeddings(pooling: Pooling, name: str = "") -> list[Request]:
    return [embedding(f"{name}{pooling}{i}", ids, pooling) for i, ids in enumerate(TEXTS)]


def vectors(outputs: dict[str, list[StepOutput]]) -> dict[str, bytes]:
    return {name: steps[-1].embedding for name, steps in outputs.items()}


def base_of(model: Any) -> Any:
    """The part of a model of transformers that gives states. Llama 4's classes name none, or one with a head."""
    base = model.base_model
    return getattr(getattr(base, "language_model", base), "model", base) if "Llama4" in type(model).__name__ else base


@pytest.mark.parametrize("name", [name for name in tiny.FAMILIES if name != "opt-350m"])
def test_every_family_gives_the_hidden_states_of_transformers(tmp_path: Path, name: str) -> None:
    model = tiny.make(tmp_path, name)
    got = vectors(run(engine_for(tmp_path, max_step_tokens=13), embeddings("last") + embeddings("mean")))
    for i, ids in enumerate(TEXTS):
        with torch.no_grad():
            states = base_of(model)(torch.tensor([ids])).last_hidden_state[0].numpy()
        for pooling, want in (("last", states[-1]), ("mean", states.mean(0))):
            np.testing.assert_allclose(np.frombuffer(got[f"{pooling}{i}"], np.float32), want, atol=1e-4, rtol=1e-4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tiny.make(tmp_path, "qwen3")
    return tmp_path


def test_the_same_bits_whatever_runs_beside(path: Path) -> None:
    wanted = embeddings("mean") + embeddings("last")
    want = {name: v for request in wanted for name, v in vectors(run(engine_for(path), [request])).items()}
    generated = [
        Request(request_id=f"g{i}", prompt_ids=ids, params=SamplingParams(max_tokens=5), prompt_logprobs=i == 2)
        for i, ids in enumerate(TEXTS)
    ]
    alone = {r.request_id: run(engine_for(path), [r])[r.request_id] for r in generated}
    for options in ({}, {"max_step_tokens": 5}, {"kv_memory": 5 * BLOCK_BYTES}, {"overlap": False}):
        mixed = [request for pair in zip(wanted, generated + generated[::-1], strict=True) for request in pair]
        engine = engine_for(path, **options)
        got = run(engine, {request.request_id: request for request in mixed}.values())
        assert {name: v for name, v in vectors(got).items() if v} == want, options
        for name, steps in alone.items():
            assert [t for s in got[name] for t in s.token_ids] == [t for s in steps for t in s.token_ids], options
            assert got[name][0].prompt_logprobs == steps[0].prompt_logprobs


def test_the_last_state_uses_the_prefix_cache_and_the_mean_computes_all(path: Path) -> None:
    engine = engine_for(path)
    first, mean = run(engine, embeddings("last")), run(engine, embeddings("mean"))
    again = run(engine, embeddings("last", "again-"))
    assert [out[0].cached_tokens for out in again.values()] == [26, 0, 11, 25]
    assert [out[0].cached_tokens for out in mean.values()] == [0] * 4
    for i in range(4):
        assert again[f"again-last{i}"][0].embedding == first[f"last{i}"][0].embedding


def test_a_text_that_gives_way_is_summed_anew(path: Path) -> None:
    want = vectors(run(engine_for(path), [embedding("a", TEXTS[0], "mean")]))
    engine = engine_for(path, max_step_tokens=5, kv_memory=4 * BLOCK_BYTES)
    engine.add(embedding("a", TEXTS[0], "mean"))
    for _ in range(3):
        assert not engine.step()
    first = Request(request_id="b", prompt_ids=TEXTS[2], params=SamplingParams(max_tokens=4), priority=-9)
    engine.add(first)
    outputs = [output for _ in iter(engine.has_work, False) for output in engine.step()]
    assert engine.stats().preemptions == 1
    assert [output.embedding for output in outputs if output.request_id == "a"] == [want["a"]]


def test_an_abort_in_the_middle_of_a_text_leaves_nothing(path: Path) -> None:
    engine = engine_for(path, max_step_tokens=5)
    engine.add(embedding("a", TEXTS[0], "mean"))
    engine.step()
    engine.abort("a")
    while engine.has_work():
        outputs = engine.step()
    assert [(out.finish_reason, out.embedding) for out in outputs] == [("abort", b"")]
    want = vectors(run(engine_for(path), [embedding("b", TEXTS[2], "mean")]))
    assert vectors(run(engine, [embedding("b", TEXTS[2], "mean")])) == want


def test_numbers_that_are_not_finite_are_an_error(path: Path) -> None:
    engine = engine_for(path)
    engine.runner.decoder.final_norm[3] = torch.inf
    (steps,) = run(engine, [embedding("a", TEXTS[2], "mean")]).values()
    assert steps[-1].finish_reason == "error"
    assert "not finite" in str(steps[-1].error)


def test_an_embedding_generates_nothing(path: Path) -> None:
    request = Request(request_id="a", prompt_ids=[1], params=SamplingParams(max_tokens=1), pooling="last")
    with pytest.raises(RequestError, match="max_tokens=0"):
        engine_for(path).add(request)


@pytest.mark.usefixtures("emulated")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_gpu_gives_about_the_embeddings_of_the_cpu(tmp_path: Path, family: str) -> None:
    tiny.make(tmp_path, family).half().save_pretrained(tmp_path)
    config = EngineConfig(**(SMALL | {"max_step_tokens": 13}))
    gpu = Engine.of(load_model(tmp_path, device="cuda"), config, device=EmulatedDevice())
    wanted = embeddings("last") + embeddings("mean")
    got, want = vectors(run(gpu, wanted)), vectors(run(engine_for(tmp_path), wanted))
    for name, vector in got.items():
        ours, theirs = (np.frombuffer(v, np.float32) for v in (vector, want[name]))
        assert ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs) > 0.9999, name


@pytest.mark.parametrize("has_prefix", [False, True])
def test_a_checkpoint_without_a_head_gives_embeddings_alone(tmp_path: Path, has_prefix: bool) -> None:
    """As sentence-transformers saves it: a base model, whose tensors have no prefix in newer checkpoints."""
    model = tiny.make(tmp_path / "whole", "mistral")
    path = tmp_path / "base"
    model.model.save_pretrained(path)
    assert json.loads((path / "config.json").read_text())["architectures"] == ["MistralModel"]
    if has_prefix:
        tensors = load_file(path / "model.safetensors")
        save_file({f"model.{name}": x for name, x in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_FOLDER / file, path / file)
    engine = Engine(str(path), EngineConfig(**(SMALL | {"device": "cpu", "kv_dtype": "float32"})))
    (out,) = run(engine, [embedding("a", TEXTS[0], "last")])["a"]
    with torch.no_grad():
        want = model.model(torch.tensor([TEXTS[0]])).last_hidden_state[0, -1].numpy()
    np.testing.assert_allclose(np.frombuffer(out.embedding, np.float32), want, atol=1e-4, rtol=1e-4)
    with pytest.raises(RequestError, match="no head to generate with"):
        engine.add(Request(request_id="b", prompt_ids=[1], params=SamplingParams()))


CLASSIFIERS = ("llama", "qwen3", "gemma2")


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.parametrize("labels", [1, 3])
def test_classes_are_those_of_transformers(tmp_path: Path, name: str, labels: int) -> None:
    """With tied embeddings or without, such a checkpoint has no head to generate with."""
    torch.manual_seed(3)
    config = tiny.make(tmp_path / "base", name).config
    config.num_labels, config.pad_token_id = labels, 0
    model = transformers.AutoModelForSequenceClassification.from_config(config).float().eval()
    model.save_pretrained(tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    engine = engine_for(tmp_path / "model")
    with resolved(tmp_path / "model") as opened:
        classes = read_classes(opened.source)
    assert classes is not None
    assert (classes.labels, classes.activation) == (
        tuple(f"LABEL_{idx}" for idx in range(labels)), "sigmoid" if labels == 1 else "softmax",
    )  # fmt: skip
    assert not opened.source.has_head
    assert loaded.spec.tie_embeddings
    for ids, (name_, vector) in zip(TEXTS, vectors(run(engine, embeddings("last"))).items(), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits
        state = np.frombuffer(vector, np.float32)[None]
        np.testing.assert_allclose(scores(state, classes, raw=True), logits, atol=1e-4, rtol=1e-4)
        want = torch.sigmoid(logits) if labels == 1 else torch.softmax(logits, -1)
        np.testing.assert_allclose(scores(state, classes, raw=False), want, atol=1e-4, rtol=1e-4, err_msg=name_)


def test_a_checkpoint_that_classifies_and_lacks_its_head_is_refused(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForSequenceClassification"]}))
    with resolved(path) as opened, pytest.raises(CheckpointError, match=r"score\.weight is missing"):
        read_classes(opened.source)
