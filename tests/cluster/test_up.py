"""`lmkit up` as a real process, with the fake engine: what it starts, restarts, scales, rolls over and ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from lmkit.config import EngineConfig
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.text import Tokenizer
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from tests.serve.live import FAKE, ROOT

pytestmark = pytest.mark.slow
SECONDS = 120.0
HYBRID = ROOT / "tests" / "data" / "qwen3_5"


class Up:
    """`lmkit up` with one group of the demo model."""

    def __init__(self, folder: Path, cluster: Any = None, **fields: Any) -> None:
        self.file = folder / "cluster.yaml"
        self.write(cluster, **fields)
        command = [sys.executable, "-m", "lmkit", "up", str(self.file)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.log, self.url = "", ""
        threading.Thread(target=self._read, daemon=True).start()
        self.until(lambda: bool(self.url))
        self.http = httpx.Client(base_url=self.url, timeout=SECONDS)

    def write(self, cluster: Any = None, **fields: Any) -> None:
        """`fields` are those of the group."""
        group = {"model": "demo", "replicas": 2, "cores": 1, **fields}
        group["options"] = {"engine": FAKE, **group.get("options", {})}
        cluster = {"models": [group], "proxy": {"port": 0}, "drain_seconds": 20, **(cluster or {})}
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(cluster))
        new.rename(self.file)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log += line
            if found := re.match(r"cluster on (http://\S+)", line):
                self.url = found[1]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"did not happen in time; log:\n{self.log}"
            assert self.process.poll() is None, f"`lmkit up` ended:\n{self.log}"
            time.sleep(0.05)

    def children(self, command: str = "") -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if runs(child) and (not command or command in child.cmdline()):
                    found.append(child)
        return found

    @property
    def num_ready(self) -> int:
        return int(self.http.get("/health").json()["healthy_nodes"])

    def ask(self, text: str = "hello") -> httpx.Response:
        return self.http.post("/v1/chat/completions", json=body(text))

    def __enter__(self) -> Up:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "seed": 1, **fields}


@pytest.fixture
def gone() -> Iterator[list[psutil.Process]]:
    """Processes that must have ended, at the latest some seconds after the test."""
    processes: list[psutil.Process] = []
    yield processes
    deadline = time.monotonic() + 30
    while (left := [process for process in processes if runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        process.kill()
    assert not left


def test_what_dies_comes_again_and_nothing_stays_behind(tmp_path: Path, gone: list[psutil.Process]) -> None:
    with Up(tmp_path) as up:
        answer = up.ask().json()["choices"]  # held until a replica has started
        up.until(lambda: up.num_ready == 2)
        servers, (proxy,) = up.children("serve"), up.children("proxy")
        gone += up.children()
        servers[0].kill()
        assert up.ask().json()["choices"] == answer
        up.until(lambda: "demo-1 was ended by SIGKILL" in up.log or "demo-2 was ended by SIGKILL" in up.log)
        up.until(lambda: len(up.children("serve")) == 2)
        proxy.kill()
        up.until(lambda: "the proxy was ended by SIGKILL" in up.log)
        up.until(lambda: any(child.pid != proxy.pid for child in up.children("proxy")))

        def answers() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return bool(up.ask().json()["choices"] == answer) and up.num_ready == 2
            return False

        up.until(answers)  # at the same address
        gone += up.children()
        assert (
            "demo"
            in subprocess.run([sys.executable, "-m", "lmkit", "ps"], capture_output=True, text=True, check=True).stdout
        )
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(60) == 0, up.log
        assert not any(map(runs, gone))


def test_all_end_with_a_cluster_that_is_killed(tmp_path: Path, gone: list[psutil.Process]) -> None:
    with Up(tmp_path) as up:
        up.until(lambda: up.num_ready == 2)
        gone += up.children()
        assert len(gone) >= 5  # a proxy, two servers and their engines
        up.process.kill()


def test_a_replica_that_hangs_is_replaced(tmp_path: Path, gone: list[psutil.Process]) -> None:
    proxy = {"port": 0, "health_interval": 0.5, "health_timeout": 0.5}
    with Up(tmp_path, {"proxy": proxy}, replicas=1) as up:
        up.until(lambda: up.num_ready == 1)
        up.write({"proxy": proxy, "silent_seconds": 2}, replicas=1)
        up.until(lambda: f"{up.file} has changed" in up.log)
        (server,) = up.children("serve")
        gone += up.children()
        for process in (server, *server.children(recursive=True)):  # its engine, too
            process.suspend()
        up.until(lambda: "demo-1 is killed: lost" in up.log)
        assert up.ask().status_code == 200  # held until the next one is ready
        assert [child.pid for child in up.children("serve")] != [server.pid]


def test_from_zero_and_back(tmp_path: Path) -> None:
    scaling = {"requests": 2, "idle_seconds": 3}
    with Up(tmp_path, replicas={"min": 0, "max": 2}, scaling=scaling) as up:
        assert [model["id"] for model in up.http.get("/v1/models").json()["data"]] == ["demo"]
        assert (up.num_ready, up.children("serve")) == (0, [])
        assert up.ask().status_code == 200
        assert up.num_ready == 1

        async def crowd() -> list[int]:
            async with httpx.AsyncClient(base_url=up.url, timeout=SECONDS) as http:
                asking = [http.post("/v1/chat/completions", json=body("SLOW", max_tokens=200)) for _ in range(6)]
                return [answer.status_code for answer in await asyncio.gather(*asking)]

        assert asyncio.run(crowd()) == [200] * 6
        assert "demo-2 starts" in up.log
        up.until(lambda: not up.children("serve"))
        assert up.ask("again").status_code == 200
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(60) == 0


def test_a_new_version_comes_without_a_failed_request(tmp_path: Path) -> None:
    with Up(tmp_path) as up:
        up.until(lambda: up.num_ready == 2)
        expected = up.ask().json()["choices"]
        old = {child.pid for child in up.children("serve")}
        done = threading.Event()
        wrong: list[Any] = []
        count = [0] * 4

        def load(i: int) -> None:
            with httpx.Client(base_url=up.url, timeout=SECONDS) as http:
                while not done.is_set():
                    if i % 2:
                        answer = http.post("/v1/chat/completions", json=body("hello"))
                        if answer.status_code != 200 or answer.json()["choices"] != expected:
                            wrong.append(answer.text)
                    else:
                        with http.stream("POST", "/v1/chat/completions", json=body("hello", stream=True)) as stream:
                            lines = list(stream.iter_lines())
                            if "data: [DONE]" not in lines or any('"error"' in line for line in lines):
                                wrong.append(lines)
                    count[i] += 1

        threads = [threading.Thread(target=load, args=(i,)) for i in range(len(count))]
        for thread in threads:
            thread.start()
        try:
            up.write(version="2")
            up.until(lambda: len(now := {c.pid for c in up.children("serve")}) == 2 and not now & old)
            up.until(lambda: up.num_ready == 2)
            before = list(count)
            up.until(lambda: all(n > b for n, b in zip(count, before, strict=True)))
        finally:
            done.set()
            for thread in threads:
                thread.join()
        assert not wrong, (wrong[0], up.log)
        assert up.log.count(" drains") == 2


def test_a_bad_change_changes_nothing(tmp_path: Path) -> None:
    with Up(tmp_path, replicas=1) as up:
        up.until(lambda: up.num_ready == 1)
        pids = {child.pid for child in up.children()}
        up.write(options={"kv_memory": "lots"})
        up.until(lambda: "the cluster goes on as it is" in up.log)
        assert "demo: kv_memory: 'lots'" in up.log
        assert {child.pid for child in up.children()} >= pids


def test_a_proxy_that_cannot_listen_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("models: [{model: demo}]\nproxy: {host: 203.0.113.1}")
    command = [sys.executable, "-m", "lmkit", "up", str(tmp_path / "cluster.yaml")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ended.returncode == 2
    assert "cannot listen on 203.0.113.1:8080" in ended.stdout
    assert "lmkit: the proxy ended with status 2" in ended.stderr


@pytest.mark.parametrize("model", [DEMO_FOLDER, HYBRID], ids=["demo", "hybrid"])
def test_a_pair_of_roles_answers_through_the_proxy(tmp_path: Path, model: Path) -> None:
    """The tokens are those of one engine, and the prompt was computed by the other replica."""
    sizes = {"kv_memory": "32M", "max_model_len": 1024, "device": "cpu"}
    groups = [
        {"model": str(model), "name": "demo", "cores": 1, "role": "prefill"},
        {"model": str(model), "name": "demo", "cores": 1, "role": "decode", "options": sizes},
    ]
    groups[0]["options"] = {**sizes, "kv_host_memory": "64M"}
    ids = [7 + i % 900 for i in range(600)]
    with Up(tmp_path, {"models": groups}) as up:
        up.until(lambda: up.num_ready == 2)
        asked = {"model": "demo", "prompt": ids, "max_tokens": 8, "temperature": 0}
        answer = up.http.post("/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text
        assert 'lmkit_proxy_pairs_total{outcome="paired"} 1.0' in up.http.get("/metrics").text
        assert [model["id"] for model in up.http.get("/v1/models").json()["data"]] == ["demo"]
    engine = Engine(str(model), EngineConfig(device="cpu", kv_memory=32 << 20, max_model_len=1024))
    try:
        engine.add(Request(request_id="", prompt_ids=ids, params=SamplingParams(max_tokens=8, temperature=0.0)))
        expected: list[int] = []
        while engine.has_work():
            expected += [token for output in engine.step() for token in output.token_ids]
    finally:
        engine.close()
    assert answer.json()["choices"][0]["text"] == Tokenizer.from_pretrained(model).decode(expected)
