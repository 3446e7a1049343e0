"""Clients that leave, workers that die, signals: what a server process does over its life."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from lmkit.errors import ConfigError
from lmkit.web.listen import bind
from tests.cli.commands import mistake
from tests.serve.fake_engine import DEMO
from tests.serve.live import FAKE, ROOT, Server

ENDLESS = {"model": "demo", "prompt": "SLOW", "max_tokens": 3500}


def raw_request(server: Server, body: dict[str, Any], window: int | None = None) -> socket.socket:
    """A connection on which a completion has been asked for; `window` bytes of it fit the receive buffer."""
    address = urlsplit(server.url)
    connection = socket.socket()
    if window is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    connection.settimeout(20)
    connection.connect((address.hostname, address.port))
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n"
    connection.sendall(head.encode() + b"\r\n" + data)
    return connection


def running(server: Server) -> float:
    return server.metric("lmkit:num_requests_running")


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_frees_the_engine(server: Server, stream: bool, n: int, reset: bool) -> None:
    server.until(lambda: running(server) == 0)
    aborts = server.metric('lmkit:requests_total{finish_reason="abort"')
    connection = raw_request(server, ENDLESS | {"stream": stream, "n": n})
    server.until(lambda: running(server) == n)
    if stream:
        assert b"200 OK" in connection.recv(4096)
    if reset:  # an RST instead of a FIN
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()
    server.until(lambda: running(server) == 0, seconds=5)
    server.until(lambda: server.metric('lmkit:requests_total{finish_reason="abort"') == aborts + n)


def test_a_client_that_leaves_before_the_first_token(server: Server) -> None:
    """Nobody waits for a request in the queue either."""
    server.until(lambda: running(server) == 0)
    connections = [raw_request(server, ENDLESS | {"stream": True, "n": 100}) for _ in range(2)]
    server.until(lambda: server.metric("lmkit:num_requests_waiting") > 100)
    for connection in connections:
        connection.close()
    server.until(lambda: running(server) == 0 and server.metric("lmkit:num_requests_waiting") == 0)


def test_a_client_that_does_not_read_does_not_hold_others_up(server: Server) -> None:
    with raw_request(
        server, {"model": "demo", "prompt": "Hi", "max_tokens": 2000, "stream": True, "n": 10}, window=4096
    ):
        start = time.monotonic()
        assert server.post("/v1/completions", {"model": "demo", "prompt": "Hi", "max_tokens": 5}).status_code == 200
        assert time.monotonic() - start < 10
    server.until(lambda: running(server) == 0)


def test_a_killed_worker_is_replaced() -> None:
    with Server() as server, ThreadPoolExecutor() as threads:
        waiting = threads.submit(server.post, "/v1/completions", ENDLESS)
        streaming = httpx.stream("POST", server.url + "/v1/completions", json=ENDLESS | {"stream": True}, timeout=30)
        with streaming as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: {")
            server.until(lambda: running(server) == 2)
            server.worker().send_signal(signal.SIGKILL)
            rest = [line for line in lines if line]
        last = json.loads(rest[-1].removeprefix("data: "))
        assert last["error"]["code"] == "engine_unavailable"
        assert waiting.result().status_code == 503
        assert waiting.result().json()["error"]["code"] == "engine_unavailable"
        assert waiting.result().headers["retry-after"]

        health = server.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "restarting"})
        refused = server.post("/v1/completions", {"model": "demo", "prompt": "Hi"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        server.until(lambda: server.get("/health").status_code == 200)
        assert server.post("/v1/completions", {"model": "demo", "prompt": "Hi"}).status_code == 200
        assert server.metric("lmkit:engine_starts_total") == 2
        assert server.terminate() == 0


def test_a_server_that_was_stopped_as_a_whole_goes_on() -> None:
    """A laptop that sleeps, or a debugger: the engine was silent no longer than its front end."""
    with Server("--step-timeout", "2") as server:
        worker, both = server.worker(), (server.process.pid, server.worker().pid)
        for pid in both:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(3.5)
        for pid in both:
            os.kill(pid, signal.SIGCONT)
        assert server.post("/v1/completions", {"model": "demo", "prompt": "Hi"}).status_code == 200
        time.sleep(2.5)
        assert server.worker() == worker


def test_a_mood_of_the_engine_kills_only_the_worker(server: Server) -> None:
    assert server.post("/v1/completions", {"model": "demo", "prompt": "KILL"}).status_code == 503
    server.until(lambda: server.get("/health").status_code == 200)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(number: signal.Signals) -> None:
    with Server("--drain-seconds", "10") as server, ThreadPoolExecutor() as threads:
        worker = server.worker()
        body = {"model": "demo", "prompt": "SLOW", "max_tokens": 60, "seed": 0}
        whole = threads.submit(server.post, "/v1/completions", body)
        streamed = threads.submit(server.post, "/v1/completions", body | {"stream": True})
        server.until(lambda: running(server) == 2)
        server.process.send_signal(number)
        server.until(lambda: server.get("/health").status_code == 503)
        assert server.get("/health").json() == {"status": "draining"}
        refused = server.post("/v1/completions", {"model": "demo", "prompt": "Hi"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert refused.headers["retry-after"]
        assert whole.result().json()["usage"]["completion_tokens"] == 60
        assert streamed.result().text.rstrip().endswith("data: [DONE]")
        assert server.process.wait(10) == 0
        assert not worker.is_running()


def test_the_drain_has_an_end() -> None:
    with Server("--drain-seconds", "0.3", "--log-level", "WARNING") as server, ThreadPoolExecutor() as threads:
        streamed = threads.submit(server.post, "/v1/completions", ENDLESS | {"stream": True})
        server.until(lambda: running(server) == 1)
        assert server.terminate(seconds=10) == 0
        last = streamed.result().text.rstrip().splitlines()[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert server.log.splitlines() == [f"serving demo on {server.url}"]  # nothing else to say at this level


def test_a_second_signal_does_not_wait() -> None:
    with Server("--drain-seconds", "60") as server, ThreadPoolExecutor() as threads:
        worker = server.worker()
        cut = threads.submit(server.post, "/v1/completions", ENDLESS)
        server.until(lambda: running(server) == 1)
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: server.get("/health").status_code == 503)
        start = time.monotonic()
        assert server.terminate(signal.SIGINT, seconds=10) == 1
        assert time.monotonic() - start < 5
        assert not worker.is_running()
        with pytest.raises(httpx.HTTPError):
            cut.result().raise_for_status()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-memory", "lots"], "--kv-memory"),
        (["--block-size", "0"], "--block-size"),
        (["--kv-dtype", "int5"], "--kv-dtype"),
        (["--port", "99999"], "--port"),
        (["--log-level", "LOUD"], "--log-level"),
    ],
)
def test_wrong_options(options: list[str], message: str) -> None:
    assert mistake("serve", "demo", *options).startswith(message)


def test_addresses_that_cannot_be_had(server: Server) -> None:
    taken = urlsplit(server.url).port or 0
    for host, port in (("127.0.0.1", taken), ("256.0.0.1", 0), ("x" * 300, 0)):
        with pytest.raises(ConfigError, match="cannot listen"):
            bind(host, port)


def checkpoint(folder: Path) -> Path:
    """A checkpoint without weights, for a front end that reads none."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((DEMO / name).read_bytes())
    (folder / "model.safetensors").touch()
    return folder


def test_a_worker_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "bad-checkpoint")
    command = [sys.executable, "-m", "lmkit", "serve", "--engine", FAKE, str(folder), "--port", "0"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert result.stderr == f"lmkit: {folder}: model.safetensors is truncated\n"
    assert result.stdout == ""


def test_the_front_end_loads_no_torch(server: Server) -> None:
    maps = Path(f"/proc/{server.process.pid}/maps")
    if not maps.exists():
        pytest.skip("no /proc here")
    assert "libtorch" not in maps.read_text()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A socket's path must be short, and a folder of pytest-xdist is long."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_signals_while_the_model_loads(short_path: Path) -> None:
    """Nothing is left of a start that is called off."""
    folder = checkpoint(short_path / "slow-to-load")
    command = [sys.executable, "-m", "lmkit", "serve", "--engine", FAKE, str(folder), "--port", "0"]
    environment = {**os.environ, "TMPDIR": str(short_path)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while not (sockets := list(short_path.glob("lmkit-*/*"))):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert len(sockets) >= 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert list(short_path.glob("lmkit-*")) == []
    assert process.stdout is not None
    assert process.stdout.read() == ""
