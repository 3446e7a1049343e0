"""lmkit's commands as real processes: their addresses, logs, memory, open files, and how long /health takes."""

from __future__ import annotations

import contextlib
import http.client
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import httpx
import psutil

START_SECONDS = 240.0  # kernels may have to be compiled first
STOP_SECONDS = 30.0
KEPT_LOG = 200_000  # characters of a log's end


class Command:
    """A running `lmkit` command. `url` is the address in its line "... on http://..."."""

    def __init__(
        self, *arguments: str, within: tuple[str, ...] = (), max_open_files: int | None = None, **environment: str
    ) -> None:
        """`within` is the beginning of a command that runs another one, as `nice` is."""

        def limit_files() -> None:
            assert max_open_files is not None
            resource.setrlimit(resource.RLIMIT_NOFILE, (max_open_files, max_open_files))

        self.process = subprocess.Popen(
            [*within, sys.executable, "-m", "lmkit", *arguments],
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
    command = Command(*arguments, within=(), max_open_files=max_open_files, **environment)
    try:
        yield command
    finally:
        command.stop()


def until_healthy(proxy: Command, count: int) -> None:
    """Wait until so many nodes of a proxy are healthy."""
    deadline = time.monotonic() + START_SECONDS
    while httpx.get(f"{proxy.url}/health", timeout=10).json()["healthy_nodes"] < count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{count} nodes are not healthy:\n{proxy.log}")
        time.sleep(0.1)


class HealthProbe:
    """Asks for /health every `every` seconds, each time on a new connection, while its block runs.

    It is a process of its own, as a load balancer is: in the process of the clients it would wait for their turns, and
    measure these. `worst` is the longest time to an answer in seconds; a connection that fails counts as `GIVE_UP`
    seconds.
    """

    GIVE_UP = 10.0

    def __init__(self, url: str, every: float = 0.05) -> None:
        processes = multiprocessing.get_context("spawn")
        self.times: list[float] = []
        self._results, theirs = processes.Pipe()
        self._process = processes.Process(target=_probe, args=(url, every, self.GIVE_UP, theirs), daemon=True)

    @property
    def worst(self) -> float:
        return max(self.times)

    def __enter__(self) -> HealthProbe:
        self._process.start()
        self._results.recv()  # it has asked once
        return self

    def __exit__(self, *_: object) -> None:
        self._results.send("end")
        self.times = self._results.recv()
        self._process.join()


def _probe(url: str, every: float, give_up: float, results: Connection) -> None:
    """The process of a `HealthProbe`: it says that it runs, asks until it is told to end, and sends its times."""
    host, port = httpx.URL(url).host, httpx.URL(url).port
    times: list[float] = []
    while not times or not results.poll(every):
        start = time.perf_counter()
        connection = http.client.HTTPConnection(host, port, timeout=give_up)
        try:
            connection.request("GET", "/health")
            connection.getresponse().read()
            times.append(time.perf_counter() - start)
        except (OSError, http.client.HTTPException):
            times.append(give_up)
        finally:
            connection.close()
        if len(times) == 1:
            results.send("running")
    results.recv()
    results.send(times)
