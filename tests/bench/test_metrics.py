"""The figures, against timelines worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lmkit.bench.config import parse_goodput, parse_list
from lmkit.bench.metrics import Burst, RequestRecord, distribution, priced, summarize
from lmkit.errors import ConfigError


def record(*bursts: tuple[float, int], start: float = 0.0, end: float | None = None, **fields: Any) -> RequestRecord:
    arrived = [Burst(*burst) for burst in bursts]
    finished = end if end is not None else arrived[-1].time
    defaults: dict[str, Any] = {"conversation": 0, "prompt_tokens": 10, "requested_tokens": None, "scheduled": start}
    return RequestRecord(start=start, end=finished, bursts=arrived, **{**defaults, **fields})


def test_tokens_that_come_together_share_the_interval() -> None:
    one = record((1.5, 1), (2.1, 3), (2.2, 1), start=1.0, end=2.5)
    assert one.ttft == pytest.approx(0.5)
    assert one.e2e == pytest.approx(1.5)
    assert one.output_tokens == 5
    assert one.intervals() == pytest.approx([0.2, 0.2, 0.2, 0.1])
    assert one.gaps() == pytest.approx([0.6, 0.1])
    assert one.tpot == pytest.approx(0.7 / 4)
    assert one.tpot == pytest.approx(np.mean(one.intervals()))


def test_tokens_of_the_first_burst_have_no_interval() -> None:
    one = record((1.0, 4), (2.0, 2))
    assert one.intervals() == pytest.approx([0.5, 0.5])
    assert one.tpot == pytest.approx(0.5)
    alone = record((1.0, 4))
    assert alone.tpot is None
    assert alone.intervals() == alone.gaps() == []


def test_summary_of_two_streams() -> None:
    records = [
        record((0.1, 1), (0.3, 2), start=0.0, end=0.4, requested_tokens=3),
        record((1.3, 1), (1.4, 1), start=1.0, end=2.0, scheduled=0.9, prompt_tokens=30, requested_tokens=5),
    ]
    summary = summarize(records)
    assert summary.seconds == pytest.approx(2.0)
    assert (summary.num_requests, summary.num_completed, summary.num_off_length) == (2, 2, 1)
    assert summary.requests_per_s == pytest.approx(1.0)
    assert summary.prompt_tokens_per_s == pytest.approx(20.0)
    assert summary.output_tokens_per_s == pytest.approx(2.5)
    assert summary.total_tokens_per_s == pytest.approx(22.5)
    assert summary.mean_concurrency == pytest.approx((0.4 + 1.0) / 2)
    assert summary.tokens_per_burst == pytest.approx(5 / 4)
    assert summary.ttft_ms is not None
    assert summary.ttft_ms.mean == pytest.approx(200)
    assert summary.itl_ms is not None
    assert summary.itl_ms.count == 3
    assert [summary.itl_ms.min, summary.itl_ms.max] == pytest.approx([100, 100])
    assert summary.burst_gap_ms is not None
    assert summary.burst_gap_ms.max == pytest.approx(200)
    assert summary.wait_ms is not None
    assert summary.wait_ms.max == pytest.approx(100)
    assert summary.goodput is None


def test_failures_are_counted_by_kind_and_keep_out_of_the_latencies() -> None:
    records = [
        record((0.1, 1), (0.2, 1)),
        record(error="http_500", end=9.0),
        record((3.0, 1), error="broken_stream", end=10.0),
        record(error="http_500", end=1.0),
    ]
    summary = summarize(records)
    assert summary.errors == {"http_500": 2, "broken_stream": 1}
    assert (summary.num_requests, summary.num_completed, summary.output_tokens) == (4, 1, 2)
    assert summary.ttft_ms is not None
    assert summary.ttft_ms.max == pytest.approx(100)
    assert summary.seconds == pytest.approx(10.0), "failed requests took their time too"


def test_only_failures_and_nothing_measured() -> None:
    summary = summarize([record(error="connect", end=0.0)])
    assert summary.ttft_ms is None
    assert summary.requests_per_s == 0
    with pytest.raises(ConfigError, match="no request was measured"):
        summarize([record((0.1, 1), measured=False)])


def test_warm_up_is_left_out() -> None:
    warm = record((5.0, 1), start=-10.0, measured=False)
    summary = summarize([warm, record((0.5, 1))])
    assert summary.num_unmeasured == 1
    assert summary.seconds == pytest.approx(0.5)


def test_goodput_needs_every_target() -> None:
    records = [
        record((0.1, 1), (0.2, 1)),
        record((0.6, 1), (0.7, 1)),  # late first token
        record((0.1, 1), (0.9, 1)),  # slow after it
        record((0.1, 1), end=1.0),  # one token: no time per token to miss
        record(error="timeout", end=2.0),
    ]
    good = summarize(records, {"ttft": 500.0, "tpot": 200.0}).goodput
    assert good is not None
    assert [good.num_good, good.share, good.requests_per_s] == pytest.approx([2, 0.4, 1.0])
    strict = summarize(records, {"ttft": 500.0, "tpot": 200.0, "e2e": 900.0}).goodput
    assert strict is not None
    assert strict.num_good == 1


def test_percentiles() -> None:
    values = distribution(float(i) for i in range(101))
    assert values is not None
    assert (values.count, values.p50, values.p90, values.p99, values.max) == (101, 50, 90, 99, 100)
    assert values.std == pytest.approx(np.std(np.arange(101)))
    assert distribution([]) is None


def test_option_values() -> None:
    assert parse_goodput("ttft:500, tpot:50.5") == {"ttft": 500.0, "tpot": 50.5}
    assert parse_list("1,4,16", int, "--concurrency") == [1, 4, 16]
    assert parse_list("0.5,inf", float, "--rate") == [0.5, float("inf")]
    for text in ("ttft", "ttft:", "ttft:0", "ttft:-1", "ttft:nan", "itl:5", "ttft:1,ttft:2", ""):
        with pytest.raises(ConfigError, match="--goodput"):
            parse_goodput(text)
    for text in ("", "0", "-1", "1,,2", "1.5", "x"):
        with pytest.raises(ConfigError, match="--concurrency"):
            parse_list(text, int, "--concurrency")
    with pytest.raises(ConfigError, match="--rate"):
        parse_list("nan", float, "--rate")


def test_price_of_tokens() -> None:
    one = RequestRecord(
        conversation=0, prompt_tokens=300, requested_tokens=100, scheduled=0.0, start=0.0, end=2.0,
        bursts=[Burst(1.0, 60), Burst(2.0, 40)],
    )  # fmt: skip
    price = priced(summarize([one]), 3.6).price
    assert price is not None
    assert price.per_million_output == pytest.approx(3.6 / 3600 / 50 * 1e6)  # 50 tokens a second
    assert price.per_million_total == pytest.approx(3.6 / 3600 / 200 * 1e6)
