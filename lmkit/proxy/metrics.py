"""Prometheus metrics of a proxy. Labels come only from nodes and models that an administrator let in."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from lmkit.proxy.accounts.store import Charge
from lmkit.proxy.breaker import State
from lmkit.proxy.registry import Held, Registry
from lmkit.proxy.retries import RetryBudget
from lmkit.web.auth import ApiKey

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_BREAKER: tuple[State, ...] = ("closed", "half-open", "open")


class Metrics:
    """Counters of the proxy itself. A node's figures are read from the registry, so they disappear with the node."""

    def __init__(self, registry: Registry, retries: RetryBudget) -> None:
        self._own = CollectorRegistry()
        self.refused = Counter(
            "lmkit_proxy_errors", "Errors the proxy itself answered, by their code", ["code"], registry=self._own
        )
        self.disconnects = Counter(
            "lmkit_proxy_client_disconnects", "Clients that left before their response ended", registry=self._own
        )
        self.shadows = Counter(
            "lmkit_proxy_shadows", "Copies of requests: answered, failed, left_out", ["outcome"], registry=self._own
        )
        self.pairs = Counter(
            "lmkit_proxy_pairs", "Prompts for prefill nodes: paired, left_out", ["outcome"], registry=self._own
        )
        self.first_byte = Histogram(
            "lmkit_proxy_first_byte_seconds",
            "From choosing a node to its first byte",
            buckets=_SECONDS,
            registry=self._own,
        )
        self.tokens = Counter(
            "lmkit_proxy_tokens",
            "Tokens of keys of the key_store, by model and kind; cached is a part of input",
            ["model", "kind"],
            registry=self._own,
        )
        self._own.register(_Retries(retries))
        self._registry = registry

    def charged(self, charge: Charge) -> None:
        for kind, count in charge.usage._asdict().items():
            self.tokens.labels(charge.model, kind).inc(count)

    def response(self, key: ApiKey | None) -> Response:
        """What a key may see. Addresses of nodes are for operators, and where nobody needs a key."""
        text = self.render(addresses=key is None or key.role in ("admin", "metrics"))
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    def render(self, *, addresses: bool = True) -> bytes:
        """Without `addresses`, nodes have their ids instead."""
        return generate_latest(self._own) + generate_latest(_Nodes(self._registry, addresses=addresses))


class _Retries(Collector):
    def __init__(self, retries: RetryBudget) -> None:
        self._retries = retries

    def collect(self) -> Iterable[Metric]:
        done = CounterMetricFamily(
            "lmkit_proxy_retries", "Requests sent once more, and those that the budget refused", labels=["outcome"]
        )
        done.add_metric(["sent"], self._retries.spent)
        done.add_metric(["refused"], self._retries.refused)
        left = GaugeMetricFamily("lmkit_proxy_retry_budget", "Retries that the budget allows now", self._retries.left)
        return (done, left)


class _Nodes(Collector):
    def __init__(self, registry: Registry, *, addresses: bool) -> None:
        self._registry, self._addresses = registry, addresses

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("lmkit_proxy_node_up", "1 for a healthy node", labels=["node"])
        busy = GaugeMetricFamily("lmkit_proxy_node_in_flight", "Requests a node is answering", labels=["node"])
        answers = CounterMetricFamily(
            "lmkit_proxy_requests", "Responses of a node, by model and status", labels=["node", "model", "status"]
        )
        failovers = CounterMetricFamily(
            "lmkit_proxy_failovers", "Requests that went on from a node to another", labels=["node"]
        )
        breaks = CounterMetricFamily("lmkit_proxy_breaks", "Responses of a node that broke off", labels=["node"])
        breaker = GaugeMetricFamily(
            "lmkit_proxy_breaker", "A node's breaker: 0 closed, 1 half-open, 2 open", labels=["node"]
        )
        opened = CounterMetricFamily("lmkit_proxy_breaker_opened", "How often a breaker opened", labels=["node"])
        ejected = CounterMetricFamily(
            "lmkit_proxy_ejections", "How often a node was ejected as an outlier", labels=["node"]
        )
        weight = GaugeMetricFamily("lmkit_proxy_node_weight", "A node's weight, less while it starts", labels=["node"])
        ramping = self._registry.ramps([node for node in self._registry.nodes() if node.healthy])
        for node in self._registry.nodes():
            name = node.url if self._addresses else node.id
            ejected.add_metric([name], node.ejections)
            weight.add_metric([name], node.config.weight * ramping.get(node, 1.0))
            up.add_metric([name], node.healthy)
            busy.add_metric([name], node.in_flight)
            failovers.add_metric([name], node.failovers)
            breaks.add_metric([name], node.breaks)
            breaker.add_metric([name], _BREAKER.index(node.breaker.state))
            opened.add_metric([name], node.breaker.opened)
            for (model, status), count in node.answers.items():
                answers.add_metric([name, model, str(status)], count)
        held = GaugeMetricFamily(
            "lmkit_proxy_held_requests", "Requests that wait until a node for their model comes", labels=["model"]
        )
        for model in {*self._registry.on_demand, *self._registry.held}:
            held.add_metric([model], self._registry.held.get(model, Held()).requests)
        return (held, up, busy, answers, failovers, breaks, breaker, opened, ejected, weight)
