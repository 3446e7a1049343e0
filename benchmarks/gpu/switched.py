"""Section "switches": Llama-3-8B as by default, and with each part of the engine turned off, or on (LMKIT_CUDA).

Each engine decodes, and takes prompts in beside sequences that decode: what an arrival costs the others. What changes
results is no switch, and is measured beside: an INT8 head, and int8 activations.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec

from benchmarks.gpu import engine as engines
from benchmarks.gpu.context import Context
from benchmarks.gpu.engine import Case, Load
from lmkit.kernels.cuda import gemm_table, module
from lmkit.kernels.cuda.switches import Switches, read_anew
from lmkit.turbo.engine.engine import Engine

OTHERS = "experts", "plain_heads", "float8"  # of other models: sections "experts" and "attention" measure the first two
TURNED = tuple(
    f"{name}={'off' if on else 'on'}"
    for name, on in msgspec.structs.asdict(Switches()).items()
    if isinstance(on, bool) and name not in OTHERS
)
UNCAPTURED = "kernels=off", "capture=off"
CASE = Case("Llama-3-8B", "w4", (Load(1, 1024), Load(16, 1024)))
REHEARSAL = Case("tiny Llama", "w4", (Load(2, 5),))
OPTIONS: dict[str, dict[str, Any]] = {"INT8 head": {"head": "int8"}, "int8 activations": {"activations": "int8"}}
DECODING, PROMPT, ARRIVALS = 16, 128, 10
MOST_TOKENS = 300  # more than sequences make meanwhile


def run(context: Context) -> None:
    case = REHEARSAL if context.rehearsal else CASE
    for text in ("", *TURNED, *OPTIONS):
        what, options = text or "as by default", OPTIONS.get(text, {})
        if context.is_over:
            context.row(what, error="no time left")
            continue
        with (
            context.attempt(what),
            switched("" if options else text, context),
            engines.engine(context, replace(case, **options)) as engine,
        ):
            for load in case.loads:
                rate, *_ = engines.decode_rate(context, engine, load)
                context.row(f"{what}: decode b{load.batch}", context=load.context, tokens_per_s=rate)
            context.row(f"{what}: arrival", seconds=_arrival(context, engine), captured=engine.info.captured)


@contextmanager
def switched(text: str, context: Context) -> Iterator[None]:
    """With LMKIT_CUDA=text, and kernels that are loaded anew."""
    before = os.environ.get("LMKIT_CUDA")
    os.environ["LMKIT_CUDA"] = text
    _forget(context)
    try:
        yield
    finally:
        os.environ["LMKIT_CUDA"] = before or ""
        _forget(context)


def _forget(context: Context) -> None:
    read_anew()
    gemm_table.table.cache_clear()
    if not context.rehearsal:
        module.BACKENDS.pop("cuda", None)


def _arrival(context: Context, engine: Engine) -> float:
    """The median of the longest step while a prompt joins sequences that decode."""
    count, length = (1, 5) if context.rehearsal else (DECODING, PROMPT)
    arrivals = 1 if context.rehearsal else ARRIVALS
    for request in engines.requests(engine, count, length, MOST_TOKENS):
        engine.add(request)
    for _ in range(4):
        engine.step()
    worst = []
    for index in range(arrivals):
        (request,) = engines.requests(engine, 1, length, 1, first=1000 + index)
        engine.add(request)
        longest, done = 0.0, False
        while not done:
            start = time.perf_counter()
            done = any(
                output.request_id == request.request_id and output.finish_reason is not None for output in engine.step()
            )
            longest = max(longest, time.perf_counter() - start)
        worst.append(longest)
    engines.drop(engine, count)
    return sorted(worst)[len(worst) // 2]
