"""Draft models: the tokens are those of the model alone, whatever is drafted and whatever happens beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lmkit.config import EngineConfig
from lmkit.errors import ConfigError
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.text.grammar import json_schema
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams, StepOutput
from lmkit.turbo.runners.draft_model_runner import DraftModelRunner
from lmkit.turbo.scheduling import model_speculation, speculation
from tests.models import tiny
from tests.turbo.engine.test_engine import engine_for, requests_for, run

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}


@pytest.fixture(scope="module")
def draft_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model without its last layers: it often drafts right, and often not."""
    folder = tmp_path_factory.mktemp("draft") / "model"
    shutil.copytree(demo_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(autouse=True)
def drafts_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model drafts in every step that allows it."""
    monkeypatch.setattr(model_speculation, "PROBE_SHARE", 1e9)
    monkeypatch.setattr(model_speculation, "FIRST_PROBES", 1 << 30)
    monkeypatch.setattr(speculation.StepTimes, "record", lambda self, counts, seconds: None)


def drafter_of(engine: Engine) -> DraftModelRunner:
    assert engine._drafter is not None
    return engine._drafter


def shown(outputs: dict[str, list[StepOutput]]) -> dict[str, Any]:
    return {
        name: ([t for o in parts for t in o.token_ids], [x for o in parts for x in o.logprobs], parts[-1].finish_reason)
        for name, parts in outputs.items()
    }


def compare(model: Path, draft: Path, requests: list[Request], *, how: str = "draft", **options: Any) -> Engine:
    """Check that the outputs are those without speculation. Returns the engine with the draft model."""
    want = shown(run(engine_for(model, **options), requests))
    engine = engine_for(model, **options, speculate=f"{how}={draft}")
    assert shown(run(engine, requests)) == want
    assert shown(run(engine, requests)) == want  # with the prefix cache
    stats = engine.stats()
    assert 0 < stats.accepted_tokens <= stats.draft_tokens
    drafter = drafter_of(engine)
    assert not drafter._texts
    assert not drafter._has_failed
    assert len(drafter._slots) == engine.scheduler.limits.max_batch_size
    assert len(drafter._blocks) == len(set(drafter._blocks))
    engine.check_integrity()
    return engine


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "min_tokens": 4},
        {"grammar": json_schema(SCHEMA), "temperature": 1.0, "ignore_eos": False},
    ],
    ids=["greedy", "sampled", "penalties", "grammar"],
)
def test_tokens_are_those_without_a_draft_model(demo_model: Path, draft_model: Path, params: dict[str, Any]) -> None:
    compare(demo_model, draft_model, requests_for(demo_model, **params))


@pytest.mark.parametrize("options", [{"kv_dtype": "int4"}, {"overlap": False}, {"max_draft_tokens": 1}], ids=str)
def test_options_of_the_engine_go_with_a_draft_model(
    demo_model: Path, draft_model: Path, options: dict[str, Any]
) -> None:
    compare(demo_model, draft_model, requests_for(demo_model), **options)


def test_preempted_sequences_go_on(demo_model: Path, draft_model: Path) -> None:
    requests = requests_for(demo_model, max_tokens=100)
    block = engine_for(demo_model).info.memory["kv"] // (4 * 256 // 8)
    engine = compare(demo_model, draft_model, requests, kv_memory=34 * block)
    assert engine.stats().preemptions


def test_the_same_model_drafts_right(demo_model: Path) -> None:
    for temperature in (0.0, 1.0):
        stats = compare(demo_model, demo_model, requests_for(demo_model, temperature=temperature)).stats()
        assert stats.accepted_tokens > 0.9 * stats.draft_tokens
        assert stats.steps < stats.generation_tokens / 4


def test_a_draft_model_whose_layers_have_tables_of_their_own(tmp_path: Path) -> None:
    """A full layer, and two with a window in another group each."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {"vocab_size": 4096, "num_hidden_layers": 3, "sliding_window": 20, "layer_types": kinds}
    tiny.make(tmp_path, "qwen2-window", **sizes)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_FOLDER / file, tmp_path / file)
    stats = compare(tmp_path, tmp_path, requests_for(tmp_path), max_model_len=96).stats()
    assert stats.accepted_tokens > 0.9 * stats.draft_tokens


def test_requests_without_speculation_get_no_drafts(demo_model: Path, draft_model: Path) -> None:
    engine = engine_for(demo_model, speculate=f"draft={draft_model}")
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    run(engine, [Request(request_id="r", prompt_ids=[5, 6, 7], params=params, speculate=False)])
    assert engine.stats().draft_tokens == 0


def test_aborted_requests_leave_nothing(demo_model: Path, draft_model: Path) -> None:
    engine = engine_for(demo_model, speculate=f"draft={draft_model}")
    drafter = drafter_of(engine)
    blocks = len(drafter._blocks)
    for request in requests_for(demo_model, max_tokens=100):
        engine.add(request)
    while not drafter._texts:
        engine.step()
    for i in range(4):
        engine.abort(f"r{i}")
    while engine.has_work():
        engine.step()
    assert not drafter._texts
    assert len(drafter._blocks) == blocks


def test_a_prompt_longer_than_a_step_and_too_few_blocks(demo_model: Path, draft_model: Path) -> None:
    """The draft model computes the prompt in several steps, and drafts for those that find room."""
    prompts = [[(7 * i + j) % 200 + 2 for i in range(150)] for j in range(4)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [Request(request_id=f"r{j}", prompt_ids=prompt, params=params) for j, prompt in enumerate(prompts)]
    want = shown(run(engine_for(demo_model), requests))
    engine = engine_for(demo_model, speculate=f"draft={draft_model}")
    drafter = drafter_of(engine)
    del drafter._blocks[60:]
    assert shown(run(engine, requests)) == want
    assert engine.stats().draft_tokens
    assert len(drafter._blocks) == 60


def test_a_draft_model_that_fails_is_left_out(
    demo_model: Path, draft_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_for(demo_model)
    want = shown(run(engine_for(demo_model), requests))
    engine = engine_for(demo_model, speculate=f"draft={draft_model}")

    def fail(plan: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr(drafter_of(engine)._runner, "execute", fail)
    assert shown(run(engine, requests)) == want
    assert engine.stats().failed_steps == 0


def test_a_model_with_other_tokens_is_refused(demo_model: Path, draft_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(draft_model, folder)
    tokens = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokens["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(ConfigError, match="other tokens"):
        Engine(str(demo_model), EngineConfig(speculate=f"draft={folder}"))


@pytest.mark.parametrize("value", ["draft", "draft=", "eagle", "mtp=x", "Ngram"])
def test_other_values_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="speculate"):
        EngineConfig(speculate=value)
