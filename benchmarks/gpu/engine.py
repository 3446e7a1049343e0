"""Section "engine": whole models of random weights, from requests to tokens. Section "transformers" is its counterpart.

Timing of decoding starts when every sequence has its first token. The rate is output tokens per second of wall time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.models import CONFIGS, Storage, random_decoder
from benchmarks.gpu.roofline import W4_G128, Decode, prefill_flops
from benchmarks.gpu.trace import trace
from lmkit.config import Activations, EngineConfig, HeadStorage
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.runners.cuda_device import CudaDevice

SECONDS = 1.5  # longest time of timed decoding
STEPS = 200


@dataclass(frozen=True)
class Load:
    """`batch` prompts of `context` tokens."""

    batch: int
    context: int


@dataclass(frozen=True)
class Case:
    model: str
    storage: Storage
    loads: tuple[Load, ...]
    kv: Any = "int8"
    prefill: tuple[int, int] | None = None  # prompts, tokens of each
    head: HeadStorage = "auto"
    activations: Activations = "auto"

    @property
    def name(self) -> str:
        return f"{self.model} {self.storage} {self.kv} KV"


CASES = (
    Case("Llama-3-8B", "w4", (Load(1, 1024), Load(16, 1024), Load(64, 1024), Load(256, 1024)), prefill=(8, 2048)),
    Case("Llama-3-8B", "bfloat16", (Load(1, 128),), "bfloat16"),
    Case("Qwen2.5-7B", "w4", (Load(1, 128), Load(64, 1024)), prefill=(8, 2048)),
    Case("Llama-3.2-1B", "w4", (Load(1, 128), Load(64, 1024)), prefill=(8, 2048)),
)
REHEARSAL = (Case("tiny Llama", "w4", (Load(2, 5),), prefill=(2, 20)),)


def run(context: Context) -> None:
    for case in REHEARSAL if context.rehearsal else CASES[:1] if context.quick else CASES:
        if context.is_over:
            context.row(case.name, error="no time left")
            continue
        with context.attempt(case.name), engine(context, case) as built:
            for load in case.loads:
                with context.attempt(f"{case.name} decode", batch=load.batch, context=load.context):
                    _decode(context, case, built, load)
            if case.prefill is not None:
                with context.attempt(f"{case.name} prefill"):
                    _prefill(context, case, built, *case.prefill)


@contextmanager
def engine(context: Context, case: Case) -> Iterator[Engine]:
    start = time.perf_counter()
    dtype = torch.bfloat16 if case.storage == "bfloat16" else torch.float16
    decoder = random_decoder(
        case.model, case.storage, dtype, context.device, head=case.head, activations=case.activations
    )
    made = time.perf_counter()
    longest = max(load.context for load in case.loads) + 2 * STEPS
    config = EngineConfig(
        device="cuda",
        kv_dtype=case.kv,
        prefix_cache=False,
        max_batch_size=max(load.batch for load in case.loads),
        max_step_tokens=64 if context.rehearsal else 8192,
        max_model_len=longest if case.prefill is None else max(longest, case.prefill[1] + 16),
    )
    built = Engine.of(decoder, config, device=device_of(context))
    seconds = {"model_seconds": made - start, "engine_seconds": time.perf_counter() - made}
    context.row(case.name, **seconds, captured=built.info.captured)
    try:
        yield built
    finally:
        built.close()
        del built, decoder
        if not context.rehearsal:
            torch.cuda.empty_cache()


def device_of(context: Context) -> CudaDevice:
    if not context.rehearsal:
        return CudaDevice()
    from tests.emulator.device import EmulatedDevice

    return EmulatedDevice()


def requests(engine: Engine, count: int, length: int, new_tokens: int, first: int = 0) -> Iterator[Request]:
    """`count` requests, numbered from `first`, with random prompts."""
    generator = torch.Generator().manual_seed(first)
    vocab = engine.runner.decoder.spec.vocab_size
    for index in range(first, first + count):
        prompt = torch.randint(0, vocab, (length,), generator=generator).tolist()
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        yield Request(request_id=str(index), prompt_ids=prompt, params=params)


def decode_rate(context: Context, engine: Engine, load: Load, traced: str = "") -> tuple[float, int, float, float]:
    """(output tokens per second, steps, seconds of a step, seconds of the prompts). `traced` names the rows of a trace
    of one step's kernels after the measurement; empty: none is made."""
    steps = 4 if context.rehearsal else STEPS
    for request in requests(engine, load.batch, load.context, 2 * steps + STEPS):
        engine.add(request)
    waiting = {str(index) for index in range(load.batch)}
    began = time.perf_counter()
    while waiting:
        for output in engine.step():
            assert output.error is None, output.error
            waiting -= {output.request_id} if output.token_ids else set()
    start, tokens, done = time.perf_counter(), 0, 0
    while done < steps and time.perf_counter() - start < SECONDS:
        tokens += sum(len(output.token_ids) for output in engine.step())
        done += 1
    seconds = time.perf_counter() - start
    if traced:
        trace(context, traced, engine.step)
    drop(engine, load.batch)
    return tokens / seconds, done, seconds / done, start - began


def _decode(context: Context, case: Case, engine: Engine, load: Load) -> None:
    rate, steps, step_seconds, prompt_seconds = decode_rate(context, engine, load, f"{case.name} b{load.batch}")
    shape, peak = CONFIGS[case.model][0], context.peak()
    length = load.context + steps // 2
    weight_bytes = W4_G128 if case.storage == "w4" else 2.0
    bound = Decode(shape, load.batch, length, case.kv, weight_bytes)
    share = context.share(rate, bound.tokens_per_s(peak), f"{case.name} decode")
    context.row(
        f"{case.model} decode b{load.batch}", storage=case.storage, kv=case.kv, batch=load.batch, context=load.context,
        steps=steps, tokens_per_s=rate, step_seconds=step_seconds, bound=bound.tokens_per_s(peak),
        share=share, prompt_seconds=prompt_seconds, captured=engine.info.captured,
    )  # fmt: skip


def drop(engine: Engine, count: int) -> None:
    """End the first `count` requests."""
    for index in range(count):
        engine.abort(str(index))
    while engine.has_work():
        engine.step()


def _prefill(context: Context, case: Case, engine: Engine, count: int, length: int) -> None:
    for request in requests(engine, count, length, 1):
        engine.add(request)
    start = time.perf_counter()
    while engine.has_work():
        engine.step()
    seconds = time.perf_counter() - start
    flops = count * prefill_flops(CONFIGS[case.model][0], length)
    share = context.share(flops / seconds, context.peak().flops, f"{case.name} prefill")
    context.row(
        f"{case.model} prefill", storage=case.storage, kv=case.kv, prompts=count, context=length,
        tokens_per_s=count * length / seconds, flops=flops / seconds, share=share,
    )  # fmt: skip
