"""What a trace contains: lengths, arrivals, concurrency, and what a prefix cache would save."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from lmkit.advise.trace import Kind, Trace, TracedRequest
from lmkit.bench.metrics import Distribution, distribution
from lmkit.turbo.kv.block_pool import BlockPool
from lmkit.turbo.kv.radix_cache import RadixCache

_NAMESPACE = ("", "")


class Arrivals(msgspec.Struct, frozen=True):
    """When requests came."""

    seconds: float  # from the first to the last
    requests_per_s: float | None  # None if all came at once
    interval_cv: float | None  # standard deviation of the intervals / their mean: 0 even, 1 Poisson, above in bursts
    mean_concurrency: float | None  # seconds spent in requests / seconds from the first start to the last end
    max_concurrency: int | None  # as the mean, None if the ends are not known


class CacheShare(msgspec.Struct, frozen=True):
    """What a prefix cache would serve."""

    kv_tokens: int | None  # its size; None = unlimited
    share: float  # of all prompt tokens


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """A trace in figures; None where it does not tell. Lengths are those of requests that did not fail."""

    kind: Kind
    requests: int
    failed: int
    left_out: int
    arrivals: Arrivals | None
    prompt_tokens: Distribution | None
    output_tokens: Distribution | None
    max_tokens: Distribution | None
    served_from_cache: float | None  # share of prompt tokens that the server's cache did serve
    prefix_cache: list[CacheShare]  # that it would serve, by its size


def describe(trace: Trace, *, kv_tokens: Sequence[int] = (), block_size: int) -> Description:
    """The figures of a trace. `kv_tokens`: sizes of the prefix cache in tokens, besides an unlimited one."""
    answered = [request for request in trace.requests if not request.failed]
    prompts = [request.prompt for request in trace.requests if request.prompt is not None]
    sizes = [None, *sorted(kv_tokens, reverse=True)] if prompts else []
    return Description(
        kind=trace.kind,
        requests=len(trace.requests),
        failed=len(trace.requests) - len(answered),
        left_out=trace.num_left_out,
        arrivals=_arrivals(trace.requests),
        prompt_tokens=_lengths(request.prompt_tokens for request in answered),
        output_tokens=_lengths(request.output_tokens for request in answered),
        max_tokens=_lengths(request.max_tokens for request in answered),
        served_from_cache=_served(answered),
        prefix_cache=[CacheShare(size, cached_share(prompts, size, block_size)) for size in sizes],
    )


def _lengths(values: Iterable[int | None]) -> Distribution | None:
    return distribution(value for value in values if value is not None)


def _served(requests: Sequence[TracedRequest]) -> float | None:
    told = [(r.cached_tokens, r.prompt_tokens or 0) for r in requests if r.cached_tokens is not None]
    prompts = sum(prompt for _, prompt in told)
    return sum(cached for cached, _ in told) / prompts if prompts else None


def _arrivals(requests: Sequence[TracedRequest]) -> Arrivals | None:
    starts = np.sort([request.start for request in requests if request.start is not None])
    ends = np.sort([request.end for request in requests if request.end is not None])
    if not starts.size:
        return None
    intervals, seconds = np.diff(starts), float(starts[-1] - starts[0])
    rate = len(intervals) / seconds if seconds else None
    variation = float(intervals.std() / intervals.mean()) if len(intervals) > 1 and seconds else None
    if len(ends) < len(starts):
        return Arrivals(seconds, rate, variation, None, None)
    run = float(ends[-1] - starts[0])
    # An end at a start's moment comes first: such requests are not concurrent.
    at_start = np.arange(1, len(starts) + 1) - np.searchsorted(ends, starts, side="right")
    return Arrivals(
        seconds,
        rate,
        variation,
        float((ends.sum() - starts.sum()) / run) if run else None,
        max(1, int(at_start.max())),
    )


def cached_share(prompts: Sequence[np.ndarray], kv_tokens: int | None, block_size: int) -> float:
    """The share of all tokens of `prompts` (each int32 [n]) that a prefix cache of `kv_tokens` tokens serves.

    It is the engine's own cache. Prompts come one after the other, so the cache has the whole memory. Their last
    token is always computed. A prompt that is longer than the cache finds nothing and leaves nothing.
    """
    needed = [-(-len(prompt) // block_size) for prompt in prompts]
    pool = BlockPool(sum(needed) if kv_tokens is None else kv_tokens // block_size)
    cache, num_found = RadixCache(pool, block_size), 0
    for prompt, count in zip(prompts, needed, strict=True):
        if count > pool.num_blocks:
            continue
        match = cache.match(_NAMESPACE, prompt[:-1])
        num_found += match.num_tokens
        pool.share_all(match.blocks)
        count -= len(match.blocks)
        if count > pool.num_free:
            cache.evict(count - pool.num_free)
        blocks = match.blocks + pool.allocate(count)
        cache.insert(_NAMESPACE, prompt, blocks)
        pool.free_all(blocks)
    return num_found / max(1, sum(map(len, prompts)))
