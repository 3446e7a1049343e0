"""Mixed streams through a proxy whose nodes are killed, stopped and drained: none may fail, and none may change."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from benchmarks.resilience.case import Case, NothingHitError, Setting
from benchmarks.resilience.processes import Command, routing

KEY = "failover"
CLIENTS = 48  # streams at once
STOPPED_SECONDS = 4.0
TLS = httpx.create_ssl_context()  # made anew for each stream it would take most of the clients' time
LONG = {"model": "demo", "max_tokens": 96, "ignore_eos": True}
TEXT: dict[str, Any] = LONG | {"prompt": "def add(a, b):"}
CHAT: dict[str, Any] = LONG | {"messages": [{"role": "user", "content": "List two numbers."}]}
SHAPE = {"type": "object", "properties": {"a": {"enum": ["left", "right"]}}, "required": ["a"]}
ARGS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": ARGS}}
NATIVE: dict[str, Any] = {"text": "def add(a, b):", "max_new_tokens": 96, "ignore_eos": True, "temperature": 1.0}
RESPONSES: dict[str, Any] = {"input": "List two numbers.", "max_output_tokens": 96}
MESSAGES: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Two numbers?"}]}],
    "max_tokens": 96,
    "stop_sequences": ["@@"],
}
KINDS: tuple[dict[str, Any], ...] = (
    TEXT | {"temperature": 0},
    TEXT | {"temperature": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    TEXT | {"temperature": 1.0, "logprobs": 2, "echo": True, "n": 2},
    CHAT | {"temperature": 1.0, "logprobs": True, "top_logprobs": 2},
    CHAT | {"temperature": 1.0, "n": 3},
    CHAT | {"temperature": 1.0, "ignore_eos": False,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SHAPE}}},
    CHAT | {"temperature": 1.0, "ignore_eos": False, "tools": [TOOL], "tool_choice": "required"},
    {"model": "demo"} | NATIVE,
    {"model": "demo", "temperature": 1.0} | RESPONSES,
    {"model": "demo", "temperature": 1.0} | MESSAGES,
)  # fmt: skip


def path_of(body: dict[str, Any]) -> str:
    """The route that a body is for."""
    if "stop_sequences" in body:
        return "/v1/messages"
    routes = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/responses"}
    return next((route for field, route in routes.items() if field in body), "/generate")


def asked(body: dict[str, Any]) -> dict[str, Any]:
    """The body as it is sent: a stream that tells its usage."""
    path, extra = path_of(body), {}
    if path.endswith("/completions"):
        extra = {"stream_options": {"include_usage": True}}
    return body | {"stream": True} | extra


def merged(events: str) -> dict[Any, Any]:
    """What a client has at the end, however the tokens were spread over events. Raises ValueError for an error event.

    Counts of cached tokens are left out: they tell of the node, not of the answer.
    """
    found: dict[Any, Any] = {"done": events.count("data: [DONE]")}
    for place, line in enumerate(re.findall(r"^data: (\{.*)$", events, re.MULTILINE)):
        chunk = json.loads(line)
        if "error" in chunk:
            raise ValueError(line)
        if "type" in chunk:
            if chunk.pop("sequence_number", place) != place:
                raise ValueError(line)
            _append(found.setdefault("events", []), chunk)
            continue
        if "meta_info" in chunk:
            about = chunk.pop("meta_info") | {"cached_tokens": 0, "steps": 0}
            _merge(found, (chunk.pop("index"),), chunk | {n: v for n, v in about.items() if isinstance(v, list)})
            found["about", about["id"]] = {n: v for n, v in about.items() if not isinstance(v, list)}
            continue
        found["head"] = [chunk[name] for name in ("id", "created", "model", "system_fingerprint")]
        if chunk.get("usage"):
            found["usage"] = chunk["usage"] | {"prompt_tokens_details": None}
        for choice in chunk["choices"]:
            _merge(found, (choice.pop("index"),), choice)
    return found


def _append(events: list[dict[str, Any]], new: dict[str, Any]) -> None:
    """Add an event of the Responses or Messages API. Deltas that follow each other become one."""
    new = _same_everywhere(new)
    if new["type"] == "message_start":  # tokens so far; how many came with the first event is chance
        new["message"]["usage"]["output_tokens"] = 0
    last: dict[str, Any] = events[-1] if events else {"type": ""}
    delta = new.get("delta")
    if isinstance(delta, str) and last["type"] == new["type"]:
        last["delta"] += delta
    elif new["type"] == last["type"] == "content_block_delta" and last["delta"].keys() == new["delta"].keys():
        last["delta"] = {k: v if k == "type" else last["delta"][k] + v for k, v in new["delta"].items()}
    else:
        events.append(new)


def _same_everywhere(value: Any) -> Any:
    """Without what depends on the node and the time: cached tokens, and when the answer ended."""
    if isinstance(value, dict):
        without = {"completed_at", "cached_tokens", "cache_read_input_tokens"}
        if "cache_read_input_tokens" in value:
            value = value | {"input_tokens": value["input_tokens"] + value["cache_read_input_tokens"]}
        return {name: _same_everywhere(item) for name, item in value.items() if name not in without}
    return [_same_everywhere(item) for item in value] if isinstance(value, list) else value


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

    def restart(self, number: int) -> None:
        """A node drains and ends, and another starts in its place."""
        old = self.nodes[number]
        old.stop()
        self.nodes[number] = self._start(old.address[1])

    def kill_engine(self, number: int) -> None:
        """A node starts its engine again."""
        self.nodes[number].engine().kill()

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
            body, expected = bodies[number % len(bodies)], calm[number % len(bodies)]
            got = _stream(proxy, body)
            ended.release()
            if got is not None and got != expected:
                print(f"{path_of(body)} changed:\n  {expected}\n  {got}", file=sys.stderr)
            return got == expected

        runs = [pool.submit(one, number) for number in range(count)]
        for strike in strikes:
            for _ in range(count // (len(strikes) + 2)):
                ended.acquire()
            strike()
        failed = [run for run in runs if not run.result()]
    if None in calm:
        raise RuntimeError("the calm run failed, so the case would show nothing")
    if "broke off" not in proxy.log:
        raise NothingHitError("no stream was hit, so the case would show nothing")
    return float(len(failed))


def _stream(proxy: Command, body: dict[str, Any]) -> dict[Any, Any] | None:
    """What the client has at the end. None: the stream failed."""
    try:
        answer = httpx.post(proxy.url + path_of(body), json=asked(body), timeout=120.0, verify=TLS).raise_for_status()
        found = merged(answer.text)
    except (httpx.HTTPError, ValueError) as error:
        print(f"{path_of(body)} failed: {error}", file=sys.stderr)
        return None
    kept = {name: value for name, value in found.items() if name != "head" and name[-1] != "id" and name[0] != "about"}
    without: dict[Any, Any] = _without_ids(kept)
    return without


def _without_ids(value: Any) -> Any:
    """Two runs of a body have other ids and times."""
    if isinstance(value, dict):
        named = {"id", "item_id", "call_id", "created_at"}
        return {name: _without_ids(item) for name, item in value.items() if name not in named}
    return [_without_ids(item) for item in value] if isinstance(value, list) else value


CASES = (Case("nodes killed, stopped, drained: streams that fail or change", "", 0, lost_streams),)
