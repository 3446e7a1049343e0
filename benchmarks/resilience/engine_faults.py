"""Engines that hang or die, and packed weights that are damaged: clients are told, and the server is whole again."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.resilience.case import Case, Setting, shared
from benchmarks.resilience.processes import Command, serving
from lmkit.formats.hub import resolve_model_path
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, StepOutput

STEP_TIMEOUT = 2  # seconds
GIVE_UP = 120.0  # seconds
HANGING = "never"  # the session whose request makes a step that never ends
PROMPT: dict[str, Any] = {"model": "model", "prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0}
ENDLESS = PROMPT | {"max_tokens": 3000, "ignore_eos": True, "stream": True}


class HangingEngine(Engine):
    """The engine, with a step that never ends once a request asks for it."""

    _hangs = False

    def add(self, request: Request) -> None:
        self._hangs |= request.session_id == HANGING
        super().add(request)

    def step(self) -> list[StepOutput]:
        while self._hangs:
            time.sleep(1)
        return super().step()


def answer(server: Command) -> str | None:
    """The answer to PROMPT, or None if the server gives none now."""
    with contextlib.suppress(httpx.TransportError):
        response = httpx.post(f"{server.url}/v1/completions", json=PROMPT, timeout=GIVE_UP)
        if response.status_code == 200:
            return str(response.json()["choices"][0]["text"])
    return None


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + GIVE_UP
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError("it did not happen in time")
        time.sleep(0.02)


def recovery(server: Command, attack: Callable[[], None], **fields: Any) -> float:
    """Seconds from the attack until the stream that ran has its error event and the server answers again."""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=ENDLESS | fields, timeout=GIVE_UP) as stream:
        lines = (line for line in stream.iter_lines() if line)
        if not fields:
            next(lines)
        start = time.monotonic()
        attack()
        *_, last = lines
    if "error" not in json.loads(last.removeprefix("data: ")):
        raise RuntimeError(f"the stream ended with {last}")
    until(lambda: answer(server) is not None)
    return time.monotonic() - start


def hung(setting: Setting) -> float:
    """The worst of two recoveries: the engine is stopped, and its step never ends. A deadline is kept meanwhile."""
    engine = f"{__name__}:{HangingEngine.__name__}"
    with serving("--engine", engine, "--step-timeout", str(STEP_TIMEOUT), "--served-model-name", "model") as server:
        stopped = recovery(server, lambda: server.engine().send_signal(signal.SIGSTOP))
        return max(stopped, recovery(server, lambda: None, session_id=HANGING))


@shared
def killed(setting: Setting) -> tuple[float, float]:
    """Seconds until the server answers again without its sockets, and until it has ended without open files."""
    with serving("--served-model-name", "model") as server:

        def kill_and_remove() -> None:
            (sockets,) = {
                Path(str(c.laddr)).parent for c in psutil.Process(server.process.pid).net_connections("unix") if c.laddr
            }
            shutil.rmtree(sockets)
            server.engine().kill()

        recovered = recovery(server, kill_and_remove)
        start = time.monotonic()
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (8, 8))  # what is open stays open
        server.engine().kill()
        status = server.process.wait(GIVE_UP)
        if status != 1 or "Traceback" in server.log:
            raise RuntimeError(f"the server ended with status {status}:\n{server.log}")
        return recovered, time.monotonic() - start


def damaged_weights(setting: Setting) -> float:
    """Seconds from the start of a server on damaged packed weights until it serves those that were packed anew."""
    model = setting.workdir / "model"
    shutil.copytree(resolve_model_path("demo"), model)
    with serving(model=str(model)) as server:
        want = answer(server)
    (packed,) = (model / ".lmkit").glob("*.safetensors")
    data = bytearray(packed.read_bytes())
    for n in range(1, 201):
        data[-n * (len(data) // 300)] ^= 1 << n % 8
    packed.write_bytes(data)
    start = time.monotonic()
    with serving(model=str(model)) as server:
        until(lambda: "its data is damaged" in server.log)
        until(lambda: server.log.count("packing the weights once") == 1 and answer(server) == want)
    return time.monotonic() - start


CASES = (
    Case("engine stopped, step that never ends: until the server answers again", "s", 60, hung),
    Case("engine killed, its sockets removed: until the server answers again", "s", 60, lambda at: killed(at)[0]),
    Case("engine killed, no open files: until the server has ended", "s", 60, lambda at: killed(at)[1]),
    Case("200 wrong bits in packed weights: until they are packed anew", "s", 120, damaged_weights),
)
