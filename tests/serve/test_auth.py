"""API keys: everything but /health needs one, whatever the request looks like."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import typer
from typer.testing import CliRunner

from lmkit.cli.serve import serve
from lmkit.errors import ConfigError
from lmkit.serve.auth import ApiKeys
from tests.serve.live import Server

KEYS = ("first-key", "Second-Key")


def ask(path: str = "/v1/models", *headers: tuple[bytes, bytes], scope: dict[str, Any] | None = None) -> int:
    """The status an ASGI request gets; 200 from the application behind it."""
    statuses: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    full = {"type": "http", "method": "GET", "path": path, "headers": list(headers)} | (scope or {})
    asyncio.run(ApiKeys(app, KEYS)(full, receive, send))
    return statuses[0]


def bearer(value: bytes) -> tuple[bytes, bytes]:
    return b"authorization", value


@pytest.mark.parametrize(
    "value", [b"Bearer first-key", b"bearer first-key", b"BEARER Second-Key", b"Bearer  first-key "]
)
def test_a_known_key_opens(value: bytes) -> None:
    assert ask("/v1/models", bearer(value)) == 200


@pytest.mark.parametrize(
    "value",
    [
        b"", b"Bearer", b"Bearer ", b"first-key", b"Basic first-key", b"Bearer FIRST-KEY", b"Bearer second-key",
        b"Bearer f", b"Bearer first-key,Second-Key", b"Bearer first-key x", b"Bearer \xff\xfe", b"Bearer first-key\x00",
    ],
)  # fmt: skip
def test_anything_else_does_not(value: bytes) -> None:
    assert ask("/v1/models", bearer(value)) == 401


@pytest.mark.parametrize("others", [(b"", b"stale"), (b"stale",), (b"",)])
def test_a_right_key_counts_beside_wrong_and_empty_ones(others: tuple[bytes, ...]) -> None:
    """Clients send the x-api-key of their environment beside the Authorization that they were given, or vice versa."""
    beside = [(b"x-api-key", other) for other in others]
    assert ask("/v1/models", bearer(b"Bearer first-key"), *beside) == 200
    assert ask("/v1/models", *beside, (b"x-api-key", b"first-key"), bearer(b"Bearer stale")) == 200
    assert ask("/v1/models", bearer(b"Basic x"), (b"x-api-key", b"first-key")) == 200
    assert ask("/v1/models", bearer(b"Bearer wrong"), *beside) == 401


def test_two_authorization_headers_are_refused() -> None:
    assert ask("/v1/models", bearer(b"Bearer first-key"), bearer(b"Bearer wrong")) == 401


def test_two_different_right_keys_are_refused() -> None:
    """Nobody can say who asks."""
    assert ask("/v1/models", bearer(b"Bearer first-key"), (b"x-api-key", b"Second-Key")) == 401
    assert ask("/v1/models", bearer(b"Bearer first-key"), (b"x-api-key", b"first-key")) == 200


@pytest.mark.parametrize(
    "path",
    ["/", "//health", "/health/", "/HEALTH", "/health/x", "/v1/../health", "/health%2f..", "/v1/health", "/metrics",
     "/tokenize", "/load", "/version", "/health\n", "", "/health?x"],
)  # fmt: skip
@pytest.mark.parametrize("host", [b"localhost", b"x/health?", b"/health", b"a@b/health#"])
def test_only_the_exact_health_path_is_open(path: str, host: bytes) -> None:
    scope = {"root_path": "/v", "raw_path": b"/health", "query_string": b"/health"}
    assert ask(path, (b"host", host), scope=scope) == 401
    assert ask("/health", (b"host", host)) == 200


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("file-key\n\nother-file-key\n")
    with Server("--api-key", KEYS[0], "--api-key", KEYS[1], "--api-key-file", str(file)) as server:
        yield server


def test_over_http(guarded: Server) -> None:
    for key in (*KEYS, "file-key", "other-file-key"):
        with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["demo"]
    with (
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as error,
    ):
        client.models.list()
    assert error.value.code == "invalid_api_key"
    assert error.value.response.headers["www-authenticate"] == "Bearer"
    assert guarded.get("/health").status_code == 200
    assert guarded.get("/metrics").status_code == 401
    assert guarded.get("/nowhere").status_code == 401
    for method in ("GET", "HEAD", "OPTIONS", "POST", "TRACE"):
        assert httpx.request(method, f"{guarded.url}/v1/models").status_code == 401
    assert guarded.get("/v1/models", headers={"host": "x/health?"}).status_code in (400, 401)
    for key in (*KEYS, "file-key", "wrong"):
        assert key not in guarded.log


@pytest.mark.parametrize("options", [["--api-key", ""], ["--api-key", "two words"], ["--api-key", "ключ"]])
def test_unusable_keys_are_refused(options: list[str]) -> None:
    with pytest.raises(ConfigError, match="API key 1"):
        run_cli(*options)


@pytest.mark.parametrize(
    "line",
    [
        "secret rol=proxy",
        "secret role=root",
        "secret role",
        "secret role=user role=proxy",
        "role=proxy",
        "a role=user b",
    ],
)
def test_a_wrong_attribute_stops_the_start_and_does_not_show_the_key(line: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"good role=proxy\n{line}\n")
    with pytest.raises(ConfigError, match="API key 2") as error:
        run_cli("--api-key-file", str(file))
    assert "secret" not in str(error.value)


def test_key_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        run_cli("--api-key-file", str(tmp_path / "missing"))
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(ConfigError, match="no API key"):
        run_cli("--api-key-file", str(tmp_path / "empty"))


def run_cli(*options: str) -> None:
    app = typer.Typer()
    app.command()(serve)
    CliRunner().invoke(app, ["demo", *options], catch_exceptions=False)
