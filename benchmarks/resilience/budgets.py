"""The memory that bodies without an end take, and answers that nobody reads or that have many log-probabilities."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx

from benchmarks.resilience.case import Case, Setting
from benchmarks.resilience.processes import Command, routing, serving

MIB = 1 << 20
BODY_BYTES = 4 * MIB  # of each unfinished body
BODY_MEMORY = 32 * MIB  # of the proxy
ANSWER_MEMORY = 16 * MIB  # of the server; one answer gets an eighth
LATEST = 60.0  # seconds until streams that nobody reads are ended
LOGPROBS = {"model": "demo", "messages": "Tell a story.", "ignore_eos": True, "logprobs": True, "top_logprobs": 20}


class Growth:
    """Samples a process' memory. `mib` is the most by which it has grown since the beginning."""

    def __init__(self, command: Command) -> None:
        self._command, self._start = command, command.resident_mib
        self.mib = 0.0

    def sample(self) -> float:
        now = self._command.resident_mib - self._start
        self.mib = max(self.mib, now)
        return now


def unfinished_bodies(setting: Setting) -> float:
    """MiB by which a proxy grows while many clients send all but the last byte of a body."""
    config = setting.workdir / "proxy.yaml"
    config.write_text(f"max_body_bytes: {2 * BODY_BYTES}\nbody_memory: {BODY_MEMORY}\nnode_wait: 0\n")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % BODY_BYTES
    body = bytes(BODY_BYTES - 1)
    with routing(options=("--config", str(config))) as proxy, contextlib.ExitStack() as stack:
        growth = Growth(proxy)
        for _ in range(24 if setting.quick else 200):
            client = stack.enter_context(socket.create_connection(proxy.address, 10))
            with contextlib.suppress(OSError):  # it was refused
                client.sendall(head + body)
            growth.sample()
        assert httpx.post(f"{proxy.url}/v1/chat/completions", json={"model": "a"}, timeout=10).status_code == 404
        growth.sample()
    return growth.mib


def held_answers(setting: Setting) -> float:
    """MiB by which a server grows under whole answers with log-probabilities, and under streams that nobody reads."""
    num_choices, num_streams = (4, 1) if setting.quick else (16, 12)
    with serving("--answer-memory", str(ANSWER_MEMORY)) as server:
        ask(server, {"max_tokens": 4})  # what the first request makes stays
        growth = Growth(server)
        with unread_streams(server, num_streams), sampled(growth):
            # Random tokens: with 300 of them an answer may need more than its eighth.
            answer = ask(server, {"max_tokens": 240, "n": num_choices})
            assert len(answer.get("choices", ())) == num_choices, answer
            deadline = time.monotonic() + LATEST
            while server.log.count("an answer ends before its client has read it") < num_streams:
                assert time.monotonic() < deadline, "streams that nobody reads go on"
                time.sleep(0.1)
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=LOGPROBS | {"n": 128, "max_tokens": 2000})
        assert refused.status_code == 400, refused.text
    return growth.mib


def ask(server: Command, fields: dict[str, int]) -> dict[str, list[object]]:
    answer: dict[str, list[object]] = httpx.post(
        f"{server.url}/v1/chat/completions", json=LOGPROBS | fields, timeout=120
    ).json()
    return answer


@contextlib.contextmanager
def unread_streams(server: Command, number: int) -> Iterator[None]:
    """Clients that ask for a long stream and read nothing of it."""
    body = json.dumps(LOGPROBS | {"stream": True, "max_tokens": 3500, "n": 4}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(server.address)
            client.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
        yield


@contextlib.contextmanager
def sampled(growth: Growth) -> Iterator[None]:
    end = threading.Event()

    def sample() -> None:
        while not end.wait(0.05):
            growth.sample()

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


CASES = (
    Case("unfinished bodies: a proxy's growth", "MiB", 2.5 * BODY_MEMORY / MIB, unfinished_bodies),
    Case("answers not read: a server's growth", "MiB", 4 * ANSWER_MEMORY / MIB, held_answers),
)
