"""The requests of a trace, as the simulation takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lmkit.advise.simulate import Asked
from lmkit.advise.trace import VOCAB, Trace, TracedRequest
from lmkit.bench.arrivals import arrival_times
from lmkit.errors import ConfigError


def requests_of(trace: Trace, *, rate: float | None = None, limit: int | None = None, seed: int = 0) -> list[Asked]:
    """The first `limit` requests that did not fail, in the order of arrival.

    `rate` is in requests a second: the trace's own times are stretched to it, and a trace without times gets Poisson
    arrivals. Unknown prompts are random tokens. If the server has told how many of their tokens it had cached, so many
    first tokens are the same in all prompts. Raises ConfigError if the trace lacks lengths, or times without `rate`.
    """
    answered = [request for request in trace.requests if not request.failed]
    lengths = [(r.prompt_tokens, r.max_tokens if r.output_tokens is None else r.output_tokens) for r in answered]
    known = [(r, n, m) for r, (n, m) in zip(answered, lengths, strict=True) if n and m is not None]
    if not known:
        missing = "prompts" if not any(prompt for prompt, _ in lengths) else "answers"
        raise ConfigError(f"the trace has no lengths of {missing}, so nothing can be simulated (docs/advise.md)")
    starts = [r.start for r, _, _ in known if r.start is not None]
    if len(starts) == len(known):
        known.sort(key=lambda row: row[0].start or 0.0)
    rng = np.random.default_rng(seed)
    common = rng.integers(VOCAB, size=max(r.cached_tokens or 0 for r, _, _ in known), dtype=np.int32)
    times = _times(sorted(starts) if len(starts) == len(known) else [], len(known), rate, rng)
    return [
        Asked(at, _prompt(request, prompt, common, rng), max(1, output))
        for at, (request, prompt, output) in zip(times[:limit], known[:limit], strict=True)
    ]


def has_shared_prefixes(trace: Trace) -> bool:
    """Whether the trace tells what prompts have in common."""
    return any(request.prompt is not None or request.cached_tokens for request in trace.requests)


def _times(starts: Sequence[float], count: int, rate: float | None, rng: np.random.Generator) -> list[float]:
    """Seconds from the first arrival on."""
    if not starts:
        if rate is None:
            raise ConfigError("the trace has no times: give the requests a second with --rate")
        arrivals = arrival_times(rate, rng=rng)
        return [next(arrivals) for _ in range(count)]
    seconds = starts[-1] - starts[0]
    stretch = 1.0
    if rate is not None and not math.isinf(rate):
        if not seconds:
            raise ConfigError("all requests of the trace came at once: --rate cannot stretch them")
        stretch = (count - 1) / seconds / rate
    elif rate is not None:
        stretch = 0.0
    return [(start - starts[0]) * stretch for start in starts]


def _prompt(request: TracedRequest, count: int, common: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if request.prompt is not None:
        return request.prompt
    cached = min(request.cached_tokens or 0, count)
    return np.concatenate([common[:cached], rng.integers(VOCAB, size=count - cached, dtype=np.int32)])
