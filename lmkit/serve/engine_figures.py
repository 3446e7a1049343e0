"""The engine's own figures in /metrics, read when somebody scrapes: of its queue, its cache and its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from lmkit.turbo.request import EngineStats
from lmkit.turbo.step_sizes import BOUNDS
from lmkit.turbo.transport.async_engine import AsyncEngine
from lmkit.turbo.transport.death import kv_used

AUDITS = {
    "hits": "Cache hits of which some are computed again",
    "done": "Hits that were computed again to their end, with the same bits",
    "dropped": "Hits that were to be computed again and were not: no room, no time, an adapter that has gone",
    "tokens": "Tokens that were computed again",
    "differences": "Cached KV that had other bits: this machine, or what it read, is at fault",
    "removed_blocks": "KV blocks that were dropped because of these",
}
NEXT_TURNS = {
    "prepared": "Tokens of next turns that were computed ahead",
    "used": "Tokens of these that a request has found",
    "wasted": "Tokens of these that came otherwise, or have not come for long",
}
_REASON = ["model_name", "reason"]


class EngineFigures(Collector):
    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._cache()
        yield from self._scheduler()
        yield from self._speculation()

    def _requests(self) -> Iterator[Metric]:
        stats, engine = self._engine.stats(), self._engine
        usage = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        for prefix in ("lmkit", "vllm"):
            yield self._gauge(f"{prefix}:num_requests_running", "Requests in the batch", stats.num_running)
            yield self._gauge(f"{prefix}:num_requests_waiting", "Requests in the queue", stats.num_waiting)
            yield self._counter(f"{prefix}:num_preemptions", "Sequences that lost their KV blocks", stats.preemptions)
            yield self._gauge(f"{prefix}:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", usage)
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Requests in the queue, which wait for room", labels=_REASON
        )
        yield self._labelled(waiting, {("capacity",): stats.num_waiting})
        yield self._step_sizes(stats)
        failures = engine.num_failures + stats.failed_steps
        yield self._gauge("lmkit:engine_up", "1 if requests are accepted", float(engine.health == "ready"))
        yield self._counter("lmkit:engine_steps", "Steps of the engine", stats.steps)
        yield self._counter("lmkit:engine_failures", "Engine calls that raised", failures)
        yield self._counter("lmkit:engine_starts", "Starts of the engine process", engine.num_starts)

    def _step_sizes(self, stats: EngineStats) -> Metric:
        """vLLM's histogram of the tokens that steps compute."""
        counts = stats.step_sizes or [0] * (len(BOUNDS) + 1)
        bounds = [*(f"{bound}.0" for bound in BOUNDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(counts), strict=True))
        text = "Tokens of a step of the engine: computed ones of prompts, and new ones"
        family = HistogramMetricFamily("vllm:iteration_tokens_total", text, labels=["model_name"])
        family.add_metric([self._model_name], buckets, stats.step_tokens)
        return family

    def _cache(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for prefix in ("lmkit", "vllm"):
            yield self._counter(
                f"{prefix}:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_tokens
            )
            yield self._counter(f"{prefix}:prefix_cache_hits", "Prompt tokens found in it", stats.prefix_hits)
        yield self._labelled(
            CounterMetricFamily("lmkit:kv_tier_hits", "Prompt tokens found in a tier", labels=["model_name", "tier"]),
            {(tier,): hits for tier, hits in stats.tier_hits.items()},
        )
        yield self._labelled(
            GaugeMetricFamily("lmkit:kv_tiers", "Figures of the KV tiers", labels=["model_name", "figure"]),
            {(figure,): value for figure, value in stats.tiers.items()},
        )
        yield self._gauge("lmkit:cached_blocks", "KV blocks in the prefix cache, those in use too", stats.blocks_cached)
        yield self._counter("lmkit:evicted_blocks", "KV blocks that left the prefix cache", stats.evicted_blocks)
        if stats.snapshots_total:
            held, gone = stats.snapshots_used, stats.evicted_snapshots
            yield self._gauge("lmkit:state_snapshots", "Snapshots of recurrent states", held)
            yield self._gauge("lmkit:state_snapshots_limit", "Room for such snapshots", stats.snapshots_total)
            yield self._counter("lmkit:evicted_snapshots", "Snapshots that gave their place to others", gone)
        if (info := self._engine.info) is not None:
            kv = GaugeMetricFamily("lmkit:kv_memory_bytes", "Memory of the KV cache", labels=["model_name", "state"])
            reserved = info.memory.get("kv", 0)
            yield self._labelled(kv, {("used",): kv_used(info, stats), ("reserved",): reserved})
            used = GaugeMetricFamily(
                "lmkit:engine_memory_bytes", "Memory of the engine process", labels=["model_name", "state"]
            )
            yield self._labelled(used, {("used",): self._engine.resident, ("reserved",): info.reserved})
            if (tested := info.selftest) is not None:
                off = GaugeMetricFamily(
                    "lmkit:kernels_off", "Kernels that the self-test has turned off", labels=["model_name", "kernel"]
                )
                yield self._labelled(off, {(name,): 1 for name in tested.off})
                ended = int(not (tested.off or tested.problem))
                yield self._gauge("lmkit:selftest_passed", "Whether the self-test found all kernels right", ended)
        for what, text in NEXT_TURNS.items():
            yield self._counter(f"lmkit:next_turn_{what}_tokens", text, stats.next_turns.get(what, 0))
        for what, text in AUDITS.items():
            yield self._counter(f"lmkit:audit_{what}", text, stats.audits.get(what, 0))
        known, waited = stats.next_turns, "Seconds that requests have waited for steps ahead, at most"
        yield self._counter("lmkit:ahead_waited_seconds", waited, stats.ahead_waited)
        yield self._counter("lmkit:warm_tokens", "Tokens computed of prefixes known at the start", known.get("warm", 0))
        yield self._gauge("lmkit:warm_waiting", "Prefixes known at the start that wait", known.get("waiting", 0))
        yield self._gauge("lmkit:sessions", "Sessions whose lease has not ended", stats.sessions)
        if (info := self._engine.info) is not None:
            tokens = info.block_size * info.num_blocks
            names = ["block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"]
            values = (info.block_size, info.num_blocks, tokens, f"{tokens / info.max_model_len:.2f}")
            config = GaugeMetricFamily(
                "vllm:cache_config_info", "The KV cache, in labels", labels=["model_name", *names]
            )
            yield self._labelled(config, {tuple(map(str, values)): 1})

    def _scheduler(self) -> Iterator[Metric]:
        """The scheduler's decisions. Decisions and reasons are closed lists, see turbo.decisions."""
        names = ["model_name", "decision", "reason"]
        decisions = CounterMetricFamily("lmkit:scheduler_decisions", "What was decided, and why", labels=names)
        values: dict[tuple[str, ...], float] = {}
        for name, count in self._engine.stats().decisions.items():
            decision, _, reason = name.partition(": ")
            values[decision, reason] = count
        yield self._labelled(decisions, values)

    def _speculation(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        counts = {
            "num_drafts": ("Times that drafts of a sequence's next tokens were computed", stats.drafts),
            "num_draft_tokens": ("Draft tokens that were computed", stats.draft_tokens),
            "num_accepted_tokens": ("Draft tokens that were right", stats.accepted_tokens),
        }
        for prefix in ("lmkit", "vllm"):
            for name, (text, value) in counts.items():
                yield self._counter(f"{prefix}:spec_decode_{name}", text, value)
        saved = "Seconds that drafts saved, against steps without; negative: lost"
        yield self._gauge("lmkit:spec_decode_time_saved_seconds", saved, stats.draft_seconds_saved)
        kept = "Tokens of answers that drafts look up"
        yield self._gauge("lmkit:spec_decode_history_tokens", kept, stats.history_tokens)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._labelled(GaugeMetricFamily(name, text, labels=["model_name"]), {(): value})

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._labelled(CounterMetricFamily(name, text, labels=["model_name"]), {(): value})

    def _labelled(
        self, family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[tuple[str, ...], float]
    ) -> Metric:
        """`family` with a series for each tuple of labels after the model's name."""
        for labels, value in values.items():
            family.add_metric([self._model_name, *labels], value)
        return family
