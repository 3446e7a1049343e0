"""lmkit's commands as real processes: their addresses, logs, memory, open files, and how long /health takes."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import psutil

START_SECONDS = 240.0  # kernels may have to be compiled first
STOP_SECONDS = 30.0
KEPT_LOG = 200_000  # characters of a log's end


class Command:
    """A running `lmkit` command. `url` is the address in its line "... on http://..."."""

    def __init__(self, *arguments: str, max_open_files: int | None = None, **environment: str) -> None:
        def limit_files() -> None:
            assert max_open_files is not None
            resource.setrlimit(resource.RLIMIT_NOFILE, (max_open_files, max_open_files))

        self.process = subprocess.Popen(
            [sys.executable, "-m", "lmkit", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
            preexec_fn=limit_files if max_open_files else None,
        )
        self.url = ""
        self.log = ""
        self.num_log_bytes = 0
        self._served = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        if not self._served.wait(START_SECONDS) or not self.url:
            self.stop()
            raise RuntimeError(f"lmkit {' '.join(arguments)} did not start:\n{self.log}")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.num_log_bytes += len(line)
            self.log = (self.log + line.decode(errors="replace"))[-KEPT_LOG:]
            if not self.url and (found := re.search(rb"on (https?://\S+)", line)):
                self.url = found[1].decode()
                self._served.set()
        self._served.set()

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port

    @property
    def num_open_files(self) -> int:
        return psutil.Process(self.process.pid).num_fds()

    @property
    def resident_mib(self) -> float:
        """Of the front end or proxy alone, not of the engine's process."""
        return float(psutil.Process(self.process.pid).memory_info().rss) / 2**20

    def children(self) -> list[psutil.Process]:
        return list(psutil.Process(self.process.pid).children(recursive=True))

    def engine(self) -> psutil.Process:
        """The engine's process of a server."""
        (engine,) = (child for child in self.children() if any("engine_process" in part for part in child.cmdline()))
        return engine

    def stop(self) -> None:
        """End it and everything that it started."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def serving(
    *options: str, model: str = "demo", max_open_files: int | None = None, **environment: str
) -> Iterator[Command]:
    """`lmkit serve` on a free port."""
    with _running("serve", model, "--port", "0", *options, max_open_files=max_open_files, **environment) as command:
        yield command


@contextlib.contextmanager
def routing(*nodes: str, options: tuple[str, ...] = (), max_open_files: int | None = None) -> Iterator[Command]:
    """`lmkit proxy` on a free port, before these nodes."""
    named = [argument for node in nodes for argument in ("--node", node)]
    with _running("proxy", "--port", "0", *named, *options, max_open_files=max_open_files) as command:
        yield command


@contextlib.contextmanager
def _running(*arguments: str, max_open_files: int | None, **environment: str) -> Iterator[Command]:
    command = Command(*arguments, max_open_files=max_open_files, **environment)
    try:
        yield command
    finally:
        command.stop()


class HealthProbe:
    """Asks for /health every `every` seconds, each time on a new connection, while its block runs.

    `worst` is the longest time to an answer in seconds; a connection that fails counts as `GIVE_UP` seconds.
    """

    GIVE_UP = 10.0

    def __init__(self, url: str, every: float = 0.05) -> None:
        self.times: list[float] = []
        self._url, self._every, self._end = url, every, threading.Event()
        self._thread = threading.Thread(target=self._probe, daemon=True)

    def _probe(self) -> None:
        while not self._end.is_set():
            start = time.perf_counter()
            try:
                httpx.get(f"{self._url}/health", timeout=self.GIVE_UP)
                self.times.append(time.perf_counter() - start)
            except httpx.TransportError:
                self.times.append(self.GIVE_UP)
            self._end.wait(self._every)

    @property
    def worst(self) -> float:
        return max(self.times)

    def __enter__(self) -> HealthProbe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
