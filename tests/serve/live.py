"""A real `lmkit serve` process with the fake engine, on a free loopback port."""

from __future__ import annotations

import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parents[2]
FAKE = "tests.serve.fake_engine:FakeEngine"


class Server:
    """Starts on construction. Use it as a context manager, so that nothing stays behind."""

    def __init__(self, *options: str, model: str | Path = "demo", engine: str = FAKE) -> None:
        command = [sys.executable, "-m", "lmkit", "serve", str(model), "--port", "0", "--engine", engine, *options]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._client = httpx.Client(timeout=30, limits=httpx.Limits(keepalive_expiry=2))
        self._lines: queue.Queue[str] = queue.Queue()
        self.log = ""
        threading.Thread(target=self._read, daemon=True).start()
        line = self.wait_for_line(r"^(serving \S+ on http|lmkit: )", 240)  # kernels may have to be compiled first
        found = re.search(r"on (https?://\S+)", line)
        self.url = found[1] if found else ""

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log += line
            self._lines.put(line)

    def wait_for_line(self, pattern: str, seconds: float = 30) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                line = self._lines.get(timeout=0.1)
            except queue.Empty:
                assert self.process.poll() is None or not self._lines.empty(), f"the server ended:\n{self.log}"
                continue
            if re.search(pattern, line):
                return line
        raise AssertionError(f"no line like {pattern!r} in\n{self.log}")

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self._client.get(self.url + path, **options)

    def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        return self._client.post(self.url + path, json=json, **options)

    def metric(self, name: str) -> float:
        """The value of one time series. `name` has its labels except the model's name."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(name) and (value := re.fullmatch(r"\S+ (\S+)", line)):
                return float(value[1])
        raise AssertionError(f"no metric {name}")

    def until(self, condition: Callable[[], bool], seconds: float = 15) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"did not happen in time; log:\n{self.log}"
            time.sleep(0.02)

    def worker(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        (worker,) = (child for child in children if any("engine_process" in part for part in child.cmdline()))
        return worker

    def terminate(self, number: signal.Signals = signal.SIGTERM, seconds: float = 20) -> int:
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.terminate()
        self._client.close()
