"""`lmkit bench online`: a sweep of loads against a server, each summarized. No torch."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from lmkit.bench.client import Client
from lmkit.bench.counting import CountSource, bursts
from lmkit.bench.load import Load, LoadPoint, LoadResult, Sent
from lmkit.bench.metrics import Burst, RequestRecord, summarize
from lmkit.bench.schema import OnlineRun
from lmkit.bench.workload import Conversation
from lmkit.errors import ConfigError
from lmkit.text import Tokenizer

Progress = Callable[[str, int, int], None]  # what is being done, how much of it, of how much


def points(rates: Sequence[float], concurrencies: Sequence[int | None], base: LoadPoint) -> list[LoadPoint]:
    """Every rate with every concurrency. Raises ConfigError for a load that would never end or never rise."""
    unlimited = any(math.isinf(rate) for rate in rates) and None in concurrencies
    if base.ramp_seconds and unlimited:
        raise ConfigError("--ramp needs --rate or --concurrency: it is what rises")
    if base.duration is not None and unlimited:
        raise ConfigError("--duration needs --rate or --concurrency: without them all requests are sent at once")
    if base.duration is not None and base.duration <= base.ramp_seconds:
        raise ConfigError("--duration must be longer than --ramp: nothing would be measured")
    return [replace(base, rate=r, concurrency=c) for r, c in itertools.product(rates, concurrencies)]


async def run_sweep(
    client: Client,
    sweep: Sequence[LoadPoint],
    conversations: Sequence[Conversation],
    *,
    warmup: int = 0,
    tokenizer: Tokenizer | None = None,
    targets: dict[str, float] | None = None,
    progress: Progress = lambda what, done, total: None,
) -> list[OnlineRun]:
    """One run after the other. The last `warmup` conversations are sent before each and not measured."""
    measured, warm = conversations[: len(conversations) - warmup], conversations[len(conversations) - warmup :]
    runs = []
    for number, point in enumerate(sweep, 1):
        ticker = _Ticker(f"run {number} of {len(sweep)}", point, len(measured), progress)
        warmed = await Load(client, warm, LoadPoint(concurrency=point.concurrency)).run()
        result = await Load(client, measured, point, ticker.tick).run()
        runs.append(_summarized(point, result, warmed, tokenizer, client.chat, targets))
    return runs


class _Ticker:
    """Progress in seconds for a run by duration, else in conversations."""

    def __init__(self, what: str, point: LoadPoint, num_conversations: int, progress: Progress) -> None:
        self._what, self._progress, self._timed = what, progress, point.duration is not None
        self._total = math.ceil(point.duration) if point.duration is not None else num_conversations
        self._done, self._start = 0, time.perf_counter()

    def tick(self) -> None:
        self._done = int(time.perf_counter() - self._start) if self._timed else self._done + 1
        self._progress(self._what, min(self._done, self._total), self._total)


def _summarized(
    point: LoadPoint,
    result: LoadResult,
    warmed: LoadResult,
    tokenizer: Tokenizer | None,
    chat: bool,
    targets: dict[str, float] | None,
) -> OnlineRun:
    records, sources = [], Counter[str]()
    for sent in [*warmed.sent, *result.sent]:
        is_warmup = sent.answer.start < result.origin
        in_ramp = sent.answer.start < result.origin + point.ramp_seconds
        record, source = to_record(sent, result.origin, tokenizer, chat=chat, measured=not (is_warmup or in_ramp))
        records.append(record)
        sources.update([source] if record.bursts else [])
    assert result.health is not None
    return OnlineRun(
        rate=None if math.isinf(point.rate) else point.rate,
        concurrency=point.concurrency,
        summary=summarize(records, targets),
        client=result.health,
        token_counts=dict(sources),
        skipped_turns=result.skipped_turns,
        reused_prompts=result.reused,
        requests=records,
    )


def to_record(
    sent: Sent, origin: float, tokenizer: Tokenizer | None, *, chat: bool, measured: bool = True
) -> tuple[RequestRecord, CountSource]:
    """A request's times, relative to `origin`, and how its tokens were counted."""
    answer = sent.answer
    arrived, source = bursts(answer.chunks, answer.output_tokens, tokenizer)
    prompt_tokens = answer.prompt_tokens
    if prompt_tokens is None:
        prompt_tokens = len(sent.prompt.token_ids(tokenizer, chat=chat)) if tokenizer is not None else 0
    record = RequestRecord(
        conversation=sent.conversation,
        turn=sent.turn_idx,
        prompt_tokens=prompt_tokens,
        requested_tokens=sent.turn.max_tokens,
        scheduled=sent.scheduled - origin,
        start=answer.start - origin,
        end=answer.end - origin,
        bursts=[Burst(burst.time - origin, burst.num_tokens) for burst in arrived],
        finish_reason=answer.finish_reason,
        error=answer.error if answer.error or arrived else "empty",
        message=answer.message,
        measured=measured,
    )
    return record, source
