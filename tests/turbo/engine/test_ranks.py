"""Engines whose model several processes share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lmkit.config import EngineConfig
from lmkit.errors import CheckpointError, ConfigError, EngineLostError, RequestError, UnsupportedError
from lmkit.formats.peft import read_adapter
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.runners.ranks import LeadingRunner
from tests.models import peft_folder
from tests.models.test_trained_hybrid import TRAINED_HYBRID
from tests.models.test_trained_moe import TRAINED_MOE
from tests.quant.helpers import tiny_checkpoint
from tests.turbo.engine.test_adapters import set_adapter

PROMPTS = [[5, 6, 7, 8, 9] * 9, [11, 400, 31], [11, 400, 31, 7], [900, 12]]

GREEDY = [f"{turn}.{number}" for turn in range(2) for number in (0, 2)]


def engine(path: Path, tp: int, **options: Any) -> Engine:
    common = {"device": "cpu", "max_model_len": 128, "max_batch_size": 4, "num_threads": 2, "packed_cache": False}
    return Engine(str(path), EngineConfig(**common | {"tp": tp} | options))


def tokens(path: Path, tp: int, **options: Any) -> dict[str, list[int]]:
    """The tokens of greedy and of drawn requests, twice, so that the second time uses the prefix cache."""
    model = engine(path, tp, **options)
    found: dict[str, list[int]] = {}
    try:
        for turn in range(2):
            for number, prompt in enumerate(PROMPTS):
                params = SamplingParams(max_tokens=24, temperature=0.0 if number % 2 == 0 else 0.8, seed=number)
                model.add(Request(request_id=f"{turn}.{number}", prompt_ids=prompt, params=params))
            while model.has_work():
                for output in model.step():
                    assert output.error is None
                    found.setdefault(output.request_id, []).extend(output.token_ids)
        model.check_integrity()
    finally:
        model.close()
    return found


def test_ranks_give_the_tokens_of_one(demo_model: Path) -> None:
    """Of greedy requests; sums have another order, so drawn tokens may differ, but not from one run to the next. With
    little memory for KV, sequences are preempted. Four ranks share two KV heads."""
    options = {"kv_dtype": "int8", "kv_memory": 1 << 20}
    one = tokens(demo_model, 1, **options)
    for tp in (2, 4):
        found = tokens(demo_model, tp, **options)
        assert {name: found[name] for name in GREEDY} == {name: one[name] for name in GREEDY}
        assert all(found[f"0.{number}"] == found[f"1.{number}"] for number in range(len(PROMPTS)))


def test_ranks_keep_the_states_of_hybrids() -> None:
    """Each has all of them, and of attention and MLPs its part. The second turn begins with snapshots."""
    one = tokens(TRAINED_HYBRID, 1)
    for options in ({}, {"speculate": "mtp"}):
        found = tokens(TRAINED_HYBRID, 2, **options)
        assert {name: found[name] for name in GREEDY} == {name: one[name] for name in GREEDY}
        assert all(found[f"0.{number}"] == found[f"1.{number}"] for number in range(len(PROMPTS)))


def test_ranks_share_out_the_heads_of_latent_attention(tmp_path: Path) -> None:
    """Each rank keeps the rows of all tokens. Rank 0 scores prompts. A prefix that is cached on both is found again."""
    path = tiny_checkpoint(tmp_path, "deepseek-v2-lite", num_key_value_heads=4, first_k_dense_replace=9)
    exact, prompt, found = {"dtype": "float32", "activations": "exact"}, list(range(40, 90)), []
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for tp in (1, 2):
        model, answers = engine(path, tp, max_model_len=64, **exact), []
        try:
            for name in "ab":
                model.add(Request(request_id=name, prompt_ids=prompt, params=params, prompt_logprobs=name == "a"))
                while model.has_work():
                    answers += model.step()
        finally:
            model.close()
        assert all(answer.error is None for answer in answers)
        assert max(answer.cached_tokens for answer in answers) >= 32
        found.append(torch.tensor([x.logprob for answer in answers for x in answer.prompt_logprobs or ()]))
    assert len(found[0]) == len(prompt) - 1
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-3)


@pytest.fixture(scope="module")
def adapters(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all linears, and a folder with none."""
    root = tmp_path_factory.mktemp("adapters")
    with torch.device("meta"):
        shapes = peft_folder.linears(LlamaForCausalLM(LlamaConfig.from_pretrained(demo_model)))
    for name in "abc":
        peft_folder.write(root / name, shapes, ord(name), rank=5, size=0.5)
    (root / "broken").mkdir()
    return root


def answers_with(model: Engine, names: Iterable[str]) -> dict[str, list[int]]:
    """Greedy tokens with each adapter, in one batch."""
    params, answers = SamplingParams(max_tokens=16, ignore_eos=True), dict[str, list[int]]()
    for name in names:
        model.add(Request(request_id=f"{name}.", prompt_ids=PROMPTS[0], params=params, adapter=name))
    while model.has_work():
        for output in model.step():
            assert output.error is None
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    return answers


def test_ranks_load_and_place_the_same_adapters(
    demo_model: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at the start, others at run time, three in two places. What one rank cannot read changes nothing on any."""
    found, options = [], {"adapters": (f"a={adapters / 'a'}",), "adapter_root": str(adapters), "max_adapters": 2}
    for tp in (1, 2):
        model = engine(demo_model, tp, **options)
        try:
            answers = [answers_with(model, ["", "a"])]
            set_adapter(model, "b", "b")
            set_adapter(model, "c", "c")
            if tp == 2:
                check_a_load_fails_on_one_rank(model, adapters, monkeypatch)
            answers += [answers_with(model, names) for names in (["b", "", "c"], ["a", "b"])]
            assert [*model.adapters.placed] == ["a", "b"]
            set_adapter(model, "a", None)
            set_adapter(model, "b", "c")
            answers.append(answers_with(model, ["b", ""]))
            with pytest.raises(RequestError, match="no adapter 'a' is loaded"):
                answers_with(model, ["a"])
        finally:
            model.close()
        found.append(answers)
    assert found[0] == found[1]
    assert found[0][1]["c."] == found[0][3]["b."]
    assert len({tuple(ids) for one in found[0] for ids in one.values()}) == 4


def check_a_load_fails_on_one_rank(model: Engine, adapters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced(folder: str) -> Any:
        """In rank 0 alone."""
        return read_adapter(adapters / {"broken": "c", "c": "broken"}.get(Path(folder).name, "a"))

    with monkeypatch.context() as patch:
        patch.setattr("lmkit.models.adapters.read_adapter", replaced)
        for folder, error in (
            ("broken", "rank 1: broken: no adapter_config.json"),
            ("c", f"{adapters / 'broken'}: no adapter_config.json"),
            ("b", "b: the ranks found different files there"),
        ):
            for name in ("b", "d"):
                with pytest.raises(CheckpointError, match=f"^{error}"):
                    set_adapter(model, name, folder)


def test_steps_of_ranks_go_on_while_an_adapter_is_read(
    demo_model: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that ends meanwhile ends the engine and the load."""
    model = engine(demo_model, 2, adapter_root=str(adapters))
    files = peft_folder.SlowFiles(monkeypatch)
    try:
        loaded = model.set_adapter("a", "a")
        files.begun.wait()
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        model.add(Request(request_id="plain", prompt_ids=PROMPTS[1], params=params))
        while model.scheduler.has_work():
            assert all(output.error is None for output in model.step())
        assert not loaded.done()
        runner = model.runner
        assert isinstance(runner, LeadingRunner)
        os.kill(runner.ranks.pids[0], signal.SIGKILL)
        with pytest.raises(EngineLostError, match="ended"):
            answers_with(model, [])
    finally:
        files.opened.set()
        model.close()
    assert str(loaded.exception()) == "the engine has ended"


def test_ranks_that_share_experts_have_whole_adapters(tmp_path: Path) -> None:
    peft_folder.write(tmp_path / "a", peft_folder.linears_of(TRAINED_MOE), 1, size=0.5)
    found = []
    for ep in (1, 2):
        model = engine(TRAINED_MOE, 1, ep=ep, adapter_root=str(tmp_path))
        try:
            set_adapter(model, "a", "a")
            found.append(answers_with(model, ["", "a"]))
        finally:
            model.close()
    assert found[0] == found[1]
    assert found[0]["."] != found[0]["a."]


def test_ranks_that_share_experts_give_the_tokens_of_one() -> None:
    """Drawn ones, too. If the ranks split attention as well, sums have another order."""
    one = tokens(TRAINED_MOE, 1, quantize="int4")
    assert tokens(TRAINED_MOE, 1, ep=2, quantize="int4") == one
    both = tokens(TRAINED_MOE, 2, ep=2, quantize="int4")
    assert {name: both[name] for name in GREEDY} == {name: one[name] for name in GREEDY}


@pytest.mark.parametrize("options", [{"tp": 2}, {"tp": 1, "ep": 2}, {"tp": 2, "ep": 2}], ids=["tp", "ep", "both"])
def test_tokens_depend_on_the_request_alone(options: dict[str, int]) -> None:
    """Greedy and drawn ones, alone and in a batch, in steps of any size, without the prefix cache."""
    model = engine(TRAINED_MOE, **options, prefix_cache=False, max_step_tokens=16)
    found: dict[str, list[int]] = {}

    def run(name: str, numbers: list[int]) -> None:
        for number in numbers:
            params = SamplingParams(max_tokens=16, temperature=number % 2 * 0.8, seed=number)
            model.add(Request(request_id=f"{name} {number}", prompt_ids=PROMPTS[number], params=params))
        while model.has_work():
            for output in model.step():
                assert output.error is None
                found.setdefault(output.request_id, []).extend(output.token_ids)

    numbers = list(range(len(PROMPTS)))
    try:
        run("together", numbers)
        for number in numbers:
            run("alone", [number])
    finally:
        model.close()
    assert all(found[f"alone {number}"] == found[f"together {number}"] for number in numbers)


def check_a_kill_ends(model: Engine, pid: int) -> None:
    """Kill a process of an engine with one request: the engine is lost, and the request gets one error at most."""
    os.kill(pid, signal.SIGKILL)
    errors: list[str | None] = []

    def steps() -> None:
        while True:
            errors.extend(output.error for output in model.step() if output.finish_reason is not None)

    with pytest.raises(EngineLostError, match="ended"):
        steps()
    assert errors in ([], ["the engine failed while computing this request"])
    model.close()


@pytest.mark.parametrize(("name", "options"), [("demo", {"tp": 2}), ("experts", {"tp": 1, "ep": 2})])
def test_a_killed_rank_ends_the_engine_and_its_requests(demo_model: Path, name: str, options: dict[str, int]) -> None:
    model = engine(TRAINED_MOE if name == "experts" else demo_model, **options, overlap=False)
    runner = model.runner
    assert isinstance(runner, LeadingRunner)
    params = SamplingParams(max_tokens=100, temperature=0.0)
    model.add(Request(request_id="one", prompt_ids=[5, 6], params=params))
    model.step()
    check_a_kill_ends(model, runner.ranks.pids[0])


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"tp": 3}, UnsupportedError, "tp=3: 4 attention heads cannot be shared out evenly"),
        ({"tp": 1, "ep": 2}, UnsupportedError, "ep=2: LlamaForCausalLM has no experts; use tp=2"),
        ({"tp": 1, "ep": 2, "pp": 2}, ConfigError, "ep=2 and pp=2: a model is shared out in one way"),
        ({"tp": 2, "ep": 4}, ConfigError, "tp=2 and ep=4: the same processes share both; give one number"),
        ({"tp": 2, "kv_host_memory": 1 << 30}, ConfigError, "tp=2 keeps no KV outside the engine; leave out kv_host"),
        ({"tp": 1, "pp": 2, "speculate": "draft=folder"}, ConfigError, "pp=2 drafts no tokens"),
        ({"tp": 2, "kv_disk_path": "kv"}, ConfigError, "leave out kv_disk_path"),
    ],
)
def test_what_ranks_cannot_do_is_refused(
    demo_model: Path, options: dict[str, Any], kind: type[Exception], reason: str
) -> None:
    with pytest.raises(kind, match=reason):
        engine(demo_model, **options)
