"""Keys with limits: requests that say less than they use, clients that leave early, and nodes that tell nonsense."""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple

import httpx

from benchmarks.resilience.case import Case, Setting, shared
from benchmarks.resilience.fake_node import FakeNode, fake_node
from benchmarks.resilience.processes import Command, routing, serving, until_healthy

ADMIN = {"Authorization": "Bearer admin-key-of-the-proxy"}
LIMIT = 1500  # tokens of a key
READ = 0.95  # of a stream's text, before its client leaves
ABSURD = (1 << 63) - 808  # tokens; the sum of two is none that SQLite has
SETTLE_SECONDS = 20.0
CHAT = [{"role": "user", "content": "hi"}]
MORE: dict[str, Any] = {"ignore_eos": True}
NATIVE: dict[str, Any] = {"max_new_tokens": 300, "ignore_eos": True}
HONEST = "/v1/completions", {"prompt": "hi", "max_tokens": 50} | MORE
# Each uses more than LIMIT if it is let through.
CHEATS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "hi", "max_tokens": 3000.0} | MORE),
    ("/v1/chat/completions", {"messages": CHAT, "n": 16.0, "max_tokens": 300} | MORE),
    ("/v1/completions", {"prompt": ["hi"] * 64, "max_tokens": 300} | MORE),
    ("/generate", {"text": "hi", "max_tokens": 1, "sampling_params": NATIVE | {"max_new_tokens": 3000}}),
    ("/v1/completions", {"prompt": "hi", "n": 16.0, "max_tokens": 400} | MORE),
    ("/v1/completions", {"prompt": [[1, 2]] * 64, "max_tokens": 300} | MORE),
    ("/v1/completions", {"prompt": "hi", "best_of": 16.0, "max_tokens": 300} | MORE),
    ("/v1/chat/completions", {"messages": CHAT, "max_completion_tokens": 3000.0} | MORE),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 3000.0, "store": False} | MORE),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 3000.0} | MORE),
    ("/generate", {"text": ["hi"] * 64, "sampling_params": NATIVE}),
    ("/generate", {"input_ids": [[1, 2]] * 64, "sampling_params": NATIVE}),
    ("/generate", {"text": "hi", "sampling_params": NATIVE | {"n": 16.0}}),
    ("/completion", {"prompt": "hi", "n_predict": 3000.0} | MORE),
    ("/api/generate", {"prompt": "hi", "stream": False, "options": {"num_predict": 3000.0}}),
)
STREAMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/responses", {"input": "hi", "max_output_tokens": 600, "store": False} | MORE),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 600} | MORE),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 600} | MORE),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 600} | MORE),
    ("/generate", {"text": "hi", "sampling_params": NATIVE | {"max_new_tokens": 600}}),
)


class Key(NamedTuple):
    """A key of the proxy's store."""

    proxy: Command
    id: str
    headers: dict[str, str]

    @classmethod
    def make(cls, proxy: Command, **limits: int) -> Key:
        named = {"name": "till", "limits": {f"{kind}/total": most for kind, most in limits.items()}}
        made = httpx.post(f"{proxy.url}/admin/keys", json=named, headers=ADMIN).raise_for_status().json()
        return cls(proxy, made["id"], {"Authorization": f"Bearer {made['key']}"})

    def used(self) -> dict[str, int]:
        listed = httpx.get(f"{self.proxy.url}/admin/keys", headers=ADMIN).raise_for_status().json()["data"]
        used: dict[str, int] = next(key for key in listed if key["id"] == self.id)["used"]["total"]
        return used

    def ask(self, path: str, body: dict[str, Any]) -> int:
        """The answer's status."""
        body = {"model": "demo"} | body
        return httpx.post(self.proxy.url + path, json=body, headers=self.headers, timeout=120).status_code


class Figures(NamedTuple):
    overspent: float  # the most that a key used, as a share of its limit
    for_nothing: float  # the largest share of a stream's text that its client did not pay for
    refused: float  # requests and restarts that fail after a node has told an absurd usage


@shared
def figures(setting: Setting) -> Figures:
    with serving("--kv-memory", "256M") as server, fake_node(("odd", "even"), _absurd) as odd:
        file = setting.workdir / "proxy.yaml"
        file.write_text(json.dumps({
            "admin_keys": [ADMIN["Authorization"].removeprefix("Bearer ")],
            "key_store": "keys.db",
            "prices": {"*": {"input": 1, "output": 1}},
            "nodes": [{"url": server.url}, {"url": odd.url}],
        }))  # fmt: skip
        options = ("--config", str(file))
        with routing(options=options) as proxy:
            until_healthy(proxy, 2)
            if not _overspent(proxy, *HONEST):
                raise RuntimeError("an honest request uses nothing, so the case would show nothing")
            overspent = max(_overspent(proxy, *cheat) for cheat in CHEATS[: 4 if setting.quick else None])
            for_nothing = max(_for_nothing(proxy, server, *asked) for asked in STREAMS[: 2 if setting.quick else None])
            key = Key.make(proxy)
            refused = _told_nonsense(key, odd)
        with routing(options=options) as proxy:  # on the store that has what it was told
            until_healthy(proxy, 2)
            refused += key._replace(proxy=proxy).ask(*STREAMS[2]) != 200
    return Figures(overspent, for_nothing, refused)


def _absurd() -> dict[str, int]:
    return {"prompt_tokens": 1, "completion_tokens": ABSURD, "total_tokens": 3}


def _overspent(proxy: Command, path: str, body: dict[str, Any]) -> float:
    key = Key.make(proxy, tokens=LIMIT)
    if (status := key.ask(path, body)) >= 500:
        raise RuntimeError(f"{path} {body}: status {status}")
    return key.used()["tokens"] / LIMIT


def _for_nothing(proxy: Command, server: Command, path: str, body: dict[str, Any]) -> float:
    key = Key.make(proxy)
    asked = {"model": "demo", "stream": True} | body
    whole = httpx.post(server.url + path, json=asked | {"stream": True}, timeout=120).raise_for_status()
    length, text = sum(map(len, map(_text, whole.text.splitlines()))), ""
    with httpx.stream("POST", proxy.url + path, json=asked, headers=key.headers, timeout=120) as stream:
        for line in stream.iter_lines():
            text += _text(line)
            if len(text) >= READ * length:
                break
    deadline = time.monotonic() + SETTLE_SECONDS
    while not (charged := key.used())["requests"] and time.monotonic() < deadline:
        time.sleep(0.1)
    tokens = httpx.post(f"{server.url}/tokenize", json={"model": "demo", "prompt": text}).raise_for_status().json()
    return max(0.0, 1 - charged["tokens"] / len(tokens["tokens"]))


def _text(line: str) -> str:
    """The text of an answer's event, whatever the route."""
    if not line.startswith("data: {"):
        return ""
    event = json.loads(line.removeprefix("data: "))
    delta = event.get("delta")
    if isinstance(delta, str):
        return delta
    if isinstance(delta, dict):
        return str(delta.get("text", ""))
    parts = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in event.get("choices", ())]
    return "".join(parts) or ("meta_info" in event and event["text"]) or ""


def _told_nonsense(key: Key, odd: FakeNode) -> float:
    """How many requests for an honest node, and for what is kept, fail then."""
    for model in ("odd", "even"):
        key.ask("/v1/completions", {"model": model, "prompt": "x", "max_tokens": 5})
    if len(odd.seen) != 2:
        raise RuntimeError("the node was not asked, so the case would show nothing")
    paths = ("/admin/keys", "/admin/usage", "/metrics")
    statuses = [httpx.get(key.proxy.url + path, headers=ADMIN).status_code for path in paths]
    return float(sum(status != 200 for status in (*statuses, key.ask(*STREAMS[2]))))


CASES = (
    Case("odd numbers and lists: a key's use, of its limit", "", 1.0, lambda at: figures(at).overspent),
    Case("streams left before their end: share that is not charged", "", 0.3, lambda at: figures(at).for_nothing),
    Case("a node tells 2^63 tokens: what fails then, a restart as well", "", 0, lambda at: figures(at).refused),
)
