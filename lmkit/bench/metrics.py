"""The arithmetic of docs/bench.md: from the arrival times of tokens to the figures of a benchmark.

All times are in seconds on one clock. A burst is the tokens that arrive together: one SSE chunk, or one engine step.

    start      first burst                     second           third                       end
      |------------| 1 token |------------------| 3 tokens |-----| 1 token |----------------|
      <--- TTFT --->         <- three intervals of a third of it -> <- one ->
      <------------------------------------------ E2E ------------------------------------->
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from lmkit.errors import ConfigError


class Burst(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that arrived at one moment."""

    time: float  # seconds
    num_tokens: int  # at least 1


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request: its fields, and the times of its tokens. `error` is None if it was answered completely."""

    conversation: int
    turn: int = 0
    prompt_tokens: int
    requested_tokens: int | None  # None = until the model ends
    scheduled: float  # when it should be sent
    start: float  # when it was sent
    end: float  # when its answer was complete, or it failed
    bursts: list[Burst] = []
    finish_reason: str | None = None
    error: str | None = None  # kind of the error
    message: str | None = None
    measured: bool = True  # False for a warm-up or one sent while the load was still rising

    @property
    def output_tokens(self) -> int:
        return sum(burst.num_tokens for burst in self.bursts)

    @property
    def ttft(self) -> float:
        return self.bursts[0].time - self.start

    @property
    def e2e(self) -> float:
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first burst: the mean of `intervals`. None if there was no second burst."""
        later = self.output_tokens - self.bursts[0].num_tokens
        return (self.bursts[-1].time - self.bursts[0].time) / later if later else None

    def intervals(self) -> list[float]:
        """Inter-token times. The n tokens of a burst are n equal parts of the time since the previous burst."""
        return [
            (burst.time - before.time) / burst.num_tokens
            for before, burst in zip(self.bursts, self.bursts[1:], strict=False)
            for _ in range(burst.num_tokens)
        ]

    def gaps(self) -> list[float]:
        """Times between bursts, in which a reader sees nothing new."""
        return [b.time - a.time for a, b in zip(self.bursts, self.bursts[1:], strict=False)]


class Distribution(msgspec.Struct, frozen=True):
    """Percentiles interpolate linearly between order statistics; `std` is the population's."""

    count: int
    mean: float
    std: float
    min: float
    p50: float
    p90: float
    p99: float
    max: float


def distribution(values: Iterable[float]) -> Distribution | None:
    """The distribution of `values`, or None if there are none."""
    data = np.fromiter(values, dtype=np.float64)
    return spread(data) if data.size else None


def spread(data: np.ndarray | Sequence[float]) -> Distribution:
    """The distribution of at least one value."""
    data = np.asarray(data, dtype=np.float64)
    p50, p90, p99 = np.percentile(data, [50, 90, 99]).tolist()
    low, high = float(data.min()), float(data.max())
    return Distribution(len(data), float(data.mean()), float(data.std()), low, p50, p90, p99, high)


class Goodput(msgspec.Struct, frozen=True):
    """Requests that met every target."""

    targets: dict[str, float]  # ms
    num_good: int
    share: float  # of all measured requests; a failed one is not good
    requests_per_s: float


class Price(msgspec.Struct, frozen=True):
    """Money for a million tokens at the speed of one run, in the unit of `per_hour`. None: there were no tokens."""

    per_hour: float
    per_million_output: float | None  # if answers bear the whole price
    per_million_total: float | None  # if tokens of prompts and answers have one price


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run. Rates are over `seconds`. Latencies are in ms, of completely answered requests."""

    seconds: float  # from the first measured request's start to the last one's end
    num_requests: int  # measured: answered and failed
    num_completed: int
    num_unmeasured: int  # warm-up, and sent while the load was rising
    errors: dict[str, int]  # kind -> how many of num_requests
    num_off_length: int  # answers with fewer or more tokens than asked for
    prompt_tokens: int  # of completed requests, as the following
    output_tokens: int
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    mean_concurrency: float  # seconds spent in requests over `seconds`
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None  # one value for each token after a request's first burst
    burst_gap_ms: Distribution | None
    e2e_ms: Distribution | None
    wait_ms: Distribution | None  # from the scheduled time to the start: held back by the concurrency limit, or late
    tokens_per_burst: float | None  # mean; 1 if every token came alone
    goodput: Goodput | None
    price: Price | None = None


def priced(summary: Summary, per_hour: float) -> Summary:
    """`summary` with the price of its tokens on a machine that costs `per_hour`."""

    def per_million(tokens_per_s: float) -> float | None:
        return per_hour / 3600 / tokens_per_s * 1e6 if tokens_per_s else None

    price = Price(per_hour, per_million(summary.output_tokens_per_s), per_million(summary.total_tokens_per_s))
    return msgspec.structs.replace(summary, price=price)


def summarize(records: Sequence[RequestRecord], targets: dict[str, float] | None = None) -> Summary:
    """The figures of one run. `targets`: from `parse_goodput`. Raises ConfigError if nothing was measured."""
    measured = [record for record in records if record.measured]
    if not measured:
        raise ConfigError("no request was measured: send more of them, or a shorter ramp")
    done = [record for record in measured if record.error is None]
    seconds = max(record.end for record in measured) - min(record.start for record in measured)
    rate = 1 / seconds if seconds > 0 else 0.0
    num_prompt, num_output = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    num_bursts = sum(len(record.bursts) for record in done)
    return Summary(
        seconds=seconds,
        num_requests=len(measured),
        num_completed=len(done),
        num_unmeasured=len(records) - len(measured),
        errors=dict(Counter(record.error for record in measured if record.error is not None).most_common()),
        num_off_length=sum(r.requested_tokens not in (None, r.output_tokens) for r in done),
        prompt_tokens=num_prompt,
        output_tokens=num_output,
        requests_per_s=len(done) * rate,
        prompt_tokens_per_s=num_prompt * rate,
        output_tokens_per_s=num_output * rate,
        total_tokens_per_s=(num_prompt + num_output) * rate,
        mean_concurrency=math.fsum(record.e2e for record in measured) * rate,
        ttft_ms=distribution(1e3 * record.ttft for record in done),
        tpot_ms=distribution(1e3 * record.tpot for record in done if record.tpot is not None),
        itl_ms=distribution(1e3 * interval for record in done for interval in record.intervals()),
        burst_gap_ms=distribution(1e3 * gap for record in done for gap in record.gaps()),
        e2e_ms=distribution(1e3 * record.e2e for record in done),
        wait_ms=distribution(1e3 * (record.start - record.scheduled) for record in measured),
        tokens_per_burst=num_output / num_bursts if num_bursts else None,
        goodput=_goodput(done, len(measured), targets, rate) if targets else None,
    )


def _goodput(done: Sequence[RequestRecord], num_requests: int, targets: dict[str, float], rate: float) -> Goodput:
    num_good = sum(_meets(record, targets) for record in done)
    return Goodput(targets, num_good, num_good / num_requests, num_good * rate)


def _meets(record: RequestRecord, targets: dict[str, float]) -> bool:
    """Whether a request meets all targets.

    Without a second burst it has no time per token and meets any target for it.
    """
    values = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2e": record.e2e}
    return all(1e3 * values[name] <= limit for name, limit in targets.items())
