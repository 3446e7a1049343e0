"""Mixed streams through a proxy whose nodes are killed, stopped and drained: none may fail, and none may change."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from benchmarks.resilience.case import Case, Setting
from benchmarks.resilience.processes import Command, routing

KEY = "failover"
CLIENTS = 48  # streams at once
STOPPED_SECONDS = 4.0
LONG = {"model": "demo", "max_tokens": 96, "ignore_eos": True}
TEXT: dict[str, Any] = LONG | {"prompt": "def add(a, b):"}
CHAT: dict[str, Any] = LONG | {"messages": [{"role": "user", "content": "List two numbers."}]}
SHAPE = {"type": "object", "properties": {"a": {"enum": ["left", "right"]}}, "required": ["a"]}
ARGS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": ARGS}}
KINDS: tuple[dict[str, Any], ...] = (
    TEXT | {"temperature": 0},
    TEXT | {"temperature": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    TEXT | {"temperature": 1.0, "logprobs": 2, "echo": True, "n": 2},
    CHAT | {"temperature": 1.0, "logprobs": True, "top_logprobs": 2},
    CHAT | {"temperature": 1.0, "n": 3},
    CHAT | {"temperature": 1.0, "ignore_eos": False,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SHAPE}}},
    CHAT | {"temperature": 1.0, "ignore_eos": False, "tools": [TOOL], "tool_choice": "required"},
)  # fmt: skip


def merged(events: str) -> dict[Any, Any]:
    """What a client has at the end, however the tokens were spread over events. Raises ValueError for an error event.

    Counts of cached tokens are left out: they tell of the node, not of the answer.
    """
    found: dict[Any, Any] = {"done": events.count("data: [DONE]")}
    for line in re.findall(r"^data: (\{.*)$", events, re.MULTILINE):
        chunk = json.loads(line)
        if "error" in chunk:
            raise ValueError(line)
        found["head"] = [chunk[name] for name in ("id", "created", "model", "system_fingerprint")]
        if chunk.get("usage"):
            found["usage"] = chunk["usage"] | {"prompt_tokens_details": None}
        for choice in chunk["choices"]:
            _merge(found, (choice.pop("index"),), choice)
    return found


def _merge(found: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    if isinstance(value, dict) and path[-1] != "top_logprobs":
        for name, item in value.items():
            _merge(found, (*path, name), item)
    elif path[-1] == "tool_calls":
        for call in value:
            _merge(found, (*path, call.pop("index")), call)
    elif isinstance(value, list | str) and path in found:
        found[path] += value
    elif value is not None:
        found[path] = value


def replica(*options: str, within: tuple[str, ...] = ()) -> Command:
    return Command("serve", "demo", "--api-key", f"{KEY} role=proxy", *options, within=within)


class Replicas:
    """Servers of the demo model at fixed ports, and what befalls them."""

    def __init__(self, count: int) -> None:
        with ThreadPoolExecutor(count) as pool:
            self.nodes = list(pool.map(lambda _: self._start(0), range(count)))

    def _start(self, port: int) -> Command:
        return replica("--port", str(port))

    def kill(self, number: int) -> None:
        """A node dies at once, and another starts in its place."""
        old = self.nodes[number]
        self._signal(old, signal.SIGKILL)
        old.process.wait()
        self.nodes[number] = self._start(old.address[1])

    def pause(self, number: int) -> None:
        """A node falls silent for a while."""
        self._signal(self.nodes[number], signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)
        self._signal(self.nodes[number], signal.SIGCONT)

    def drain(self, number: int) -> None:
        self.nodes[number].process.send_signal(signal.SIGTERM)

    @staticmethod
    def _signal(node: Command, number: int) -> None:
        for pid in (node.process.pid, *(child.pid for child in node.children())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.stop()


def lost_streams(setting: Setting) -> float:
    """Streams that fail, or that are not the stream of a calm run. At least one must have gone on elsewhere."""
    with Replicas(2 if setting.quick else 4) as replicas:
        strikes: list[Callable[[], None]] = [lambda: replicas.kill(0), lambda: replicas.drain(1)]
        if not setting.quick:
            strikes[1:1] = [lambda: replicas.kill(1), lambda: replicas.pause(2)]
            strikes[-1] = lambda: replicas.drain(3)
        return lost(setting, replicas.nodes, strikes, 42 if setting.quick else 500)


def lost(setting: Setting, nodes: list[Command], strikes: list[Callable[[], None]], count: int) -> float:
    """Send `count` streams through a proxy in front of the nodes, see `struck`."""
    file = setting.workdir / "proxy.yaml"
    entries = [f"  - {{url: {node.url}, models: [demo], api_key: {KEY}}}" for node in nodes]
    checks = ["policy: round_robin", "health_interval: 0.5", "health_timeout: 1", "nodes:"]
    file.write_text("\n".join([*checks, *entries]) + "\n")
    with routing(options=("--config", str(file))) as proxy:
        return struck(proxy, strikes, count)


def struck(proxy: Command, strikes: list[Callable[[], None]], count: int) -> float:
    """Send `count` streams to a proxy, whose log is that of the command. The strikes are spread over the run.

    Returns how many fail, or differ from the stream of a calm run.
    """
    bodies = [body | {"seed": seed} for seed in (1, 2) for body in KINDS]
    with ThreadPoolExecutor(CLIENTS) as pool:
        calm = list(pool.map(lambda body: _stream(proxy, body), bodies))
        ended = threading.Semaphore(0)

        def one(number: int) -> bool:
            same = calm[number % len(bodies)] == _stream(proxy, bodies[number % len(bodies)])
            ended.release()
            return same

        runs = [pool.submit(one, number) for number in range(count)]
        for strike in strikes:
            for _ in range(count // (len(strikes) + 2)):
                ended.acquire()
            strike()
        failed = [run for run in runs if not run.result()]
    if None in calm or "broke off" not in proxy.log:
        raise RuntimeError("the calm run failed, or no stream was hit, so the case would show nothing")
    return float(len(failed))


def _stream(proxy: Command, body: dict[str, Any]) -> dict[Any, Any] | None:
    """What the client has at the end. None: the stream failed."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    try:
        answer = httpx.post(proxy.url + path, json=asked, timeout=120.0).raise_for_status()
        found = merged(answer.text)
    except (httpx.HTTPError, ValueError):
        return None
    return {name: value for name, value in found.items() if name != "head" and name[-1] != "id"}


CASES = (Case("nodes killed, stopped, drained: streams that fail or change", "", 0, lost_streams),)
