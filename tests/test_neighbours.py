"""Two servers with the real engine on one machine, each with two threads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psutil
import pytest

from lmkit.turbo.transport.messages import ENGINE
from tests.serve.live import Server

pytestmark = pytest.mark.slow
PROMPTS = ["def read(path):", "import os", "class Stack:", "for line in"]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    with ExitStack() as stack:
        options = "--num-threads", "2", "--max-model-len", "1024"
        yield [stack.enter_context(Server(*options, engine=ENGINE)) for _ in range(2)]


def complete(server: Server, prompt: str, tokens: int) -> str:
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", body).raise_for_status().json()
    assert answer["usage"]["completion_tokens"] == tokens
    return str(answer["choices"][0]["text"])


def test_both_answer_as_one_alone(servers: list[Server]) -> None:
    alone = [complete(servers[0], prompt, 100) for prompt in PROMPTS]
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(complete, server, prompt, 100) for server in servers for prompt in PROMPTS]
        assert [answer.result() for answer in both] == alone + alone


def test_an_idle_server_uses_no_core(servers: list[Server]) -> None:
    for server in servers:
        complete(server, PROMPTS[0], 10)
        assert server.worker().environ()["GOMP_SPINCOUNT"]  # torch's threads also sleep soon
    processes = [process for server in servers for process in (psutil.Process(server.process.pid), server.worker())]
    time.sleep(0.5)
    used = -_cpu_seconds(processes)
    time.sleep(2)
    used += _cpu_seconds(processes)
    assert used < 1.0  # 4 seconds if one thread of each server spun


def test_the_other_goes_on_if_one_is_killed(servers: list[Server]) -> None:
    killed, other = servers
    alone = complete(other, PROMPTS[1], 300)
    with ThreadPoolExecutor() as pool:
        for prompt in PROMPTS:
            pool.submit(complete, killed, prompt, 900)
        answer = pool.submit(complete, other, PROMPTS[1], 300)
        killed.until(lambda: killed.metric("lmkit:num_requests_running") > 1)
        killed.worker().kill()
        assert answer.result(60) == alone


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))
