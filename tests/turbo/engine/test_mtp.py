"""Layers for multi-token prediction: they draft what the definition says, and the tokens are those of the model."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmkit.config import EngineConfig
from lmkit.errors import CheckpointError
from lmkit.models import draft_head
from lmkit.quant.run import prepare
from lmkit.text.grammar import json_schema
from lmkit.turbo.engine.describe import describe_model
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.runners.draft_head_runner import DraftHeadRunner
from lmkit.turbo.runners.draft_model_runner import DraftModelRunner
from tests.models import mtp
from tests.quant.helpers import recipe
from tests.turbo.engine.drafts import watch
from tests.turbo.engine.test_drafting import SCHEMA, drafts_always_pay, shown
from tests.turbo.engine.test_engine import run

__all__ = ["drafts_always_pay"]

SIZES: dict[str, Any] = {"block_size": 8, "max_batch_size": 3, "max_step_tokens": 32, "max_model_len": 192,
                         "kv_dtype": "float32"}  # fmt: skip


def engine_for(path: Path, **options: Any) -> Engine:
    return Engine(str(path), EngineConfig(**SIZES | options))


def requests(count: int, **params: Any) -> list[Request]:
    rng = random.Random(count)
    config = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "seed": 3} | params)
    prompts = [[rng.randrange(4096) for _ in range(length)] for length in (40, 3, 17, 60, 1)[:count]]
    return [Request(request_id=f"r{i}", prompt_ids=prompt, params=config) for i, prompt in enumerate(prompts)]


def drafter_of(engine: Engine) -> DraftHeadRunner:
    assert isinstance(engine._drafter, DraftHeadRunner)
    return engine._drafter


@pytest.mark.parametrize("family", sorted(mtp.ALONE))
def test_drafts_are_those_of_the_definition(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt in chunks, after rejected draft tokens, and after own draft tokens."""
    monkeypatch.setattr(draft_head, "rounded", lambda weight: weight.float())
    reference = mtp.make(tmp_path, family)
    engine = engine_for(tmp_path, speculate="mtp", max_draft_tokens=3)
    seen = watch(engine, monkeypatch)
    run(engine, requests(2, max_tokens=6))
    engine.close()
    right = sum(reference.drafts(tokens, start, len(drafts)) == drafts for tokens, start, drafts in seen)
    assert {start for _, start, _ in seen} == {1}
    assert len(seen) >= 5
    assert right >= 0.8 * len(seen)  # streams and the layer's keys and values are kept in bfloat16


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp") / "model"
    folder.mkdir()
    mtp.make(folder, "qwen3.5", num_hidden_layers=2)
    return folder


def with_luck(drafter: DraftModelRunner, answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let some of the draft tokens be right."""
    rng, draft = random.Random(1), drafter.draft

    def lucky(lengths: dict[Any, int]) -> Any:
        drafts, steps = draft(lengths)
        for seq, drafted in drafts.items():
            answer = answers.get(seq.request_id, ([],))[0][seq.num_outputs :]
            for place, token in enumerate(answer[: len(drafted)]):
                drafted[place] = token if rng.random() < 0.7 else drafted[place]
        return drafts, steps

    monkeypatch.setattr(drafter, "draft", lucky)


@pytest.mark.parametrize(
    ("params", "options"),
    [
        ({}, {}),
        ({"temperature": 0.9, "top_p": 0.95, "logprobs": 2}, {"overlap": False}),
        ({"repetition_penalty": 1.3, "presence_penalty": 0.5, "max_tokens": 90}, {"kv_blocks": 30}),
    ],
    ids=["greedy", "sampled", "preempted"],
)
def test_tokens_are_those_without_the_layer(
    hybrid: Path, params: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, options = requests(5, **params), dict(options)
    plain = engine_for(hybrid)
    want = shown(run(plain, made))
    if blocks := options.pop("kv_blocks", 0):
        options["kv_memory"] = blocks * plain.info.memory["kv"] // plain.info.num_blocks
    plain.close()
    engine = engine_for(hybrid, speculate="mtp", max_draft_tokens=4, **options)
    drafter = drafter_of(engine)
    with_luck(drafter, want, monkeypatch)
    assert shown(run(engine, made)) == want
    assert shown(run(engine, made)) == want  # with the prefix cache
    stats = engine.stats()
    assert 30 < stats.accepted_tokens < stats.draft_tokens
    assert bool(stats.preemptions) == bool(blocks)
    assert stats.prefix_hits
    assert not drafter._texts
    assert not drafter._has_failed
    assert len(drafter._slots) == SIZES["max_batch_size"]
    engine.close()


def test_auto_takes_the_layer_of_the_checkpoint(hybrid: Path, demo_model: Path) -> None:
    for path, has_layer in ((hybrid, True), (demo_model, False)):
        engine = engine_for(path, speculate="auto")
        assert (engine._drafter is not None) == has_layer
        assert engine.scheduler.limits.max_draft_tokens == 16
        engine.close()


def test_it_is_refused_where_it_is_not(hybrid: Path, demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no layer for multi-token prediction"):
        engine_for(demo_model, speculate="mtp")
    shutil.copytree(hybrid, tmp_path / "broken")
    tensors = load_file(hybrid / "model.safetensors")
    del tensors["mtp.layers.0.self_attn.k_proj.weight"]
    save_file(tensors, tmp_path / "broken" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor mtp.layers.0.self_attn.k_proj.weight is missing"):
        engine_for(tmp_path / "broken", speculate="mtp")
    engine_for(tmp_path / "broken", speculate="ngram").close()


def test_inspect_names_it(hybrid: Path) -> None:
    stored = sum(x.nbytes for name, x in load_file(hybrid / "model.safetensors").items() if name.startswith("mtp."))
    assert describe_model(str(hybrid), EngineConfig())["weights"]["mtp_bytes"] == stored


def test_a_quantized_checkpoint_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the bits that it had, beside layers of 4 bits."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "linear_value_head_dim": 16}
    mtp.make(source, "qwen3.5", **shape)
    short = {"num_samples": 2, "seq_len": 24}
    prepare(str(source), recipe(calibration=short)).run(str(out))
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert {name for name in after if name.startswith("mtp.")} == {name for name in before if name.startswith("mtp.")}
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items() if name.startswith("mtp."))
    plain, engine = engine_for(out), engine_for(out, speculate="mtp")
    want = shown(run(plain, requests(3)))
    with_luck(drafter_of(engine), want, monkeypatch)
    assert shown(run(engine, requests(3))) == want
    assert engine.stats().accepted_tokens
    engine.close()
    plain.close()


@pytest.mark.parametrize("how", ["ngram", "mtp"])
def test_a_grammar_holds_with_recurrent_states(hybrid: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it forces is drafted, and what it forbids never is."""
    made = requests(3, temperature=1.0, grammar=json_schema(SCHEMA), ignore_eos=False, max_tokens=40)
    plain, engine = engine_for(hybrid), engine_for(hybrid, speculate=how)
    want = shown(run(plain, made))
    if how == "mtp":
        with_luck(drafter_of(engine), want, monkeypatch)
    for _ in range(5):  # on a busy machine a step does not always wait for what the grammar forces
        assert shown(run(engine, made)) == want
    assert engine.stats().accepted_tokens > 4
    engine.close()
    plain.close()
