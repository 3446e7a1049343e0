"""Engines whose layers several processes share, one after the other."""

from __future__ import annotations

import itertools
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest

from lmkit.bench.latency import Shape, run_latency
from lmkit.config import EngineConfig
from lmkit.errors import ConfigError, UnsupportedError
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.text import Tokenizer
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.plan import StepPlan
from lmkit.turbo.request import Request, SamplingParams, StepOutput
from lmkit.turbo.runners.stages import FirstStage
from tests.models import tiny
from tests.turbo.engine.test_adapters import set_adapter
from tests.turbo.engine.test_ranks import adapters, answers_with, check_a_kill_ends, engine, tokens  # noqa: F401


@pytest.mark.parametrize("pp", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_stages_give_the_tokens_of_one_process(demo_model: Path, pp: int) -> None:
    """Greedy and drawn ones. With little memory for KV, sequences are preempted."""
    one = tokens(demo_model, 1, kv_dtype="int8", kv_memory=1 << 20)
    assert tokens(demo_model, 1, pp=pp, kv_dtype="int8", kv_memory=pp << 20) == one


def test_stages_have_the_adapters_of_their_layers(demo_model: Path, adapters: Path) -> None:  # noqa: F811
    """One of the start and one of the running engine, in turns in one place."""
    found, options = [], {"adapters": (f"a={adapters / 'a'}",), "adapter_root": str(adapters), "max_adapters": 1}
    for pp in (1, 2):
        model = engine(demo_model, 1, pp=pp, **options)
        try:
            set_adapter(model, "b", "b")
            found.append([answers_with(model, names) for names in (["a", ""], ["b", ""], ["a"])])
        finally:
            model.close()
    assert found[0] == found[1]
    assert len({tuple(ids) for one in found[0] for ids in one.values()}) == 3


def shown(path: Path, **options: Any) -> list[Any]:
    """Log-probabilities of a prompt that takes several steps, and an embedding of it."""
    model = engine(path, 1, max_step_tokens=16, **options)
    prompt = list(range(5, 50))
    wanted: list[dict[str, Any]] = [
        {"params": SamplingParams(max_tokens=3, temperature=0.0, logprobs=2, prompt_top=2), "prompt_logprobs": True},
        {"params": SamplingParams(max_tokens=0), "pooling": "mean"},
        {"params": SamplingParams(max_tokens=0), "pooling": "last"},
    ]
    found: list[StepOutput] = []
    try:
        for number, options in enumerate(wanted):
            model.add(Request(request_id=str(number), prompt_ids=prompt, **options))
        while model.has_work():
            found += model.step()
    finally:
        model.close()
    assert not any(output.error for output in found)
    found.sort(key=lambda output: output.request_id)
    return [(out.request_id, out.token_ids, out.logprobs, out.prompt_logprobs, out.embedding) for out in found]


def test_stages_give_scores_and_embeddings_of_one_process(demo_model: Path) -> None:
    one, two = shown(demo_model), shown(demo_model, pp=2)
    assert len(one[0][3]) == 44
    assert one == two


def launched(model: Engine) -> list[StepPlan]:
    """The plans that are launched from now on."""
    plans: list[StepPlan] = []
    launch = model.runner.launch

    def noting(plan: StepPlan) -> Any:
        plans.append(plan)
        return launch(plan)

    model.runner.launch = noting  # type: ignore[method-assign]
    return plans


def test_two_steps_of_different_sequences_are_under_way(demo_model: Path) -> None:
    model = engine(demo_model, 1, pp=2)
    plans = launched(model)
    try:
        for number in range(4):
            params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
            model.add(Request(request_id=str(number), prompt_ids=[5 + number, 6], params=params))
        while model.has_work():
            model.step()
    finally:
        model.close()
    decodes = [{chunk.slot for chunk in plan.chunks} for plan in plans if len(plan.chunks) == 2][4:]
    assert len(decodes) > 10
    assert all(not first & second for first, second in itertools.pairwise(decodes))


def test_a_killed_stage_ends_the_engine_and_its_requests(demo_model: Path) -> None:
    model = engine(demo_model, 1, pp=3)
    runner = model.runner
    assert isinstance(runner, FirstStage)
    model.add(Request(request_id="one", prompt_ids=[5, 6], params=SamplingParams(max_tokens=120, temperature=0.0)))
    model.step()
    check_a_kill_ends(model, runner.stages.pids[1])


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"pp": 9}, UnsupportedError, "pp=9: the model has 8 layers"),
        ({"pp": 2, "tp": 2}, ConfigError, "tp=2 and pp=2: a model is shared out in one way"),
        ({"pp": 2, "kv_host_memory": 1 << 30}, ConfigError, "pp=2 keeps no KV outside the engine; leave out kv_host"),
        ({"pp": 2, "speculate": "ngram"}, ConfigError, "pp=2 drafts no tokens"),
        ({"pp": 2, "weights_memory": 1 << 20}, ConfigError, "pp=2 keeps all weights in memory"),
    ],
)
def test_what_stages_cannot_do_is_refused(
    demo_model: Path, options: dict[str, Any], kind: type[Exception], reason: str
) -> None:
    with pytest.raises(kind, match=reason):
        Engine(str(demo_model), EngineConfig(**{"device": "cpu", "max_model_len": 128} | options))


def test_the_profile_has_the_time_of_each_stage(demo_model: Path) -> None:
    model = engine(demo_model, 1, pp=2)
    try:
        before = model.profile()
        (run,) = run_latency(model, Tokenizer.from_pretrained(demo_model), [Shape(4, 8, 9)], repeats=1, warmup=0)
        profile = model.profile().since(before)
    finally:
        model.close()
    assert min(profile.kernels, profile.elsewhere) > 0
    assert run.decode_profile is not None
    assert run.decode_profile.bubble is not None
    assert 0 < run.decode_profile.bubble < 1


@pytest.mark.parametrize("family", ["qwen3", "granite-hybrid", "nemotron-h", "lfm2", "mamba2", "zamba2"])
def test_prompts_of_several_steps_and_states_of_layers_are_those_of_one_process(tmp_path: Path, family: str) -> None:
    """A step inside of a prompt wants no logits. The last layer of Nemotron H computes all rows of a step. Layers of
    Zamba2 read embeddings, which stages send on. The second turn begins with a snapshot of what each stage keeps."""
    tiny.make(tmp_path, family)
    copyfile(DEMO_FOLDER / "tokenizer.json", tmp_path / "tokenizer.json")
    prompts = [[(7 * n + 3 * i) % 140 + 3 for i in range(n)] for n in (58, 33, 9)]
    exact = {"dtype": "float32", "activations": "exact", "block_size": 8, "max_step_tokens": 24, "max_model_len": 96}
    found = []
    for pp in (1, 2):
        model, outputs = engine(tmp_path, 1, pp=pp, **exact), list[StepOutput]()
        try:
            for turn, (number, prompt) in itertools.product(range(2), enumerate(prompts)):
                params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=number % 2, seed=number, logprobs=1)
                model.add(Request(request_id=f"{turn}.{number}", prompt_ids=prompt, params=params))
                while number == 2 and model.has_work():
                    outputs += model.step()
        finally:
            model.close()
        assert not any(output.error for output in outputs)
        assert max(output.cached_tokens for output in outputs) >= 56
        found.append(sorted((o.request_id, *map(str, (o.token_ids, o.logprobs))) for o in outputs if o.token_ids))
    assert found[0] == found[1]
