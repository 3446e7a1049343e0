"""`lmkit bench latency`: a static batch, the time of its prompts and the time of each further token.

A batch is B sequences that the engine gets together. The prefill ends with the step in which the last sequence gets its
first token. The decode is the time from there until each sequence has O - 1 more tokens. Sequences continue until then,
so every step of the decode works on the whole batch. The step budget (`max_step_tokens`) is that of a server.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lmkit.bench.config import Progress
from lmkit.bench.metrics import distribution, spread
from lmkit.bench.schema import LatencyRun, StepProfile
from lmkit.config import EngineConfig
from lmkit.errors import ConfigError, LMKitError
from lmkit.text import Tokenizer
from lmkit.turbo.engine.engine import Engine, Profile
from lmkit.turbo.request import EngineInfo, Request, SamplingParams


@dataclass(frozen=True)
class Shape:
    """A batch: its size, the tokens of each prompt and of each answer."""

    batch_size: int
    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"{self.batch_size} x {self.input_len} + {self.output_len}"


@dataclass(frozen=True)
class _Timing:
    """Times of one repeat in seconds."""

    prefill: float
    decode: float
    steps: list[float]
    profile: Profile  # of the decode


def shapes(batch_sizes: Sequence[int], input_lens: Sequence[int], output_lens: Sequence[int]) -> list[Shape]:
    """The grid."""
    return [Shape(*shape) for shape in itertools.product(batch_sizes, input_lens, output_lens)]


def check(shape: Shape, config: EngineConfig, info: EngineInfo) -> None:
    """Raise ConfigError for a shape that the engine cannot hold as one batch."""
    size = shape.batch_size
    if size > min(config.sequences_per_step, config.tokens_per_step):
        raise ConfigError(f"batch {shape}: more sequences than a step has room for; raise --max-batch-size")
    # The first sequences continue while the last prompts are computed, by at most one token a step.
    budget = config.tokens_per_step - size + 1
    longest = shape.input_len + shape.output_len + math.ceil(size * shape.input_len / budget)
    if longest > info.max_model_len:
        raise ConfigError(f"batch {shape}: sequences of up to {longest} tokens, the context is {info.max_model_len}")
    blocks = max(math.ceil(longest / info.block_size), math.ceil(shape.input_len / info.block_size) + 1)
    if size * blocks > info.num_blocks:
        raise ConfigError(f"batch {shape}: more than the KV cache's {info.num_blocks} blocks; raise --kv-memory")


def run_latency(
    engine: Engine,
    tokenizer: Tokenizer,
    grid: Sequence[Shape],
    *,
    repeats: int,
    warmup: int = 1,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> list[LatencyRun]:
    """Run each shape `warmup` + `repeats` (at least 1) times, with other random prompts each time.

    Raises LMKitError if a sequence ends before its batch is measured.
    """
    rng = np.random.default_rng(seed)
    special = tokenizer.special_ids
    words = np.array([i for i in range(min(tokenizer.vocab_size, engine.info.vocab_size)) if i not in special])
    runs = []
    for shape in grid:
        timings = []
        for repeat in range(warmup + repeats):
            progress(str(shape), repeat, warmup + repeats)
            prompts = rng.choice(words, size=(shape.batch_size, shape.input_len)).tolist()
            timings.append(_once(engine, prompts, shape))
        progress(str(shape), warmup + repeats, warmup + repeats)
        runs.append(_summarized(shape, timings[warmup:], engine.num_stages))
    return runs


def _once(engine: Engine, prompts: list[list[int]], shape: Shape) -> _Timing:
    params = SamplingParams(max_tokens=None, ignore_eos=True, seed=0)
    missing = {str(i): 1 for i in range(len(prompts))}  # tokens until the phase ends, for each sequence
    start = time.perf_counter()
    for i, prompt_ids in enumerate(prompts):
        engine.add(Request(request_id=str(i), prompt_ids=prompt_ids, params=params))
    _advance(engine, missing, shape)
    prefilled, before = time.perf_counter(), engine.profile()
    steps = _advance(engine, dict.fromkeys(missing, shape.output_len - 1), shape)
    end, profile = time.perf_counter(), engine.profile().since(before)
    for request_id in missing:
        engine.abort(request_id)
    while engine.has_work():
        engine.step()
    return _Timing(prefilled - start, end - prefilled, steps, profile)


def _advance(engine: Engine, missing: dict[str, int], shape: Shape) -> list[float]:
    """Step until every sequence has `missing` more tokens. Returns the seconds of the steps."""
    steps = []
    while any(count > 0 for count in missing.values()):
        start = time.perf_counter()
        for output in engine.step():
            if output.finish_reason is not None:
                raise LMKitError(f"batch {shape}: a sequence ended early: {output.error or output.finish_reason}")
            missing[output.request_id] -= len(output.token_ids)
        steps.append(time.perf_counter() - start)
    return steps


def _summarized(shape: Shape, timings: Sequence[_Timing], stages: int) -> LatencyRun:
    prefill = spread([1e3 * t.prefill for t in timings])
    later = shape.output_len - 1
    decode = distribution(1e3 * t.decode / later for t in timings) if later else None
    return LatencyRun(
        batch_size=shape.batch_size,
        input_len=shape.input_len,
        output_len=shape.output_len,
        repeats=len(timings),
        prefill_ms=prefill,
        prefill_tokens_per_s=1e3 * shape.batch_size * shape.input_len / prefill.p50,
        decode_ms_per_token=decode,
        decode_tokens_per_s=1e3 * shape.batch_size / decode.p50 if decode else None,
        decode_step_ms=distribution(1e3 * seconds for t in timings for seconds in t.steps),
        total_ms=spread([1e3 * (t.prefill + t.decode) for t in timings]),
        decode_profile=_profile(timings, stages) if decode else None,
    )


def _profile(timings: Sequence[_Timing], stages: int) -> StepProfile:
    count = sum(t.profile.steps for t in timings)
    step, kernels, elsewhere, execute, schedule, update = (
        1e3 * sum(seconds) / count
        for seconds in (
            [t.decode for t in timings],
            [t.profile.kernels for t in timings],
            [t.profile.elsewhere for t in timings],
            [t.profile.execute for t in timings],
            [t.profile.schedule for t in timings],
            [t.profile.update for t in timings],
        )
    )
    return StepProfile(
        step=step,
        kernels=kernels,
        inputs_and_sampling=execute - kernels,
        idle=step - execute,
        schedule=schedule,
        update=update,
        outside_kernels=1 - kernels / step,
        bubble=1 - (kernels + elsewhere) / (stages * step) if stages > 1 and elsewhere else None,
    )
