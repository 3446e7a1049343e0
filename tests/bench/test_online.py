"""Against a server whose chunks, counts and failures are known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmkit.bench.client import Client, StreamedResponse
from lmkit.bench.config import Endpoint, OnlineConfig, WorkloadConfig
from lmkit.bench.metrics import RequestRecord
from lmkit.bench.online import Measured, measure, points
from lmkit.bench.report import notes
from lmkit.bench.schema import OnlineRun
from lmkit.bench.workload import Dialogue
from lmkit.errors import ConfigError, LMKitError
from tests.bench.fake_server import BURSTS, GAP, FakeServer


def run(
    server: FakeServer,
    tmp_path: Path,
    num_prompts: int = 4,
    *,
    prompts: Sequence[str] = ("x",),
    turns: int = 1,
    **options: Any,
) -> Measured:
    """A benchmark of conversations that ask for six tokens a turn, as the server gives."""
    file = tmp_path / "data.jsonl"
    rows = [
        [{"role": role, "content": text} for _ in range(turns) for role in ("user", "assistant")] for text in prompts
    ]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    count = num_prompts if len(prompts) == 1 else len(prompts)
    workload = WorkloadConfig(num_prompts=count, dataset=str(file), output_len=sum(BURSTS), turns=turns)
    config = OnlineConfig(**{"url": server.url, "warmup": 0, **options})
    return asyncio.run(measure(config, workload, targets={"ttft": 10_000.0}))


def send(server: FakeServer, model: str, *, timeout: float = 10.0, endpoint: Endpoint = "chat") -> StreamedResponse:
    async def once() -> StreamedResponse:
        client = Client(server.url, endpoint, timeout=timeout)
        client.body["model"] = model
        try:
            return await client.send(Dialogue(True, [{"role": "user", "content": "hi"}]), 6)
        finally:
            await client.close()

    return asyncio.run(once())


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_tokens_of_chunks_are_counted_as_the_server_says(server: FakeServer, tmp_path: Path, endpoint: str) -> None:
    measured = run(server, tmp_path, endpoint=endpoint)
    assert measured.model == "plain"
    assert measured.features == ["usage", "continuous usage", "token ids", "cache salt", "ignore_eos"]
    (one,) = measured.runs
    assert one.token_counts == {"token_ids": 4}
    for record in one.requests:
        assert [burst.num_tokens for burst in record.bursts] == list(BURSTS)
        assert record.ttft >= GAP, "the role alone is no token"
        assert len(record.intervals()) == 5
        assert record.tpot == pytest.approx(sum(record.gaps()) / 5)
    summary = one.summary
    assert (summary.num_completed, summary.num_off_length, summary.prompt_tokens) == (4, 0, 20)
    assert summary.tokens_per_burst == pytest.approx(2)
    assert summary.goodput is not None
    assert summary.goodput.share == 1


def test_a_strict_server_is_asked_for_less(server: FakeServer, tmp_path: Path) -> None:
    server.models = ["strict"]
    measured = run(server, tmp_path)
    assert measured.features == ["usage"]
    assert measured.runs[0].token_counts == {"chunks": 4}
    assert {record.output_tokens for record in measured.runs[0].requests} == {sum(BURSTS)}
    assert any("estimates" in line for line in notes(measured.runs))
    assert server.bodies[-1].keys() == {"model", "stream", "stream_options", "messages", "max_tokens", "temperature"}


def test_no_run_finds_the_kv_of_an_earlier_one(server: FakeServer, tmp_path: Path) -> None:
    measured = run(server, tmp_path, concurrencies=(1, 2))
    salts = [body["cache_salt"] for body in server.bodies if body["max_tokens"] > 1]
    half = len(salts) // 2
    assert [len(set(part)) for part in (salts[:half], salts[half:], salts)] == [1, 1, 2]
    assert [one.reused_prompts for one in measured.runs] == [0, 0]
    server.models = ["strict"]
    measured = run(server, tmp_path, concurrencies=(1, 2))
    assert [one.reused_prompts for one in measured.runs] == [0, 4], "the report says so where it cannot be helped"


def test_the_tokenizer_counts_where_the_server_does_not(server: FakeServer, tmp_path: Path) -> None:
    server.models = ["strict"]
    measured = run(server, tmp_path, tokenizer="demo")
    assert measured.runs[0].token_counts == {"tokenizer": 4}
    assert {record.output_tokens for record in measured.runs[0].requests} == {sum(BURSTS)}


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("busy", "http_429", "HTTP 429: too manyrequests"),
        ("html", "http_502", "HTTP 502: no further message"),
        ("breaks", "broken_stream", ""),
        ("stops", "broken_stream", "ended before"),
        ("error-event", "error_event", "out of memory"),
        ("garbage", "bad_chunk", "not a completion chunk"),
        ("empty", "empty", "no token"),
        ("slow", "timeout", "0.3 s"),
    ],
)
def test_every_failure_has_a_kind(server: FakeServer, model: str, kind: str, message: str) -> None:
    answer = send(server, model, timeout=0.3 if model == "slow" else 30.0)
    assert answer.error == kind
    assert answer.message is not None
    assert message in answer.message
    assert answer.end > answer.start


def test_no_server_at_all() -> None:
    with FakeServer() as gone:
        pass
    assert send(gone, "plain").error == "connect"
    with pytest.raises(LMKitError, match="no server answers"):
        asyncio.run(measure(OnlineConfig(url=gone.url), WorkloadConfig()))
    with pytest.raises(ConfigError, match="not a URL"):
        asyncio.run(measure(OnlineConfig(url="http://localhost:port"), WorkloadConfig()))


def test_failures_are_counted_and_the_rest_goes_on(server: FakeServer, tmp_path: Path) -> None:
    (one,) = run(server, tmp_path, prompts=["x", "breaks", "x", "busy", "x", "busy"]).runs
    assert one.summary.errors == {"http_429": 2, "broken_stream": 1}
    assert (one.summary.num_requests, one.summary.num_completed) == (6, 3)
    broken = next(record for record in one.requests if record.error == "broken_stream")
    assert [burst.num_tokens for burst in broken.bursts] == [1], "what came is in the record, not in the figures"
    assert one.summary.output_tokens == 3 * sum(BURSTS)
    assert any("2 http_429, 1 broken_stream; the first: " in line for line in notes([one]))


def test_a_server_that_fails_from_the_start_is_one_error(server: FakeServer, tmp_path: Path) -> None:
    server.models = ["busy"]
    with pytest.raises(LMKitError, match="first request failed: HTTP 429"):
        run(server, tmp_path)
    server.models = ["a", "b"]
    with pytest.raises(ConfigError, match="serves a, b; choose one with --model"):
        run(server, tmp_path)
    assert run(server, tmp_path, 1, model="b").model == "b"


def test_turns_carry_the_answers(server: FakeServer, tmp_path: Path) -> None:
    (one,) = run(server, tmp_path, 1, turns=3).runs
    assert [(r.conversation, r.turn, r.error) for r in one.requests] == [(0, 0, None), (0, 1, None), (0, 2, None)]
    said = [message["content"] for message in server.bodies[-1]["messages"]]
    assert said == ["x", "a b c d e f ", "x", "a b c d e f ", "x"]
    starts = [record.start for record in one.requests]
    assert all(start >= before.end for start, before in zip(starts[1:], one.requests, strict=False))


def test_a_failed_turn_ends_its_conversation(server: FakeServer, tmp_path: Path) -> None:
    (one,) = run(server, tmp_path, 1, prompts=["busy"], turns=3).runs
    assert (len(one.requests), one.skipped_turns) == (1, 2)


def test_concurrency_sweep_and_warm_up(server: FakeServer, tmp_path: Path) -> None:
    measured = run(server, tmp_path, 6, concurrencies=[1, 3], warmup=2)
    assert [one.concurrency for one in measured.runs] == [1, 3]
    assert [one.label for one in measured.runs] == ["1 at once", "3 at once"]
    for one in measured.runs:
        assert (one.summary.num_requests, one.summary.num_unmeasured) == (6, 2)
        assert _most_at_once(one) == one.concurrency
    assert server.peak == 3


def test_duration_sends_prompts_again(server: FakeServer, tmp_path: Path) -> None:
    (one,) = run(server, tmp_path, 1, concurrencies=[2], duration=0.5).runs
    assert one.reused_prompts == len(one.requests) - 1 > 0
    assert all(record.start < 0.6 for record in one.requests)
    assert all(record.error is None for record in one.requests), "what was sent is waited for"


def test_what_is_sent_in_the_ramp_is_not_measured(server: FakeServer, tmp_path: Path) -> None:
    (one,) = run(server, tmp_path, 30, rates=[40.0], ramp=0.5).runs
    assert 0 < one.summary.num_unmeasured < 30
    assert all(record.measured == (record.start >= 0.5) for record in one.requests)
    (one,) = run(server, tmp_path, 80, concurrencies=[4], ramp=0.4).runs
    early = msgspec.structs.replace(one, requests=[record for record in one.requests if record.start < 0.1])
    assert (_most_at_once(early), _most_at_once(one)) == (1, 4)


def test_arrivals_keep_their_times(server: FakeServer, tmp_path: Path) -> None:
    (one,) = run(server, tmp_path, 10, rates=[50.0]).runs
    assert one.summary.wait_ms is not None
    assert one.client.arrival_lag_ms is not None
    assert one.client.arrival_lag_ms.count == 10
    assert all(record.start >= record.scheduled for record in one.requests)
    (limited,) = run(server, tmp_path, 10, rates=[1000.0], concurrencies=[1]).runs
    assert limited.summary.wait_ms is not None
    assert limited.summary.wait_ms.max > 1e3 * 5 * GAP, "the time that the limit held a request back is told"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ramp": 1.0}, "--ramp needs"),
        ({"duration": 1.0}, "--duration needs"),
        ({"duration": 1.0, "ramp": 2.0, "rates": (1.0,)}, "longer than --ramp"),
    ],
)
def test_loads_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        points(OnlineConfig(url="http://x", **options), seed=0)


def _most_at_once(run: OnlineRun) -> int:
    measured: list[RequestRecord] = [record for record in run.requests if record.start >= 0]
    return max(sum(other.start <= record.start < other.end for other in measured) for record in measured)
