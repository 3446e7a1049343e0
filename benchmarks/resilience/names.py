"""Names that reach where they should not: adapters' paths, other sites' hosts, and other owners' models."""

from __future__ import annotations

import json
from typing import NamedTuple

import httpx

from benchmarks.resilience.case import Case, Setting, shared
from benchmarks.resilience.fake_node import FakeNode, fake_node
from benchmarks.resilience.processes import Command, routing, serving, until_healthy

PATHS = ("ok\0x", "a" * 300, "a/" * 2000, "\udcff", "ok\n", "\u00e9" * 200, "../../etc", "a\\b", "C:x", " ", ".")
ROUTES: tuple[tuple[str, str, object], ...] = (
    ("GET", "/", None),
    ("GET", "/v1/models", None),
    ("GET", "/metrics", None),
    ("GET", "/v1/files", None),
    ("GET", "/admin/nodes", None),
    ("POST", "/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 1}),
    ("POST", "/sleep", {}),
    ("POST", "/reload", {}),
)
RIGHT, WRONG, USER = "node-key-of-the-owner", "node-key-of-another", "key-of-the-user"


class Names(NamedTuple):
    adapters: float  # names of adapters for which the engine ends, or that are no client's mistake
    hosts: float  # requests of pages of other sites that are answered


@shared
def names(setting: Setting) -> Names:
    folder = setting.workdir / "adapters"
    (folder / "ok").mkdir(parents=True)
    with serving("--kv-memory", "64M", "--adapter-root", str(folder)) as server, routing(server.url) as proxy:
        until_healthy(proxy, 1)
        engine = server.engine().pid
        adapters = sum(not 400 <= _load(server, path) <= 499 for path in PATHS[: 4 if setting.quick else None])
        ended = not [child for child in server.children() if child.pid == engine]
        return Names(float(adapters + ended), float(_answered(server) + _answered(proxy)))


def _load(server: Command, path: str) -> int:
    data = json.dumps({"lora_name": "x", "lora_path": path})
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{server.url}/v1/load_lora_adapter", content=data, headers=headers, timeout=60).status_code


def _answered(command: Command) -> int:
    """Requests that are answered to a page whose name was given the address of this machine (DNS rebinding)."""
    port = command.address[1]
    page = {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}", "Sec-Fetch-Site": "same-origin"}
    own = httpx.get(f"{command.url}/v1/models").status_code
    if own != 200:
        raise RuntimeError(f"its own name gets {own}, so the case would show nothing")
    return sum(
        httpx.request(method, command.url + path, json=body, headers=page, timeout=30).status_code < 400
        for method, path, body in ROUTES
    )


def taken_over(setting: Setting) -> float:
    """Prompts that the node of another owner reads, while the model's own node restarts and when it is there again."""
    keys = [USER, f"{RIGHT} role=node", f"{WRONG} role=node"]
    file = setting.workdir / "proxy.yaml"
    file.write_text(json.dumps({"api_keys": keys, "node_wait": 0, "state_file": "state.json"}))
    with fake_node(("m",)) as own, fake_node(("m",)) as other, routing(options=("--config", str(file))) as proxy:
        if not _announce(proxy, own, RIGHT) == _ask(proxy) == 200:
            raise RuntimeError("the right node gets no request, so the case would show nothing")
        _announce(proxy, own, RIGHT, state="leaving")
        _announce(proxy, other, WRONG, lease_seconds=3600)
        _ask(proxy)
        back = _announce(proxy, own, RIGHT)
        for _ in range(4):
            _ask(proxy)
        return float(len(other.seen) + (back != 200))


def _announce(proxy: Command, node: FakeNode, key: str, **fields: object) -> int:
    body = {"port": node.port, "models": {"m": "weights"}, "instance": key} | fields
    return httpx.post(f"{proxy.url}/nodes", json=body, headers={"Authorization": f"Bearer {key}"}).status_code


def _ask(proxy: Command) -> int:
    body = {"model": "m", "prompt": "a secret", "max_tokens": 1}
    headers = {"Authorization": f"Bearer {USER}"}
    return httpx.post(f"{proxy.url}/v1/completions", json=body, headers=headers, timeout=30).status_code


CASES = (
    Case("odd paths of adapters: engines that end, and other faults", "", 0, lambda at: names(at).adapters),
    Case("pages of other sites (DNS rebinding): requests answered", "", 0, lambda at: names(at).hosts),
    Case("a model's name while its node restarts: prompts that another owner reads", "", 0, taken_over),
)
