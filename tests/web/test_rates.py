"""Limits per minute of single keys, and key files that change while the server runs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from lmkit.config import ServerConfig
from lmkit.errors import ConfigError, RequestError
from lmkit.proxy.config import ProxyConfig
from lmkit.serve.auth import ApiKeys
from lmkit.web.auth import parse_key
from lmkit.web.key_file import KeyFile, parse_keys
from lmkit.web.rates import Bucket, Meter
from tests.serve.in_process import CHAT, CHAT_PATH, TEXT, TEXT_PATH, App, ScriptedEngine


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_fills_evenly_and_no_further_than_full() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.take(90)  # an answer that had begun
    assert bucket.level == -30
    assert bucket.seconds_to(1) == 31
    clock.now += 31
    assert bucket.level == 1
    clock.now += 1000
    assert bucket.level == 60
    assert bucket.seconds_to(60) == 0


def test_a_meter_refuses_until_its_emptiest_bucket_has_one_again() -> None:
    clock = Clock()
    meter = Meter(parse_key("k requests_per_minute=2 tokens_per_minute=6"), clock)
    meter.request()
    meter.tokens(11)
    with pytest.raises(RequestError, match="6 tokens a minute; try again in 60 s") as error:
        meter.request()
    assert error.value.status == 429
    assert dict(meter.headers()) == {
        b"x-ratelimit-limit-requests": b"2",
        b"x-ratelimit-remaining-requests": b"1",
        b"x-ratelimit-reset-requests": b"30.000s",
        b"x-ratelimit-limit-tokens": b"6",
        b"x-ratelimit-remaining-tokens": b"0",
        b"x-ratelimit-reset-tokens": b"110.000s",
    }
    clock.now += 60
    meter.request()


def app(*keys: str, **options: Any) -> App:
    return App(ScriptedEngine(), ServerConfig(api_keys=keys, **options))


def test_requests_per_minute() -> None:
    server = app("a requests_per_minute=2", "b")
    first, second, third = [server.post(CHAT_PATH, CHAT, key="a") for _ in range(3)]
    assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert "x-ratelimit-limit-tokens" not in first.headers
    assert third.json()["error"]["code"] == "rate_limit_exceeded"
    assert third.headers["retry-after"] == "30"
    assert third.headers["x-ratelimit-remaining-requests"] == "0"
    assert server.request("GET", "/v1/models", headers={"authorization": "Bearer a"}).status_code == 200
    other = server.post(CHAT_PATH, CHAT, key="b")
    assert other.status_code == 200
    assert not [name for name in other.headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2, "temperature": 1}])
def test_tokens_per_minute_count_prompts_once_and_all_answers(fields: dict[str, Any]) -> None:
    server = app("a tokens_per_minute=1000")
    asked = server.post(TEXT_PATH, TEXT | {"max_tokens": 2} | {"n": 2, "temperature": 1}, key="a").json()["usage"]
    plain = app("a tokens_per_minute=1000")
    answer = plain.post(TEXT_PATH, TEXT | {"max_tokens": 2} | fields, key="a")
    assert answer.status_code == 200
    used = asked["prompt_tokens"] + 2 * fields.get("n", 1)
    after = plain.post(TEXT_PATH, {"prompt": 7}, key="a")  # refused later: its headers show what is left
    assert after.status_code == 400
    assert 0 <= int(after.headers["x-ratelimit-remaining-tokens"]) - (1000 - used) <= 20  # a second adds 16


def test_a_key_without_tokens_left_is_refused() -> None:
    server = app("a tokens_per_minute=1")
    assert server.post(TEXT_PATH, TEXT, key="a").status_code == 200
    refused = server.post(TEXT_PATH, TEXT, key="a")
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 60


def test_the_role_metrics_reads_metrics_only() -> None:
    server = app("m role=metrics", "u")
    key = {"authorization": "Bearer m"}
    assert server.request("GET", "/metrics", headers=key).status_code == 200
    for path in ("/v1/models", "/", "/metrics/", "/nowhere"):
        answer = server.request("GET", path, headers=key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
    assert server.post(CHAT_PATH, CHAT, key="m").status_code == 403


@pytest.mark.parametrize("line", ["k tokens_per_minute=0", "k requests_per_minute=x", "k requests_per_minute=-1"])
def test_wrong_limits_are_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="API key 1"):
        parse_keys([line])


@pytest.mark.parametrize("line", ["k requests_per_minute=1", "k tokens_per_minute=1", "k role=metrics"])
def test_a_proxy_refuses_what_it_does_not_hold(line: str) -> None:
    with pytest.raises((ConfigError, ValueError), match="give them to a node's keys"):
        ProxyConfig(api_keys=(line,))


def test_a_key_file_is_read_again_and_a_bad_one_keeps_the_old_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "keys", Clock()
    path.write_text("one\n")
    file = KeyFile(path, clock)
    names = lambda: [key.key for key in file.keys]  # noqa: E731

    def write(text: str | None) -> bool:
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        clock.now += 2
        return file.changed()

    assert not file.changed()
    assert write("one\ntwo weight=2\n")
    assert names() == ["one", "two"]
    with caplog.at_level(logging.INFO, "lmkit"):
        for wrong in ("", "secret rol=x", None, "secret two words"):
            caplog.clear()
            assert not write(wrong)
            assert len(caplog.records) == 1
            assert "the old API keys stay" in caplog.text
            assert "secret" not in caplog.text
            clock.now += 2
            assert not file.changed()
            assert len(caplog.records) == 1  # once for each version of the file
    assert names() == ["one", "two"]
    assert write("three")
    path.write_text("four-is-longer")
    assert not file.changed()  # it looks once a second


def test_a_removed_key_stops_working_and_meters_of_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a requests_per_minute=1\nb\n")
    statuses: list[int] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    keys, clock = ApiKeys(behind, ["given"], str(path)), Clock()
    assert keys._file
    keys._file._clock, keys._file._looked = clock, 0.0

    def ask(key: bytes) -> int:
        scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": [(b"x-api-key", key)]}
        asyncio.run(keys(scope, receive, send))
        return statuses[-1]

    assert [ask(b"a"), ask(b"a"), ask(b"b"), ask(b"given")] == [200, 429, 200, 200]
    path.write_text("a requests_per_minute=1\nnew-key\n")
    clock.now += 2
    assert [ask(b"b"), ask(b"new-key"), ask(b"a"), ask(b"given")] == [401, 200, 429, 200]
