"""The engine on the demo model: what it computes depends on the request alone, and it gives every block back."""

from __future__ import annotations

import gc
import shutil
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from lmkit.config import EngineConfig
from lmkit.errors import RequestError
from lmkit.text import Tokenizer
from lmkit.turbo.engine import engine as engine_module
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.plan import StepPlan
from lmkit.turbo.request import EngineStats, Request, SamplingParams, StepOutput
from lmkit.turbo.scheduling import speculation

SMALL = {"block_size": 8, "max_batch_size": 4, "max_step_tokens": 64, "max_model_len": 256}
PROMPTS = [
    "import os\n",
    "def add(a, b):\n    return",
    "class Queue:\n    def __init__(self):\n        self." * 4,
    "for i in",
]


def engine_for(path: Path, **options: Any) -> Engine:
    return Engine(str(path), EngineConfig(**(SMALL | options)))


def requests_for(path: Path, **params: Any) -> list[Request]:
    tokenizer = Tokenizer.from_pretrained(path)
    config = SamplingParams(**({"max_tokens": 24, "ignore_eos": True, "seed": 5} | params))
    return [
        Request(request_id=f"r{i}", prompt_ids=tokenizer.encode(text), params=config) for i, text in enumerate(PROMPTS)
    ]


def run(engine: Engine, requests: Iterable[Request]) -> dict[str, list[StepOutput]]:
    outputs: dict[str, list[StepOutput]] = {}
    for request in requests:
        engine.add(request)
        outputs[request.request_id] = []
    while engine.has_work():
        for output in engine.step():
            outputs[output.request_id].append(msgspec.structs.replace(output, queue_seconds=0.0))  # the clock's
    engine.check_integrity()
    assert engine.stats().blocks_used == 0
    assert all(o[-1].finish_reason and not any(x.finish_reason for x in o[:-1]) for o in outputs.values())
    return outputs


def propose_drafts(engine: Engine, want: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each step that may compute a draft gets one, whose third token is wrong. The lengths of those that ran.

    A step that overlaps with the one before it begins after a token that is not known yet: it has no draft.
    """
    schedule, lengths = engine.scheduler.schedule, list[int]()

    def with_drafts() -> StepPlan | None:
        for seq in engine.scheduler._slots.running.values():
            if not seq.num_pending:
                draft = want[seq.request_id][seq.num_outputs :][:4]
                seq.propose([token + (i == 2) for i, token in enumerate(draft)])
        plan = schedule()
        lengths.extend(len(chunk.draft) for chunk in plan.chunks) if plan is not None else None
        return plan

    monkeypatch.setattr(engine.scheduler, "schedule", with_drafts)
    return lengths


def tokens(outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_greedy_tokens_match_transformers(demo_model: Path) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    got = run(engine_for(demo_model, dtype="float32"), requests_for(demo_model))
    for request in requests_for(demo_model):
        prompt = torch.tensor([request.prompt_ids])
        want = reference.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert tokens(got[request.request_id]) == want[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8", "int4"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_results_do_not_depend_on_batch_chunks_or_preemption(
    demo_model: Path, kv_dtype: str, temperature: float
) -> None:
    requests = requests_for(demo_model, temperature=temperature, top_p=0.95, repetition_penalty=1.1, logprobs=2)
    alone = engine_for(demo_model, kv_dtype=kv_dtype)
    want = {r.request_id: run(alone, [r])[r.request_id] for r in requests}
    longest = max(len(r.prompt_ids) for r in requests) + 24
    token_bytes = 8 * 2 * 2 * (64 * 4 + 4)
    engines = {
        "together": engine_for(demo_model, kv_dtype=kv_dtype),
        "one token at a time": engine_for(demo_model, kv_dtype=kv_dtype, max_step_tokens=3),
    }
    engines["preempted"] = engine_for(
        demo_model, kv_dtype=kv_dtype, kv_memory=token_bytes * longest, max_model_len=None
    )
    for name, engine in engines.items():
        got = run(engine, requests)
        for request_id, outputs in want.items():
            assert tokens(got[request_id]) == tokens(outputs), (name, request_id)
            flat = [[x for o in side for x in o.logprobs] for side in (got[request_id], outputs)]
            assert flat[0] == flat[1], (name, request_id)


def test_a_tiny_pool_preempts(demo_model: Path) -> None:
    engine = engine_for(demo_model, kv_dtype="int4", kv_memory=8 * 8 * 2 * 2 * 36 * 12, max_model_len=None)
    requests = [r for r in requests_for(demo_model, max_tokens=40) if len(r.prompt_ids) < 20]
    assert len(requests) == 3
    run(engine, requests)
    assert engine.stats().preemptions > 0


def test_steps_count_the_tokens_that_they_compute(demo_model: Path) -> None:
    engine = engine_for(demo_model, prefix_cache=False, max_step_tokens=16)
    assert engine.stats().step_tokens == 0
    requests = requests_for(demo_model, max_tokens=5)
    results = run(engine, requests)
    new = sum(len(output.token_ids) for outputs in results.values() for output in outputs)
    stats = engine.stats()
    assert stats.step_tokens == sum(len(request.prompt_ids) for request in requests) + new
    assert 0 < sum(stats.step_sizes) <= stats.steps


def test_prompt_logprobs_match_transformers(demo_model: Path, heldout_text: str) -> None:
    ids = Tokenizer.from_pretrained(demo_model).encode(heldout_text[:600])
    params = SamplingParams(max_tokens=1, seed=0, prompt_top=3)
    request = Request(request_id="p", prompt_ids=ids, params=params, prompt_logprobs=True)
    outputs = run(engine_for(demo_model, dtype="float32", max_step_tokens=37), [request])["p"]
    reference = transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    with torch.no_grad():
        scores = reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    got = outputs[0].prompt_logprobs
    assert outputs[0].token_ids
    assert not outputs[0].logprobs  # nobody asked for those of the answer
    assert [position.token_id for position in got] == ids[1:]
    want = scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([position.logprob for position in got]), want, rtol=1e-3, atol=1e-3)
    tops = torch.tensor([[logprob for _, logprob in position.top] for position in got])
    torch.testing.assert_close(tops, scores.topk(3).values, rtol=1e-3, atol=1e-3)
    by_id = torch.tensor([[token for token, _ in position.top] for position in got])
    torch.testing.assert_close(scores.gather(1, by_id), tops, rtol=1e-3, atol=1e-3)


def test_prompt_logprobs_do_not_depend_on_batch_chunks_or_the_part_that_is_scored(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        msgspec.structs.replace(request, prompt_logprobs=True)
        for request in requests_for(demo_model, logprobs=2, prompt_top=4, max_tokens=3)
    ]
    alone = engine_for(demo_model)
    want = {r.request_id: run(alone, [r])[r.request_id][0].prompt_logprobs for r in requests}
    assert all(len(want[r.request_id]) == len(r.prompt_ids) - 1 for r in requests)
    chunked = engine_for(demo_model, max_step_tokens=5)
    for engine in (engine_for(demo_model), chunked):
        assert {name: outputs[0].prompt_logprobs for name, outputs in run(engine, requests).items()} == want
    for engine in (engine_for(demo_model), chunked):  # after a start, whose prefix may be found
        late = [msgspec.structs.replace(r, logprobs_start=len(r.prompt_ids) * 2 // 3) for r in requests]
        got = run(engine, late) | {f"{name} again": outputs for name, outputs in run(engine, late).items()}
        for r in late:
            for name in (r.request_id, f"{r.request_id} again"):
                assert got[name][0].prompt_logprobs == want[r.request_id][r.logprobs_start :]
    monkeypatch.setattr("lmkit.turbo.runners.runner.SCORED_BYTES", 3 * 4 * 4096)
    assert {name: outputs[0].prompt_logprobs for name, outputs in run(alone, requests).items()} == want


def test_a_prompt_that_fills_the_context_can_be_scored(demo_model: Path) -> None:
    engine = engine_for(demo_model, max_model_len=64)
    full = Request(
        request_id="r", prompt_ids=[5] * 64, params=SamplingParams(max_tokens=0, seed=0), prompt_logprobs=True
    )
    (output,) = run(engine, [full])["r"]
    assert (output.finish_reason, output.token_ids, len(output.prompt_logprobs)) == ("length", [], 63)
    assert engine.stats().generation_tokens == 0
    with pytest.raises(RequestError, match="context"):
        engine.add(msgspec.structs.replace(full, params=SamplingParams(max_tokens=1, seed=0)))


def test_abort_frees_blocks_within_a_step(demo_model: Path) -> None:
    engine = engine_for(demo_model)
    for request in requests_for(demo_model):
        engine.add(request)
    engine.step()
    used = engine.stats().blocks_used
    engine.abort("r2")
    outputs = engine.step()
    assert [o.finish_reason for o in outputs if o.request_id == "r2"] == ["abort"]
    assert engine.stats().blocks_used < used
    while engine.has_work():
        assert all(o.request_id != "r2" for o in engine.step())
    engine.check_integrity()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0, "top_p": 0.9, "logprobs": 0},
        {"temperature": 0.7, "repetition_penalty": 1.3, "ignore_eos": False, "min_tokens": 9, "logprobs": 0},
    ],
    ids=["greedy", "drawn", "edited"],
)
def test_several_positions_of_a_step_are_sampled_as_one_after_the_other(
    demo_model: Path, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens and log-probabilities, bit for bit; what is drawn or penalized depends on the tokens before."""
    requests = [
        msgspec.structs.replace(request, prompt_logprobs=params["temperature"] == 0)
        for request in requests_for(demo_model, **params)
    ]
    want = run(engine_for(demo_model), requests)
    engine = engine_for(demo_model, overlap=False, max_step_tokens=32)
    lengths = propose_drafts(engine, {name: tokens(outputs) for name, outputs in want.items()}, monkeypatch)
    got = run(engine, requests)
    assert max(lengths) == 4
    assert max(len(output.token_ids) for outputs in got.values() for output in outputs) == 3
    for name, outputs in want.items():
        assert [x for o in got[name] for x in o.logprobs] == [x for o in outputs for x in o.logprobs]
        assert got[name][0].prompt_logprobs == outputs[0].prompt_logprobs
        assert tokens(got[name]) == tokens(outputs)
        assert got[name][-1].finish_reason == outputs[-1].finish_reason


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.8, "top_p": 0.9, "logprobs": 2}, {"repetition_penalty": 1.1, "min_tokens": 3}],
    ids=["greedy", "drawn", "edited"],
)
@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"kv_dtype": "int4", "block_size": 16}], ids=str)
def test_drafts_change_no_token(
    demo_model: Path, params: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a log-probability. Drafts are computed whether they pay or not: the test depends on no machine's speed."""
    code = Path(engine_module.__file__).read_text()[2000:2600]
    texts = [f"{code}\n# The same again:\n{code[:40]}", code, "x = 1\n" * 20]
    requests = [
        msgspec.structs.replace(asked, prompt_ids=Tokenizer.from_pretrained(demo_model).encode(text))
        for asked, text in zip(requests_for(demo_model, max_tokens=60, **params), texts, strict=False)
    ]
    big = {"max_model_len": 1024} | options
    want = run(engine_for(demo_model, **big), requests)
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    monkeypatch.setattr(speculation.StepTimes, "record", lambda self, counts, seconds: None)
    for most, kept in ((2, 0), (16, 0), (16, 4096)):
        engine = engine_for(demo_model, **big, speculate="ngram", max_draft_tokens=most, draft_history=kept)
        got = run(engine, requests)
        if kept:  # asked again, the answers are drafted as a whole
            steps = engine.stats().steps
            got = run(engine, requests)
            assert engine.stats().steps - steps < steps / 2
        for name, outputs in want.items():
            assert tokens(got[name]) == tokens(outputs)
            assert [x for o in got[name] for x in o.logprobs] == [x for o in outputs for x in o.logprobs]
        stats = engine.stats()
        assert 0 < stats.accepted_tokens <= stats.draft_tokens
        assert max(len(o.token_ids) for outputs in got.values() for o in outputs) > 1


def test_a_failing_step_ends_its_requests_and_no_others(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(demo_model, max_batch_size=2)
    requests = requests_for(demo_model)
    execute = engine.runner.execute
    calls = 0

    def fail_once(plan: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("injected")
        return execute(plan)

    monkeypatch.setattr(engine.runner, "execute", fail_once)
    reasons = {name: outputs[-1].finish_reason for name, outputs in run(engine, requests).items()}
    assert engine.stats().failed_steps == 1
    assert sorted(r for r in reasons.values() if r) == ["error", "error", "length", "length"]
    monkeypatch.undo()
    want = run(engine_for(demo_model), requests)
    assert tokens(run(engine, requests)["r0"]) == tokens(want["r0"])


def test_a_step_that_fails_before_it_computes_leaves_loads_and_later_steps_alone(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(demo_model, kv_host_memory=64 << 20)
    (req,) = [r for r in requests_for(demo_model) if len(r.prompt_ids) > 20]
    (want,) = run(engine, [req]).values()
    (cache,), runner = engine.scheduler.kv.caches, engine.runner
    copy = runner._blocks.copy

    def fail(copies: Any) -> None:
        monkeypatch.setattr(runner._blocks, "copy", copy)
        raise RuntimeError("injected")

    monkeypatch.setattr(engine.scheduler.kv, "load_seconds", lambda prefix, keys: 0.0)
    for evicted in (False, True):  # found on the device, with a copy; loaded
        if evicted:
            cache.clear()
        monkeypatch.setattr(runner._blocks, "copy", fail)
        (outputs,) = run(engine, [req]).values()
        assert outputs[-1].finish_reason == ("length" if evicted else "error")
        (again,) = run(engine, [req]).values()
        assert tokens(again) == tokens(want)
    assert engine.stats().failed_steps == 2
    assert engine.stats().tier_hits["host"] > 0
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_steps_limit_follows_from_its_tokens(
    demo_model: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, limits = engine_for(demo_model, overlap=overlap), list[float]()
    idle, collect = engine.step_limit, engine.runner.collect
    assert engine_module.STEP_SECONDS < idle < engine_module.STEP_SECONDS + 1
    assert engine._token_seconds > 0
    monkeypatch.setattr(engine.runner, "collect", lambda it: (limits.append(engine.step_limit), collect(it))[1])
    run(engine, requests_for(demo_model, max_tokens=1)[2:3])
    length = len(requests_for(demo_model)[2].prompt_ids)
    assert max(limits) == pytest.approx(idle + min(length, 64) * engine._token_seconds)
    assert engine.step_limit == idle


def test_a_prompt_beyond_the_context_is_refused(demo_model: Path) -> None:
    engine = engine_for(demo_model)
    with pytest.raises(RequestError) as caught:
        engine.add(Request(request_id="x", prompt_ids=[1] * 257, params=SamplingParams(seed=0)))
    assert caught.value.code == "context_length_exceeded"
    assert "257" in caught.value.message
    assert "256" in caught.value.message


def test_the_head_and_the_packed_weights_are_the_users_choice(demo_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(demo_model, model, ignore=shutil.ignore_patterns(".lmkit"))
    want = run(engine_for(model, packed_cache=False), requests_for(model))
    assert not (model / ".lmkit").exists()
    for _ in range(2):  # packed and written, then mapped
        assert run(engine_for(model), requests_for(model)) == want
    assert len(list((model / ".lmkit").iterdir())) == 1
    quantized = engine_for(model, lm_head="int8")
    run(quantized, requests_for(model))
    # The model's own head is its embeddings, which are in memory once. One of 8 bits stands beside them.
    assert quantized.info.memory["weights"] != engine_for(model).info.memory["weights"]


def test_the_first_tokens_leave_no_trace(demo_model: Path) -> None:
    """What an engine computes to get ready is not in its figures, and fits the smallest context there is."""
    for options in ({}, {"max_model_len": 1}, {"max_model_len": 3, "block_size": 1, "max_batch_size": 1}):
        engine = engine_for(demo_model, **options)
        stats = msgspec.structs.replace(engine.stats(), kept_since=None)  # a time
        assert not any((*stats.next_turns.values(), *stats.audits.values()))
        known = {"blocks_total": engine.info.num_blocks, "next_turns": stats.next_turns, "audits": stats.audits}
        assert stats == msgspec.structs.replace(EngineStats(), **known)
        assert not engine.has_work()


def test_a_closed_engine_leaves_nothing_in_memory(demo_model: Path) -> None:
    """A process whose model sleeps depends on it."""
    engine = Engine(str(demo_model), EngineConfig(kv_memory=8 << 20))
    engine.add(Request(request_id="r", prompt_ids=[1, 5, 6], params=SamplingParams(max_tokens=4, seed=0)))
    while engine.has_work():
        engine.step()
    left = weakref.ref(engine), weakref.ref(engine.runner)
    engine.close()
    del engine
    end = time.monotonic() + 30
    while any(part() for part in left) and time.monotonic() < end:  # a thread may still check the packed weights
        time.sleep(0.05)
        gc.collect()
    assert [part() for part in left] == [None, None]
