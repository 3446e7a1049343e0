"""What the dashboard shows: the state of the proxy once a second, as server-sent events for administrators.

The page itself is static (lmkit/proxy/page). It asks for an admin key, and holds nothing of the proxy.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from lmkit.errors import RequestError
from lmkit.proxy.downstream import DownstreamResponse
from lmkit.proxy.registry import Node, Registry
from lmkit.proxy.router import Router
from lmkit.web.upstream import Upstream, UpstreamError

PAGE = Path(__file__).parent / "page"
MAX_WATCHERS = 16
SECONDS = 1.0  # between two events
ASK_SECONDS = 2.0  # between two looks at the nodes' own metrics, while somebody watches
MAX_METRICS_BYTES = 4 << 20
# The names that lmkit and vLLM have for the same figure.
_FIGURES = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_use": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "queries": ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries"),
    "hits": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits"),
}
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^\n]*\})? ([0-9.eE+-]+)", re.MULTILINE)


class Dashboard:
    """Reads the registry and the router. Nodes are asked for their metrics only while somebody watches."""

    def __init__(self, registry: Registry, router: Router, upstream: Upstream) -> None:
        self._registry, self._router, self._upstream = registry, router, upstream
        self._figures: dict[Node, dict[str, float]] = {}
        self._asked = -ASK_SECONDS
        self._watchers = 0

    def snapshot(self) -> dict[str, Any]:
        nodes = []
        models: dict[str, dict[str, Any]] = {}
        known = {node.url: node for node in self._registry.nodes()}
        for shown in self._registry.status():
            node = known[shown["url"]]
            nodes.append({**shown, "figures": self._figures.get(node, {}), "own_kv_use": node.kv_use or None})
            for name in shown["models"]:
                entry = models.setdefault(name, {"model": name, "nodes": 0, "up": 0, "requests": 0, "failed": 0})
                entry["nodes"] += 1
                entry["up"] += shown["healthy"]
            for (name, status), count in node.answers.items():
                if name in models:
                    models[name]["requests"] += count
                    models[name]["failed"] += count if status >= 500 else 0
        return {
            "time": time.time(),
            "policy": self._router.policy,
            "nodes": nodes,
            "models": sorted(models.values(), key=lambda entry: entry["model"]),
            "decisions": [decision._asdict() for decision in self._router.recent],
        }

    async def stream(self, response: DownstreamResponse, ended: Callable[[], bool]) -> None:
        """Send snapshots until the client leaves, or the proxy drains."""
        if self._watchers >= MAX_WATCHERS:
            raise RequestError("queue_full", f"{MAX_WATCHERS} dashboards are open already")
        self._watchers += 1
        try:
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            await response.start(200, headers, events=True)
            while not ended():
                await self._ask_nodes()
                await response.write(b"data: " + msgspec.json.encode(self.snapshot()) + b"\n\n")
                await asyncio.sleep(SECONDS)
            await response.end()
        finally:
            self._watchers -= 1

    async def _ask_nodes(self) -> None:
        if time.monotonic() - self._asked < ASK_SECONDS:
            return
        self._asked = time.monotonic()
        nodes = [node for node in self._registry.nodes() if node.healthy]
        found = await asyncio.gather(*map(self._ask, nodes))
        self._figures = dict(zip(nodes, found, strict=True))

    async def _ask(self, node: Node) -> dict[str, float]:
        """The figures of a node's /metrics; those that it does not have are left out."""
        headers = [(b"accept-encoding", b"identity")]
        if node.config.api_key is not None:
            headers.append((b"authorization", b"Bearer " + node.config.api_key.encode()))
        try:
            async with asyncio.timeout(SECONDS):
                answer = await self._upstream.send("GET", f"{node.url}/metrics", headers)
                try:
                    body = await answer.body(MAX_METRICS_BYTES)
                finally:
                    answer.close()
        except (TimeoutError, UpstreamError):
            return {}
        return figures(body.decode("utf-8", "replace")) if body and answer.status == 200 else {}


def figures(text: str) -> dict[str, float]:
    """Those of _FIGURES in Prometheus' text, summed over models; the use of the KV cache is the largest one."""
    found: dict[str, float] = {}
    names = {name: figure for figure, known in _FIGURES.items() for name in known}
    for name, value in _SAMPLE.findall(text):
        if (figure := names.get(name)) is None:
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        found[figure] = max(found.get(figure, 0.0), number) if figure == "kv_use" else found.get(figure, 0.0) + number
    return found
