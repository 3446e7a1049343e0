"""The proxy between clients that spy on each other and nodes that stop or answer nonsense."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from benchmarks.resilience.case import Case, Setting
from benchmarks.resilience.processes import Command, routing, serving

SECRET = "the secret number of this account is {}, and nobody else may know it; " + "repeat nothing of all this. " * 8
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
MODELS = b'{"object": "list", "data": [{"id": "demo", "object": "model"}]}'
TWO_FRAMINGS = HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"


def _config(folder: Path, *lines: str) -> tuple[str, str]:
    file = folder / "proxy.yaml"
    file.write_text("\n".join(lines) + "\n")
    return "--config", str(file)


def _ask(proxy: Command, prompt: str, key: str = "none", timeout: float = 30.0) -> httpx.Response:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{proxy.url}/v1/completions", json=body, headers=headers, timeout=timeout)


def pin_hits(setting: Setting) -> float:
    """Guesses of one client that find the prompt of another in the cache, on three kinds of nodes.

    The proxy's key on the node has its role, or has none, or the node has no keys.
    """
    pins = range(100, 112 if setting.quick else 160)
    kinds = (("node role=proxy",), ("node",), ()) if not setting.quick else (("node",),)
    return float(sum(_pin_hits(setting, kind, pins) for kind in kinds))


def _pin_hits(setting: Setting, keys: tuple[str, ...], pins: range) -> int:
    options = [option for key in keys for option in ("--api-key", key)]
    with serving(*options) as node:
        entry = f"  - {{url: {node.url}, models: [demo]{', api_key: node' if keys else ''}}}"
        config = _config(setting.workdir, "api_keys: [victim, spy]", "nodes:", entry)
        with routing(options=config) as proxy:
            secret = SECRET.format(pins[len(pins) // 2])
            for _ in range(2):  # the second shows that the cache is on
                usage = _ask(proxy, secret, "victim").json()["usage"]
            if not usage["prompt_tokens_details"]["cached_tokens"]:
                raise RuntimeError("the victim does not find its own prompt, so the case would show nothing")
            found = 0
            for pin in pins:
                details = _ask(proxy, SECRET.format(pin), "spy").raise_for_status().json()["usage"]
                found += pin == pins[len(pins) // 2] and details["prompt_tokens_details"]["cached_tokens"] > 32
            return found


def stopped_node(setting: Setting) -> float:
    """Seconds until requests that a stopped node holds are answered by another: the slowest of all."""
    count = 4 if setting.quick else 64
    with serving() as stopped, serving() as healthy:
        nodes = [f"  - {{url: {node.url}, models: [demo]}}" for node in (stopped, healthy)]
        checks = ["health_interval: 0.5", "health_timeout: 0.5", "policy: round_robin", "nodes:"]
        with routing(options=_config(setting.workdir, *checks, *nodes)) as proxy:
            _ask(proxy, "def ")
            processes = [stopped.process.pid, *(child.pid for child in stopped.children())]
            for pid in processes:
                os.kill(pid, signal.SIGSTOP)
            try:
                start = time.perf_counter()
                with ThreadPoolExecutor(count) as pool:
                    answers = list(pool.map(lambda _: _ask(proxy, "def "), range(count)))
                seconds = time.perf_counter() - start
            finally:
                for pid in processes:
                    os.kill(pid, signal.SIGCONT)
    if not all(answer.is_success for answer in answers):
        raise RuntimeError(f"answers {sorted({answer.status_code for answer in answers})}")
    return seconds


def two_framings(setting: Setting) -> float:
    """Seconds until clients of a node that sends a length beside chunks have their answer: the slowest."""
    with _broken_node() as url, routing(url) as proxy:
        return _worst(proxy, 4 if setting.quick else 64)


def leaked_connections(setting: Setting) -> float:
    """Open files of the proxy that such answers leave behind. A check of the node may have one at any moment."""
    with _broken_node() as url, routing(url) as proxy:
        _worst(proxy, 2)
        time.sleep(2.5)  # idle connections to nodes are closed after 2 s
        before = proxy.num_open_files
        _worst(proxy, 4 if setting.quick else 64)
        time.sleep(2.5)
        return float(max(0, proxy.num_open_files - before))


def _worst(proxy: Command, count: int) -> float:
    worst = 0.0
    for _ in range(count):
        start = time.perf_counter()
        with contextlib.suppress(httpx.TimeoutException):
            answer = _ask(proxy, "x", timeout=5.0)
            if answer.status_code != 502:
                raise RuntimeError(f"answer {answer.status_code}")
        worst = max(worst, time.perf_counter() - start)
    return worst


@contextlib.contextmanager
def _broken_node() -> Iterator[str]:
    """A server whose checks are good and whose answers have two framings."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:

        def answer(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                while head := connection.recv(65536):
                    post = head.startswith(b"POST")
                    plain = HEAD + b"content-length: %d\r\n\r\n%s" % (len(MODELS), MODELS)
                    connection.sendall(TWO_FRAMINGS if post else plain)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield "http://{}:{}".format(*listener.getsockname())
        finally:
            listener.shutdown(socket.SHUT_RDWR)


CASES = (
    Case("PIN in another client's prompt: guesses that hit", "", 0, pin_hits),
    Case("stopped node: its requests are answered by another", "s", 10, stopped_node),
    Case("node with two framings: its client is told", "s", 2, two_framings),
    Case("node with two framings: open files that 64 answers leave", "", 2, leaked_connections),
)
