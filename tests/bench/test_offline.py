"""Throughput and latency on the demo model, small."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from lmkit.bench.config import WorkloadConfig
from lmkit.bench.latency import Shape, check, run_latency, shapes
from lmkit.bench.throughput import ThroughputBench, run_throughput
from lmkit.bench.workload import Conversation, Turn, make_workload
from lmkit.config import EngineConfig
from lmkit.errors import ConfigError
from lmkit.text import Tokenizer
from lmkit.turbo.engine.engine import Engine

CONFIG = EngineConfig(max_batch_size=4, max_step_tokens=64, max_model_len=256, max_queue=3)


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Engine:
    return Engine(str(demo_model), CONFIG)


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(demo_model)


def test_throughput_counts_every_token(engine: Engine, tokenizer: Tokenizer) -> None:
    workload = WorkloadConfig(num_prompts=8, input_len=24, output_len=5)
    conversations = make_workload(workload, tokenizer, chat=False)
    seen: list[tuple[str, int, int]] = []
    hits = engine.stats().prefix_hits
    one, two = run_throughput(
        ThroughputBench(engine, tokenizer),
        conversations,
        [None, 2],
        warmup=2,
        targets={"e2e": 1e9},
        progress=lambda *step: seen.append(step),
    )
    for run in (one, two):
        assert (run.summary.num_completed, run.summary.errors) == (6, {}), "more than the queue holds, all the same"
        assert (run.summary.prompt_tokens, run.summary.output_tokens) == (6 * 24, 6 * 5)
        assert run.summary.tokens_per_burst == 1
        assert run.summary.goodput is not None
        assert run.summary.goodput.num_good == 6
        assert run.steps >= 5
        assert all(record.start <= record.bursts[0].time <= record.end for record in run.requests)
    assert two.summary.mean_concurrency <= 2
    assert engine.stats().prefix_hits - hits < 24, "the second run computes its prompts anew"
    assert seen == [(f"{n} at once", i, 6) for n in ("all", 2) for i in range(1, 7)]
    engine.check_integrity()


def test_turns_begin_with_what_was_said(engine: Engine, tokenizer: Tokenizer) -> None:
    (conversation,) = make_workload(
        WorkloadConfig(num_prompts=1, input_len=20, output_len=6, turns=3), tokenizer, chat=True
    )
    run = ThroughputBench(engine, tokenizer, detokenize=False).run([conversation])
    assert [record.turn for record in run.requests] == [0, 1, 2]
    lengths = [record.prompt_tokens for record in run.requests]
    assert lengths[0] == 20
    assert all(after >= before + 20 for before, after in itertools.pairwise(lengths))


def test_what_the_engine_refuses_is_counted(engine: Engine, tokenizer: Tokenizer) -> None:
    long = Turn(({"role": "user", "content": "x " * 300},), 5)
    short = Turn(({"role": "user", "content": "def f("},), 5)
    conversations = [Conversation((long, short), False), Conversation((short,), False)]
    run = ThroughputBench(engine, tokenizer).run(conversations)
    assert run.summary.errors == {"context_length_exceeded": 1}
    assert (run.summary.num_completed, run.skipped_turns) == (1, 1)


def test_latency_of_a_grid(engine: Engine, tokenizer: Tokenizer) -> None:
    grid = shapes([1, 3], [40], [1, 4])
    assert [str(shape) for shape in grid] == ["1 x 40 + 1", "1 x 40 + 4", "3 x 40 + 1", "3 x 40 + 4"]
    before = engine.stats()
    runs = run_latency(engine, tokenizer, grid, repeats=2)
    assert engine.stats().prompt_tokens - before.prompt_tokens == (1 + 2) * 2 * (40 + 3 * 40)
    assert not engine.has_work()
    for run in runs:
        assert run.repeats == run.prefill_ms.count == run.total_ms.count == 2
        assert run.prefill_tokens_per_s == pytest.approx(1e3 * run.batch_size * 40 / run.prefill_ms.p50)
        if run.output_len == 1:
            assert (run.decode_ms_per_token, run.decode_step_ms, run.decode_tokens_per_s) == (None, None, None)
            assert run.decode_profile is None
        else:
            assert run.decode_ms_per_token is not None
            assert run.decode_step_ms is not None
            assert run.decode_step_ms.count == 2 * 3, "three steps of the whole batch in each repeat"
            assert run.decode_tokens_per_s == pytest.approx(1e3 * run.batch_size / run.decode_ms_per_token.p50)
            assert run.total_ms.mean == pytest.approx(run.prefill_ms.mean + 3 * run.decode_ms_per_token.mean)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_parts_of_a_step_make_it_up(demo_model: Path, tokenizer: Tokenizer, overlap: bool) -> None:
    engine = Engine(str(demo_model), msgspec.structs.replace(CONFIG, overlap=overlap))
    (run,) = run_latency(engine, tokenizer, [Shape(2, 8, 9)], repeats=1, warmup=0)
    engine.close()
    profile = run.decode_profile
    assert profile is not None
    assert run.decode_ms_per_token is not None
    assert profile.step == pytest.approx(run.decode_ms_per_token.p50)
    assert profile.step == pytest.approx(profile.kernels + profile.inputs_and_sampling + profile.idle)
    assert profile.outside_kernels == pytest.approx(1 - profile.kernels / profile.step)
    assert min(profile.kernels, profile.inputs_and_sampling, profile.schedule, profile.update) > 0
    if not overlap:
        assert profile.idle > profile.schedule + profile.update


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(5, 8, 8), "--max-batch-size"),
        (Shape(1, 240, 17), "the context is 256"),
        (Shape(4, 120, 130), "the context is 256"),  # its first sequence goes on while the last is computed
    ],
)
def test_shapes_that_do_not_fit(engine: Engine, shape: Shape, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(shape, CONFIG, engine.info)
    check(Shape(4, 120, 100), CONFIG, engine.info)
