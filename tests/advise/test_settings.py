"""The simulation against times that are known by hand, what must hold for all settings, and the commands around it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from lmkit.advise.costs import CostFile, StepCosts, TypeCosts, Work, fit, read_costs, work_of, write_costs
from lmkit.advise.describe import describe
from lmkit.advise.server import drawn, samples_of
from lmkit.advise.settings import Targets, advise
from lmkit.advise.simulate import Asked, Outcome, Setting, Simulation, limits_of
from lmkit.advise.trace import Trace, TracedRequest
from lmkit.advise.workload import requests_of
from lmkit.cli.main import app
from lmkit.errors import ConfigError
from lmkit.turbo.kv.manager import KVLimits
from lmkit.turbo.plan import Chunk, StepPlan
from lmkit.turbo.scheduling.limits import SchedulerLimits
from tests.cli.commands import mistake
from tests.serve.in_process import App, ScriptedEngine

COSTS = StepCosts(step=1e-2, prompt=1e-3, attend=1e-6, decode=2e-3, read=1e-5)
LIMITS = SchedulerLimits(
    kv=KVLimits(num_blocks=4096, block_size=32, max_step_tokens=64),
    max_batch_size=64,
    max_step_tokens=64,
    max_model_len=1024,
    max_queue=1024,
    vocab_size=100,
)
ONE = TypeCosts(costs=COSTS, error=0.0, num_steps=100, limits=LIMITS)
FILE = CostFile(model="demo", environment={}, options={}, largest_batch=64, types={"auto": ONE})


def setting(**changes: Any) -> Setting:
    return replace(Setting(replicas=1, kv_dtype="auto", prefix_cache=True, max_batch_size=64), **changes)


def asked(count: int, *, every: float, prompt: int = 50, output: int = 20, seed: int = 0) -> list[Asked]:
    rng = np.random.default_rng(seed)
    return [Asked(i * every, rng.integers(1000, size=prompt, dtype=np.int32), output) for i in range(count)]


def simulated(requests: list[Asked], of: TypeCosts = ONE, **changes: Any) -> Outcome:
    return Simulation(requests, of, setting(**changes)).run()


def test_one_request_takes_the_sum_of_its_steps() -> None:
    """The prompt has two whole steps, and the second samples the first token."""
    (request,) = asked(1, every=1.0, prompt=128, output=5)
    outcome = simulated([request])
    attend = sum(range(1, 65)), sum(range(65, 129))
    prefill = sum(COSTS.step + 64 * COSTS.prompt + seen * COSTS.attend for seen in attend)
    assert outcome.ttft_ms == pytest.approx([1e3 * prefill])
    decode = [COSTS.step + COSTS.decode + (129 + i) * COSTS.read for i in range(4)]
    assert outcome.itl_ms == pytest.approx([1e3 * seconds for seconds in decode])
    assert outcome.seconds == pytest.approx(prefill + sum(decode))
    assert outcome.queue_ms == 0
    assert outcome.output_tokens == 5


def test_a_request_waits_for_the_steps_that_are_planned() -> None:
    """It comes during a step of another request. The next step was planned when that one began, without it."""
    first, second = asked(2, every=0.0, prompt=20, output=4)
    whole = msgspec.structs.replace(ONE, limits=replace(LIMITS, decode_slowdown=1e9))
    outcome = simulated([first, replace(second, at=1e-3)], whole)
    prefill = COSTS.step + 20 * COSTS.prompt + 210 * COSTS.attend
    decode = COSTS.step + COSTS.decode + 21 * COSTS.read
    both = prefill + COSTS.decode + 22 * COSTS.read
    assert outcome.ttft_ms == pytest.approx([1e3 * prefill, 1e3 * (prefill + decode + both - 1e-3)])
    assert outcome.queue_ms == pytest.approx(1e3 * (prefill - 1e-3) / 2)


def test_a_prefix_cache_computes_a_shared_prompt_once() -> None:
    (request,) = asked(1, every=1.0, prompt=640, output=1)
    twice = [request, replace(request, at=10.0)]
    on, off = simulated(twice), simulated(twice, prefix_cache=False)
    assert on.ttft_ms[1] < on.ttft_ms[0] / 5
    assert off.ttft_ms[1] == pytest.approx(off.ttft_ms[0])
    assert on.served_from_cache == pytest.approx(639 / 1280, abs=0.03)
    assert off.served_from_cache == 0


@given(st.integers(0, 1000), st.integers(8, 30), st.floats(0.0, 0.2))
@hypothesis_settings(max_examples=8, deadline=None)
def test_more_replicas_never_raise_the_queue(seed: int, count: int, every: float) -> None:
    """Requests of one size. Every setting answers all of them with all their tokens."""
    requests = asked(count, every=every, seed=seed)
    outcomes = [simulated(requests, replicas=n, max_batch_size=4) for n in (1, 2, 4)]
    assert all(outcome.output_tokens == 20 * count and not outcome.refused for outcome in outcomes)
    queues = [outcome.queue_ms for outcome in outcomes]
    assert queues == sorted(queues, reverse=True)


def test_a_request_longer_than_the_context_is_refused_and_never_meets_a_target() -> None:
    outcome = simulated([*asked(1, every=1.0, prompt=2000), *asked(1, every=1.0)])
    assert (outcome.refused, len(outcome.ttft_ms)) == (1, 1)
    assert Targets(ttft_ms=1e9).strain(outcome) == math.inf


def test_less_memory_admits_fewer_requests_at_once() -> None:
    small = msgspec.structs.replace(ONE, limits=replace(LIMITS, kv=replace(LIMITS.kv, num_blocks=32)))
    requests = asked(20, every=0.0, prompt=256, output=40)
    assert simulated(requests, small).queue_ms > 1.2 * simulated(requests).queue_ms


def test_a_small_batch_has_the_blocks_of_its_sequences() -> None:
    assert limits_of(LIMITS, setting(max_batch_size=2)).kv.num_blocks == 2 * 1024 // 32
    assert limits_of(LIMITS, setting(max_batch_size=256)).kv.num_blocks == LIMITS.kv.num_blocks


def test_the_fit_finds_the_terms_and_none_below_zero() -> None:
    rng = np.random.default_rng(1)
    works = [Work(1, *(int(n) for n in rng.integers(0, 1000, 4))) for _ in range(60)]
    found, error = fit(works, [COSTS.seconds(work) for work in works])
    assert msgspec.structs.astuple(found) == pytest.approx(msgspec.structs.astuple(COSTS), rel=1e-6)
    assert error < 1e-6
    noisy = [COSTS.step * (1 + 0.5 * float(rng.random())) for _ in works]
    assert min(msgspec.structs.astuple(fit(works, noisy)[0])) >= 0
    with pytest.raises(ConfigError, match="too few"):
        fit(works[:3], [1.0] * 3)


def test_work_of_a_step() -> None:
    """Two decoding sequences with 10 and 20 tokens, and tokens 4 and 5 of a prompt, which see 5 and 6."""
    chunks = [Chunk(0, 9, 1, [], 1), Chunk(1, 19, 1, [], 1), Chunk(2, 4, 2, [], 0)]
    assert work_of(StepPlan([], [], chunks)) == Work(1, 2, 11, 2, 30)


def test_the_cheapest_setting_has_the_fewest_replicas() -> None:
    """One replica with 4 sequences at once keeps requests waiting. The search ends at the first number that does."""
    requests = asked(60, every=0.02)
    slow = advise(requests, FILE, Targets(ttft_ms=1200), batches=[4], replicas=[1, 2, 4, 8])
    assert slow.best is not None
    assert slow.best.replicas == 4
    assert [one.replicas for one in slow.tried] == [1, 2, 4]
    assert not any(one.is_met for one in slow.tried[:-1])
    assert slow.command == "lmkit serve demo --max-batch-size 4"
    none = advise(requests, FILE, Targets(ttft_ms=1), batches=[4], replicas=[1, 2])
    assert (none.best, none.command, len(none.tried)) == (None, None, 2)
    untargeted = advise(requests, FILE, Targets(), batches=[4, 8], replicas=[1, 2])
    assert (untargeted.best, len(untargeted.tried)) == (None, 4)


def test_the_first_kv_type_is_preferred() -> None:
    both = msgspec.structs.replace(FILE, types={"auto": ONE, "int8": ONE}, options={"num-threads": "2"})
    found = advise(asked(5, every=1.0), both, Targets(itl_ms=100), batches=[4], replicas=[1], caches=[True, False])
    assert found.best is not None
    assert found.best.kv_dtype == "auto"
    costly = msgspec.structs.replace(ONE, costs=msgspec.structs.replace(COSTS, decode=1.0))
    slow = msgspec.structs.replace(both, types={"auto": costly, "int8": ONE})
    found = advise(asked(5, every=1.0), slow, Targets(itl_ms=100), batches=[4], replicas=[1], caches=[False])
    assert found.command == ("lmkit serve demo --num-threads 2 --max-batch-size 4 --kv-dtype int8 --no-prefix-cache")


def test_requests_of_a_trace() -> None:
    rows = [(3.0, 10, 4, 0), (1.0, 20, 6, 15), (2.0, 30, 8, 20)]
    trace = Trace(
        "log",
        [TracedRequest(start=s, end=s + 1, prompt_tokens=p, output_tokens=o, cached_tokens=c) for s, p, o, c in rows]
        + [TracedRequest(start=0.0, end=1.0, failed=True)],
    )
    found = requests_of(trace)
    assert [(r.at, len(r.prompt), r.num_output) for r in found] == [(0.0, 20, 6), (1.0, 30, 8), (2.0, 10, 4)]
    assert (found[0].prompt[:15] == found[1].prompt[:15]).all()
    assert found[0].prompt[15] != found[1].prompt[15]
    assert [r.at for r in requests_of(trace, rate=4.0)] == [0.0, 0.25, 0.5]
    assert [r.at for r in requests_of(trace, rate=math.inf, limit=2)] == [0.0, 0.0]
    again = requests_of(trace)
    assert all((one.prompt == other.prompt).all() for one, other in zip(found, again, strict=True))
    assert any((one.prompt != other.prompt).any() for one, other in zip(found, requests_of(trace, seed=1), strict=True))


def test_a_trace_without_times_gets_them_from_a_rate() -> None:
    trace = Trace("dataset", [TracedRequest(prompt_tokens=10, max_tokens=5) for _ in range(400)])
    with pytest.raises(ConfigError, match="--rate"):
        requests_of(trace)
    times = [r.at for r in requests_of(trace, rate=8.0)]
    assert times == [r.at for r in requests_of(trace, rate=8.0)]
    assert len(times) / times[-1] == pytest.approx(8.0, rel=0.2)
    with pytest.raises(ConfigError, match="no lengths of answers"):
        requests_of(Trace("dataset", [TracedRequest(prompt_tokens=10)]), rate=1.0)
    with pytest.raises(ConfigError, match="no lengths of prompts"):
        requests_of(Trace("log", [TracedRequest(start=0.0, end=1.0)]))


def bench_file(folder: Path) -> Path:
    requests = [
        {"conversation": i, "prompt_tokens": 50, "requested_tokens": 20, "scheduled": i / 50, "start": i / 50,
         "end": i / 50 + 1, "bursts": [[i / 50 + 1, 20]]}
        for i in range(60)
    ]  # fmt: skip
    file = folder / "bench.json"
    file.write_text(json.dumps({"schema": "lmkit.bench/1", "runs": [{"requests": requests}]}))
    return file


def ran(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["advise", *map(str, arguments)], env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_prints_the_setting_and_how_to_serve_it(tmp_path: Path) -> None:
    trace, costs = bench_file(tmp_path), tmp_path / "costs.json"
    write_costs(costs, FILE)
    assert read_costs(costs) == FILE
    shared = [trace, "--costs", costs, "--max-batch-size", "4"]
    shown = ran(*shared, "--ttft", 1200)
    assert "Meets TTFT 1200 ms at p95, on each of 4 machines:\n  lmkit serve demo --max-batch-size 4\n" in shown
    assert "lmkit proxy --node http://MACHINE1:8000" in shown
    assert "No setting meets TTFT 1 ms and ITL 1 ms at p95" in ran(*shared, "--ttft", 1, "--itl", 1)
    found = json.loads(ran(*shared, "--ttft", 1200, "--percentile", 50, "--json"))
    assert found["requests"] == 60
    assert found["advice"]["best"]["ttft"] <= 1200
    untargeted = ran(trace, "--costs", costs, "--replicas", 1)
    assert "Meets" not in untargeted
    assert "No setting" not in untargeted


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    trace, costs = bench_file(tmp_path), tmp_path / "costs.json"
    write_costs(costs, FILE)
    for option, value in (("--ttft", 100), ("--rate", 2), ("--replicas", 2), ("--seed", 1), ("--kv-dtype", "int8")):
        assert f"{option} needs step costs: measure them with --model MODEL" in mistake("advise", trace, option, value)
    assert "--model MODEL" in mistake("advise", trace, "--costs", tmp_path / "none.json")
    assert "no costs of KV type int8" in mistake("advise", trace, "--costs", costs, "--kv-dtype", "int8")
    for option in ("--num-threads", "--seconds"):
        assert f"{option} is for a measurement" in mistake("advise", trace, "--costs", costs, option, 1)
    assert "--served-model is for the URL" in mistake("advise", trace, "--served-model", "x")
    assert "--kv-dtype 'int5': choose from auto" in mistake("advise", trace, "--model", "demo", "--kv-dtype", "int5")
    costs.write_text("{}")
    assert "no costs of `lmkit advise --model`" in mistake("advise", trace, "--costs", costs)
    assert "/metrics cannot be read" in mistake("advise", "http://127.0.0.1:9")


def answered(*prompts: int) -> tuple[str, float]:
    """/metrics of a server that has answered prompts of so many tokens with two tokens each, and its time."""
    server = App(ScriptedEngine())
    for count in prompts:
        body = {"model": "model", "prompt": [5] * count, "max_tokens": 2}
        assert server.post("/v1/completions", body).status_code == 200
    text = server.request("GET", "/metrics").text
    (since,) = re.findall(r"^lmkit:request_prompt_tokens_created\S* (\S+)$", text, re.M)
    return text, float(since)


def test_requests_are_drawn_from_a_server() -> None:
    """Three of four prompts are in the bucket up to 5, one in that up to 50. The answers have 2 tokens."""
    text, since = answered(4, 4, 4, 48)
    trace = drawn(samples_of(text, "URL"), "URL", None, 1000, since + 8.0, 0)
    prompts = [request.prompt_tokens or 0 for request in trace.requests]
    assert {request.output_tokens for request in trace.requests} == {2}
    assert all(2 <= count <= 5 or 20 <= count <= 50 for count in prompts)
    assert np.mean(prompts) == pytest.approx(15, abs=0.5)
    assert sum(count <= 5 for count in prompts) == pytest.approx(750, abs=60)
    described = describe(trace, block_size=32)
    assert described.arrivals is not None
    assert described.arrivals.requests_per_s == pytest.approx(4 / 8.0, rel=0.15)
    assert described.arrivals.max_concurrency is None
    assert drawn(samples_of(text, "URL"), "URL", "model", 1000, since + 8.0, 0) == trace


def test_a_server_that_does_not_tell_enough() -> None:
    text, since = answered()
    found = samples_of(text, "URL")
    with pytest.raises(ConfigError, match="no request yet"):
        drawn(found, "URL", None, 10, since + 1, 0)
    with pytest.raises(ConfigError, match="it serves model"):
        drawn(found, "URL", "other", 10, since + 1, 0)
    with pytest.raises(ConfigError, match="name a node"):
        drawn([], "URL", None, 10, since + 1, 0)


def test_costs_are_measured_and_kept(demo_model: Path, tmp_path: Path) -> None:
    """A prompt of 512 tokens takes longer than a step of decoding. The engine's memory is in the file."""
    file = tmp_path / "costs.json"
    shared = ["--model", demo_model, "--costs", file, "--num-threads", 1, "--seconds", 1, "--max-batch-size", 4]
    found = json.loads(ran(bench_file(tmp_path), *shared, "--kv-dtype", "int8", "--replicas", 1, "--json"))
    kept = read_costs(file)
    assert list(kept.types) == ["int8"]
    costs, limits = kept.types["int8"].costs, kept.types["int8"].limits
    assert costs.seconds(Work(1, 512, 512 * 256, 0, 0)) > costs.seconds(Work(1, 0, 0, 1, 100)) > 0
    assert limits.max_batch_size == 4
    assert limits.kv.num_blocks == 4 * -(-limits.max_model_len // 32)
    assert kept.options == {"num-threads": "1"}
    assert [one["max_batch_size"] for one in found["advice"]["tried"]] == [4]
