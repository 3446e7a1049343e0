"""What a running lmkit server tells of its requests: histograms of lengths, and how many came since it started.

It keeps no single requests. Those of the trace are drawn: lengths have the histogram's buckets and its mean, and prompt
and answer are independent of each other. Arrivals are Poisson. The share of prompt tokens that its cache has served is
the same in each prompt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from lmkit.advise.trace import Trace, TracedRequest
from lmkit.bench.arrivals import arrival_times
from lmkit.errors import ConfigError
from lmkit.web.client import client_options

PROMPTS, ANSWERS = "lmkit:request_prompt_tokens", "lmkit:request_generation_tokens"
TIMEOUT = 10.0  # seconds
MAX_POWER, BISECTIONS = 64.0, 30  # see _lengths

Samples = list[tuple[str, dict[str, str], float]]  # name, labels, value


def read_server(url: str, *, num_requests: int, model: str | None = None, seed: int = 0) -> Trace:
    """A trace of `num_requests` requests like those that `model` (by default the only one) at `url` has answered.

    Raises ConfigError if the server cannot be asked, or does not tell enough.
    """
    import httpx

    try:
        with httpx.Client(**client_options(url, None, TIMEOUT)) as client:
            answer = client.get("/metrics")
            answer.raise_for_status()
    except httpx.HTTPError as error:
        raise ConfigError(f"{url}: /metrics cannot be read: {error}") from None
    return drawn(samples_of(answer.text, url), url, model, num_requests, time.time(), seed)


def samples_of(text: str, url: str) -> Samples:
    from prometheus_client.parser import text_string_to_metric_families

    try:
        return [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]
    except ValueError as error:
        raise ConfigError(f"{url}: /metrics is no Prometheus text: {error}") from None


def drawn(samples: Samples, url: str, model: str | None, num_requests: int, now: float, seed: int) -> Trace:
    """The trace of the server whose /metrics are `samples` at the time `now`, in seconds since 1970."""
    names = sorted({labels["model_name"] for name, labels, _ in samples if name == PROMPTS + "_count"})
    if not names:
        raise ConfigError(
            f"{url}: has no histograms of lengths, as `lmkit serve` has; behind a proxy name a node, or read the "
            "proxy's log (docs/advise.md)"
        )
    if model is None and len(names) > 1:
        raise ConfigError(f"{url}: serves {len(names)} models: choose one with --served-model: {', '.join(names)}")
    if model is not None and model not in names:
        raise ConfigError(f"{url}: --served-model {model!r}: it serves {', '.join(names)}")
    own = [(name, labels, value) for name, labels, value in samples if labels.get("model_name") == (model or names[0])]
    values = {name: value for name, labels, value in own if len(labels) == 1}
    if not values.get(PROMPTS + "_count"):
        raise ConfigError(f"{url}: has answered no request yet")
    rng = np.random.default_rng(seed)
    prompts, answers = (_lengths(own, name, num_requests, rng) for name in (PROMPTS, ANSWERS))
    looked_up = values.get("lmkit:prefix_cache_queries_total", 0.0)
    share = values.get("lmkit:prefix_cache_hits_total", 0.0) / looked_up if looked_up else 0.0
    seconds = now - values.get(PROMPTS + "_created", now)
    if seconds <= 0:
        raise ConfigError(f"{url}: does not tell since when it counts, so its rate is not known")
    times = arrival_times(values[PROMPTS + "_count"] / seconds, rng=rng)
    requests = [
        TracedRequest(start=next(times), prompt_tokens=p, output_tokens=a, cached_tokens=int(share * p))
        for p, a in zip(prompts, answers, strict=True)
    ]
    return Trace("server", requests)


def _lengths(samples: Samples, name: str, count: int, rng: np.random.Generator) -> Sequence[int]:
    """`count` lengths drawn from a histogram, each at least 1. Those above all buckets are the last bound.

    A length is low + (high - low) * u ** power in its bucket, where u is uniform. The power gives them the mean that
    the server tells.
    """
    buckets = sorted((float(labels["le"]), value) for key, labels, value in samples if key == name + "_bucket")
    bounds = np.array([0.0] + [min(bound, buckets[-2][0]) for bound, _ in buckets])
    idx = np.searchsorted([value for _, value in buckets], rng.random(count) * buckets[-1][1], side="right")
    low, high, u = bounds[idx], bounds[idx + 1], rng.random(count)
    mean = next(value for key, _, value in samples if key == name + "_sum") / buckets[-1][1]
    least, most = MAX_POWER**-1.0, MAX_POWER
    for _ in range(BISECTIONS):
        power = math.sqrt(least * most)
        is_short = float(np.mean(low + (high - low) * u**power)) < mean
        least, most = (least, power) if is_short else (power, most)
    return [max(1, round(length)) for length in (low + (high - low) * u**least).tolist()]
