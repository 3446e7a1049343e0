"""`lmkit bench online`: a sweep of loads against a server, each summarized. No torch."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from lmkit.bench.client import Client
from lmkit.bench.config import OnlineConfig, Progress, WorkloadConfig
from lmkit.bench.counting import CountSource, bursts
from lmkit.bench.load import Load, LoadPoint, LoadResult, Sent
from lmkit.bench.metrics import Burst, RequestRecord, summarize
from lmkit.bench.schema import OnlineRun
from lmkit.bench.workload import Conversation, make_workload
from lmkit.errors import ConfigError, RequestError
from lmkit.formats.hub import DEMO, resolve_model_path
from lmkit.text import Tokenizer


class Measured(msgspec.Struct, frozen=True):
    """An online benchmark: its configuration, the optional fields that the server took, and the runs."""

    model: str
    features: list[str]
    runs: list[OnlineRun]


async def measure(
    config: OnlineConfig,
    workload: WorkloadConfig,
    *,
    api_key: str | None = None,
    targets: dict[str, float] | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Measured:
    """Run the whole sweep. Raises LMKitError before the first run if the server does not answer."""
    sweep = points(config, workload.seed)
    client = Client(config.url, config.endpoint, api_key=api_key, timeout=config.timeout)
    try:
        model = await client.choose_model(config.model)
        tokenizer = find_tokenizer(config.tokenizer, model)
        needed = msgspec.structs.replace(workload, num_prompts=workload.num_prompts + config.warmup)
        conversations = make_workload(needed, tokenizer, chat=client.chat)
        wanted: dict[str, dict[str, Any]] = {"ignore_eos": {"ignore_eos": True}} if config.ignore_eos else {}
        await client.probe({"temperature": 0} | config.extra_body, wanted)
        runs = await run_sweep(
            client,
            sweep,
            conversations,
            warmup=config.warmup,
            tokenizer=tokenizer,
            targets=targets,
            progress=progress,
        )
    finally:
        await client.close()
    return Measured(model, client.features, runs)


def points(config: OnlineConfig, seed: int) -> list[LoadPoint]:
    """The loads: every rate with every concurrency.

    Raises ConfigError for a load that would never end or never rise.
    """
    unlimited = None in config.rates and None in config.concurrencies
    if config.ramp and unlimited:
        raise ConfigError("--ramp needs --rate or --concurrency: it is what rises")
    if config.duration is not None and unlimited:
        raise ConfigError("--duration needs --rate or --concurrency: without them all requests are sent at once")
    if config.duration is not None and config.duration <= config.ramp:
        raise ConfigError("--duration must be longer than --ramp: nothing would be measured")
    return [
        LoadPoint(
            rate=math.inf if rate is None else rate,
            concurrency=concurrency,
            burstiness=config.burstiness,
            duration=config.duration,
            ramp_seconds=config.ramp,
            think_seconds=config.think,
            seed=seed,
        )
        for rate, concurrency in itertools.product(config.rates, config.concurrencies)
    ]


def find_tokenizer(name: str | None, model: str) -> Tokenizer | None:
    """The tokenizer that is named, or of a model that is here. None if there is none."""
    if name is None and model != DEMO and not os.path.exists(model):
        return None
    return Tokenizer.from_pretrained(resolve_model_path(name or model, weights=False))


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
    """One run after the other.

    The last `warmup` conversations are sent before each and not measured. No run finds the KV of an earlier one if the
    server takes a `cache_salt`; otherwise its prompts count as reused.
    """
    measured, warm = conversations[: len(conversations) - warmup], conversations[len(conversations) - warmup :]
    runs = []
    for number, point in enumerate(sweep, 1):
        ticker = _Ticker(f"run {number} of {len(sweep)}", point, len(measured), progress)
        is_fresh = client.renew_cache() or number == 1
        warmed = await Load(client, warm, LoadPoint(concurrency=point.concurrency)).run()
        result = await Load(client, measured, point, ticker.tick).run()
        if not is_fresh:
            result.reused += len({sent.conversation for sent in result.sent})
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
        prompt_tokens = _count_prompt(sent, tokenizer, chat)
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


def _count_prompt(sent: Sent, tokenizer: Tokenizer | None, chat: bool) -> int:
    """The tokens of a prompt. 0 if there is no tokenizer, or if its chat template refuses the messages."""
    try:
        return len(sent.prompt.token_ids(tokenizer, chat=chat)) if tokenizer is not None else 0
    except RequestError:
        return 0
