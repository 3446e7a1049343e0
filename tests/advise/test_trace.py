"""What a trace contains, against traces whose figures are known by hand, and files that the real writers wrote."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from typer.testing import CliRunner

from lmkit import log
from lmkit.advise.describe import Description, cached_share, describe
from lmkit.advise.trace import read_trace
from lmkit.bench.metrics import Burst, RequestRecord
from lmkit.cli.main import app
from lmkit.text import Tokenizer
from lmkit.web.access_log import AccessLog, note
from tests.cli.commands import mistake

BLOCK = 4


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(demo_model)


def written(folder: Path, *rows: Any) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def described(file: Path, tokenizer: Tokenizer | None = None) -> Description:
    return describe(read_trace(file, tokenizer), block_size=BLOCK)


def logged(second: int, milliseconds: float, **fields: Any) -> dict[str, Any]:
    """A line of a request that ended at `second`."""
    line = {"time": f"2026-01-01T00:00:{second:02}+00:00", "logger": "lmkit.web.access_log", "method": "POST"}
    return line | {"path": "/v1/chat/completions", "status": 200, "duration_ms": milliseconds} | fields


def record(start: float, end: float, **fields: Any) -> RequestRecord:
    values: dict[str, Any] = {"conversation": 0, "prompt_tokens": 10, "requested_tokens": 5, "scheduled": start}
    return RequestRecord(**(values | {"start": start, "end": end, "bursts": [Burst(end, 3)]} | fields))


def benchmark(folder: Path, *runs: list[RequestRecord]) -> Path:
    import msgspec

    document = {"schema": "lmkit.bench/1", "runs": [{"requests": requests} for requests in runs]}
    file = folder / "bench.json"
    file.write_bytes(msgspec.json.format(msgspec.json.encode(document)))
    return file


def test_arrivals_and_concurrency(tmp_path: Path) -> None:
    """Starts 0, 1, 1, 4; ends 2, 3, 4, 5. The one that ends as another starts is not beside it."""
    rows = [logged(2, 2000), logged(3, 2000), logged(4, 3000, status=503), logged(5, 1000)]
    found = described(written(tmp_path, *rows))
    assert found.arrivals is not None
    assert (found.requests, found.failed, found.left_out) == (4, 1, 0)
    assert found.arrivals.seconds == 4
    assert found.arrivals.requests_per_s == 3 / 4
    intervals = np.array([1, 0, 3])
    assert found.arrivals.interval_cv == pytest.approx(intervals.std() / intervals.mean())
    assert found.arrivals.mean_concurrency == 8 / 5
    assert found.arrivals.max_concurrency == 3
    assert found.prompt_tokens is None
    assert found.prefix_cache == []


def test_even_arrivals_and_one_request(tmp_path: Path) -> None:
    even = described(written(tmp_path, *(logged(second, 1000) for second in range(1, 9)))).arrivals
    assert even is not None
    assert (even.requests_per_s, even.interval_cv, even.max_concurrency) == (1, 0, 1)
    one = described(written(tmp_path, logged(1, 0))).arrivals
    assert one is not None
    assert (one.requests_per_s, one.interval_cv, one.mean_concurrency, one.max_concurrency) == (None, None, None, 1)


@pytest.mark.anyio
async def test_the_log_that_the_server_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are those that the proxy notes. Other requests and other lines are not requests for text."""

    async def answer(request: Request) -> PlainTextResponse:
        note(request.scope, input=100, cached=25, output=7)
        return PlainTextResponse("", 429 if "busy" in request.query_params else 200)

    routes = [Route(path, answer, methods=["GET", "POST"]) for path in ("/v1/completions", "/messages", "/tokenize")]
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    root = logging.getLogger("lmkit")
    before = root.handlers[:], root.level, root.propagate
    log.setup("INFO", libraries=False, log_format="json")
    try:
        transport = httpx.ASGITransport(AccessLog(Starlette(routes=routes)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for path in ("/v1/completions", "/messages", "/v1/completions?busy=1", "/tokenize"):
                await client.post(path)
            await client.get("/v1/completions")
        log.get_logger("lmkit.serve").info("load of demo")
    finally:
        root.handlers[:], root.level, root.propagate = before
    file = tmp_path / "log.jsonl"
    file.write_text(stderr.getvalue())
    found = described(file)
    assert (found.kind, found.requests, found.failed, found.left_out) == ("log", 3, 1, 2)
    assert found.prompt_tokens is not None
    assert found.output_tokens is not None
    assert (found.prompt_tokens.count, found.prompt_tokens.mean, found.output_tokens.mean) == (2, 100, 7)
    assert found.served_from_cache == 0.25


def test_figures_of_a_benchmark(tmp_path: Path) -> None:
    requests = [
        record(-1, 0, measured=False),
        record(0, 2),
        record(1, 2, prompt_tokens=30, bursts=[Burst(1.5, 2), Burst(2, 4)]),
        record(2, 3, error="timeout", prompt_tokens=999, bursts=[]),
    ]
    found = described(benchmark(tmp_path, requests))
    assert (found.kind, found.requests, found.failed, found.left_out) == ("benchmark", 3, 1, 1)
    assert found.prompt_tokens is not None
    assert found.output_tokens is not None
    assert (found.prompt_tokens.min, found.prompt_tokens.p50, found.prompt_tokens.max) == (10, 20, 30)
    assert (found.output_tokens.min, found.output_tokens.max) == (3, 6)


def test_prompts_and_answers_of_a_data_set(tmp_path: Path, tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "One question"}, {"role": "assistant", "content": "and its long answer"}]
    more = [*chat, {"role": "user", "content": "Another"}]
    rows = [{"prompt": "Plain text", "max_tokens": 9}, {"messages": chat}, {"messages": more}]
    trace = read_trace(written(tmp_path, *rows), tokenizer)
    prompts = [tokenizer.encode("Plain text"), tokenizer.encode_chat(chat[:1]), tokenizer.encode_chat(more)]
    assert [r.prompt.tolist() for r in trace.requests if r.prompt is not None] == prompts
    answer = len(tokenizer.encode("and its long answer", add_special_tokens=False))
    assert [(r.output_tokens, r.max_tokens) for r in trace.requests] == [(None, 9), (answer, None), (None, None)]
    assert describe(trace, block_size=BLOCK).arrivals is None


def test_a_batch_is_read_as_its_server_reads_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "One question"}]
    chat = {"model": "m", "messages": messages, "max_completion_tokens": 5, "temperature": 0}
    plain = {"model": "m", "prompt": "Plain text", "max_tokens": 6}
    rows = [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": plain},
    ]
    trace = read_trace(written(tmp_path, *rows), tokenizer)
    assert trace.kind == "batch"
    assert [r.prompt_tokens for r in trace.requests] == [
        len(tokenizer.encode_chat(messages)), len(tokenizer.encode("Plain text"))
    ]  # fmt: skip
    assert [r.max_tokens for r in trace.requests] == [5, 6]


def tokens(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], np.int32)


def test_agents_share_what_has_the_same_ids(tmp_path: Path) -> None:
    """Two requests of whole prompts, and an agent of two turns of what is new, with an answer of three tokens."""
    rows: list[dict[str, Any]] = [
        {"timestamp": 1000, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 0, "input_length": 1030, "output_length": 4, "hash_ids": [1, 2, 9]},
        {"session_id": "a", "timestamp": 500, "input_length": 20, "output_length": 3, "hash_ids": [1]},
        {"session_id": "a", "delay": 4000, "input_length": 8, "output_length": 5},
    ]
    file = written(tmp_path, *rows)
    found = described(file)
    assert (found.kind, found.requests) == ("agents", 4)
    assert found.arrivals is not None
    assert found.arrivals.seconds == 4.5
    assert found.prompt_tokens is not None
    assert found.prompt_tokens.max == 1030
    (share,) = found.prefix_cache
    hits = 19 + 699 + 20  # of the agent's first turn, the shorter whole prompt, and the turn after it
    assert share.share == hits / (1030 + 20 + 700 + 31)
    assert described(file.parent) == found


def test_subagents_begin_after_their_parents_answer(tmp_path: Path) -> None:
    calls = [
        {"t": 0.0, "hash_ids": [1, 2], "in": 100, "out": 20},
        {"type": "subagent", "requests": [{"hash_ids": [1, 7], "in": 90, "out": 4}]},
        {"t": 5.0, "hash_ids": [1, 2, 3], "in": 192, "out": 9, "think_time": 1.5},
    ]
    (tmp_path / "one.json").write_text(json.dumps({"block_size": 64, "requests": calls}))
    trace = read_trace(tmp_path / "one.json")
    assert [(turn.start, turn.prompt_tokens) for turn in trace.requests] == [(0.0, 100), (0.0, 90), (1.5, 192)]


@pytest.mark.parametrize(
    ("texts", "size", "found"),
    [
        (["abcdefgh", "abcdefgh"], None, 7),  # all but the last token
        (["abcdef", "abcdeX"], None, 5),  # a part of a block, too
        (["abcdefgh", "ijklmnop"], None, 0),
        (["abcdefgh", "ijklmnop", "abcdefgh"], 16, 7),
        (["abcdefgh", "ijklmnop", "abcdefgh"], 8, 0),  # the second evicts the first
        (["abcdefghX", "abcdefghX"], 8, 0),  # longer than the cache
    ],
)
def test_share_that_a_prefix_cache_serves(texts: list[str], size: int | None, found: int) -> None:
    assert cached_share([tokens(text) for text in texts], size, BLOCK) == found / sum(map(len, texts))


def test_an_unlimited_cache_serves_the_longest_common_prefixes() -> None:
    """The oracle compares each prompt with all earlier ones. A smaller cache of the same prompts serves no more."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 2, rng.integers(2, 40)).astype(np.int32) for _ in range(60)]
    best = 0
    for idx, prompt in enumerate(prompts):
        best += max((_common(prompt[:-1], other) for other in prompts[:idx]), default=0)
    total = sum(map(len, prompts))
    assert cached_share(prompts, None, 1) == best / total
    shares = [cached_share(prompts, size, BLOCK) for size in (40, 160, 640, None)]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]


def _common(a: np.ndarray, b: np.ndarray) -> int:
    count = min(len(a), len(b))
    differ = np.flatnonzero(a[:count] != b[:count])
    return int(differ[0]) if len(differ) else count


def test_what_a_user_sees(tmp_path: Path) -> None:
    system = {"role": "system", "content": "You answer questions about a long manual. " * 8}
    rows = [{"messages": [system, {"role": "user", "content": f"Question {n}"}], "max_tokens": 8} for n in range(20)]
    file = written(tmp_path, *rows)
    shown = CliRunner().invoke(app, ["advise", str(file), "--tokenizer", "demo", "--kv-tokens", "64,4096"])
    assert shown.exit_code == 0, shown.exception
    assert all(len(line) <= 80 for line in shown.stdout.splitlines())
    result = CliRunner().invoke(app, ["advise", str(file), "--tokenizer", "demo", "--kv-tokens", "64,4096", "--json"])
    document = json.loads(result.stdout)
    assert [row["kv_tokens"] for row in document["prefix_cache"]] == [None, 4096, 64]
    unlimited, large, small = (row["share"] for row in document["prefix_cache"])
    assert unlimited == large > 0.8 > small
    assert f"would serve {unlimited:.1%} of prompt tokens (unlimited)" in shown.stdout
    log_shown = CliRunner().invoke(app, ["advise", str(written(tmp_path, logged(1, 100), logged(3, 100)))]).stdout
    assert "requests/s   0.50\n" in log_shown


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "is empty"),
        ("01-01 00:00:00 I POST / 200\n", "a log must be written with --log-format json"),
        ('{"prompt": "a"}\n', "has prompts; name the model that counts their tokens with --tokenizer"),
        ('{"schema": "other/1", "runs": []}', "schema is 'other/1', expected 'lmkit.bench/1'"),
        ('{"schema": "lmkit.bench/1"}', "not the figures of `lmkit bench`"),
        ('{"schema": "lmkit.bench/1", "runs": [{}]}', "run `lmkit bench` with --requests"),
        ('{"schema": "lmkit.bench/1", "runs": [{}, {}]}', "has 2 runs"),
        ('{"logger": "a"}\n', "has no request that generates text"),
        ('{"logger": "a"}\n{"duration_ms": "1"}\n', "line 2: no line of an access log"),
        ('{"logger": "a"}\n{"dura', "line 2: not valid JSON"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    assert line in mistake("advise", file)


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"custom_id": "a", "url": "/v1/embeddings", "body": {}}, "line 1: url '/v1/embeddings': expected"),
        ({"custom_id": "a"}, 'line 1: expected "custom_id"'),
        (
            {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a", "n": 2}},
            "line 1: body: n is not supported here",
        ),
        ({"text": "a"}, 'line 1: expected "prompt"'),
    ],
)
def test_bad_prompts(tmp_path: Path, row: dict[str, Any], line: str) -> None:
    assert line in mistake("advise", written(tmp_path, row), "--tokenizer", "demo")


def test_options_that_have_no_use(tmp_path: Path) -> None:
    file = written(tmp_path, logged(1, 100))
    assert "has no prompts, so --tokenizer has no use" in mistake("advise", file, "--tokenizer", "demo")
    assert "has no prompts, so --kv-tokens has no use" in mistake("advise", file, "--kv-tokens", "64")
    assert "--kv-tokens 'x'" in mistake("advise", file, "--kv-tokens", "x")
    assert "cannot be read: No such file" in mistake("advise", tmp_path / "none")
