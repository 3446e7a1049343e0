"""The proxy as an ASGI application: its routes, their roles, and the edge that turns errors into responses."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qs

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lmkit.errors import RequestError, unknown_model
from lmkit.log import get_logger
from lmkit.proxy import kept, metrics, ollama
from lmkit.proxy.accounts import routes as accounts
from lmkit.proxy.accounts.ledger import Ledger
from lmkit.proxy.accounts.tap import Tap, charged
from lmkit.proxy.announce import Announcement, registration
from lmkit.proxy.asked import read_asked
from lmkit.proxy.auth import Access, Keys, authorize
from lmkit.proxy.call import Call
from lmkit.proxy.config import FORMS, ProxyConfig, Registration, node_url
from lmkit.proxy.config import ROUTES as ROUTES_OF_NODES
from lmkit.proxy.continuing import respond
from lmkit.proxy.dashboard import Dashboard
from lmkit.proxy.dispatch import Dispatcher
from lmkit.proxy.downstream import DownstreamResponse, holding
from lmkit.proxy.fleet import Fleet
from lmkit.proxy.forward import Forwarder
from lmkit.proxy.health import HealthChecker
from lmkit.proxy.journal import Journal
from lmkit.proxy.node_client import node_client
from lmkit.proxy.pairs import Pairs
from lmkit.proxy.registry import Registry
from lmkit.proxy.reload import ConfigFile
from lmkit.proxy.retries import RetryBudget
from lmkit.proxy.router import Router, Routing
from lmkit.proxy.stop import Stop
from lmkit.proxy.stored import CHATS
from lmkit.proxy.transcripts import Transcripts
from lmkit.web import anthropic_models
from lmkit.web.access_log import note, note_error
from lmkit.web.auth import ApiKey, id_of, named_client
from lmkit.web.budget import Budget
from lmkit.web.errors import method_not_allowed, public_error
from lmkit.web.form import Form
from lmkit.web.receive import decode_json, read_body, while_connected
from lmkit.web.routes import is_known_elsewhere, not_found

log = get_logger(__name__)
MAX_ADMIN_BODY = 1 << 20
_MODEL_PREFIX = "/v1/models/"


class Exchange(NamedTuple):
    """One request and the response to it."""

    scope: Scope
    receive: Receive
    response: DownstreamResponse
    key: ApiKey | None  # None: the route needs none
    tap: Tap


class Route(NamedTuple):
    access: Access
    handler: Callable[[Proxy, Exchange], Awaitable[None]]


class Proxy:
    """`async with Proxy(config) as proxy` checks the nodes for as long as the block runs.

    Raises ConfigError for a damaged state file.
    """

    def __init__(self, config: ProxyConfig, file: ConfigFile | None = None) -> None:
        """`file` is where `config` stands; nodes, rules and the policy follow its changes."""
        self.config, self.file = config, file
        self.ledger = Ledger(Path(config.key_store)) if config.key_store else None
        self.transcripts = Transcripts(config.data_dir, config.max_body_bytes) if config.data_dir else None
        self.keys = Keys.of(config.api_keys, config.admin_keys, self.ledger)
        self.registry = Registry(config)
        self.fleet = Fleet(config, self.registry)
        self.retries = RetryBudget(config.retry_share, config.max_in_flight, lambda: self.registry.clock())
        self.metrics = metrics.Metrics(self.registry, self.retries)
        if self.ledger is not None:
            self.ledger.on_charge = self.metrics.charged
            self.ledger.prices, self.ledger.ask_usage = config.prices, config.ask_usage
        self.draining = False
        self.stop = Stop()  # when set, running responses are broken off
        self.active = 0  # forwarded requests, from their first body byte on
        self._upstream = node_client(config)
        self.health = HealthChecker(self.registry, self._upstream, config)
        self._bodies = Budget(config.body_memory, what="bodies of requests")
        self._router = Router(self.registry, config)
        pairs = Pairs(self.registry, self._upstream, self.metrics, self._router, config)
        self._forwarder = Forwarder(self.registry, self._upstream, self.metrics, self._router, self.retries, pairs)
        self._dispatcher = Dispatcher(self._forwarder, self._bodies, self.metrics, config.max_shadows)
        self._dashboard = Dashboard(self.registry, self._router, self._upstream)
        self.checked = asyncio.Event()  # every node has been asked once
        self.checks: asyncio.Task[None] | None = None  # ends only by an error, or with the block

    async def __aenter__(self) -> Self:
        if self.ledger is not None:
            await self.ledger.__aenter__()
        self.checks = asyncio.create_task(self._check_forever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.checks is not None
        self.checks.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.checks
        await self._dispatcher.close()
        await self._upstream.close()
        if self.transcripts is not None:
            self.transcripts.close()
        if self.ledger is not None:
            await self.ledger.__aexit__()

    async def _check_forever(self) -> None:
        while True:
            try:
                for url in await self.fleet.expire():
                    log.warning("node %s was removed: its lease was not renewed", url)
            except RequestError:
                pass  # the state file cannot be written, which is logged; the next round tries again
            if self.file is not None:
                self.file.look(self.configure)
            await self.health.check_all()
            self.checked.set()
            await asyncio.sleep(self.config.health_interval)

    def configure(self, config: ProxyConfig) -> None:
        """Take the nodes, rules, aliases, prices and the policy of a new configuration."""
        self._router.configure(config)
        self.fleet.configure(config.nodes)
        self.registry.on_demand = config.on_demand
        if self.ledger is not None:
            self.ledger.prices = config.prices

    def reload(self) -> None:
        """Read the configuration again, now."""
        if self.file is not None:
            self.file.reload(self.configure)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        if scope["type"] != "http":
            return
        tap = Tap(send)
        response = DownstreamResponse(tap, self.config.health_interval, scope["path"])
        try:
            route = resolve(scope["method"], scope["path"], self.config.forwarded_routes)
            key = authorize(self.keys, route.access, scope["headers"])
            await route.handler(self, Exchange(scope, receive, response, key, tap))
        except Exception as error:  # noqa: BLE001 - the HTTP edge: public_error logs it
            await self._fail(scope, response, public_error(error))

    async def _fail(self, scope: Scope, response: DownstreamResponse, error: RequestError) -> None:
        note_error(scope, error)
        if error.code == "client_disconnected":
            self.metrics.disconnects.inc()
            return
        self.metrics.refused.labels(error.code).inc()
        with contextlib.suppress(RequestError):  # the client may be gone by now
            await response.fail(error)

    @contextlib.asynccontextmanager
    async def _admitted(self, exchange: Exchange) -> AsyncGenerator[tuple[bytes, Journal]]:
        """The request's body. It is held until the answer's end: it may have to be sent again."""
        scope, receive, response, _, tap = exchange
        if self.draining:
            raise RequestError("shutting_down", "the proxy is shutting down")
        if self.active >= self.config.max_in_flight:
            raise RequestError("queue_full", f"{self.active} requests are being answered; try again")
        path = scope["path"]
        if scope.get("raw_path", path.encode()) != path.encode():
            raise not_found(path, PATHS)
        self.active += 1
        try:
            with self._bodies.share() as share:
                body = await read_body(scope, receive, self.config.max_body_bytes, self.config.body_timeout, share)
                yield body, Journal(share)
        finally:
            self.active -= 1
            told = tap.usage._asdict() if tap.usage else {}
            note(scope, **({"node": response.node} if response.node else {}), **told)

    async def forward(self, exchange: Exchange) -> None:
        scope, receive, response, key, tap = exchange
        async with self._admitted(exchange) as (body, journal):
            path, query, client = scope["path"], scope["query_string"], named_client(scope["headers"])
            form = Form(scope["headers"], body) if path in FORMS else None
            names = self.registry.names(self._router.aliases())
            body = ollama.own_body(path, form.json if form else body, names)
            asked, name = read_asked(body), key.key if key else ""
            routing = self._router.routing(asked, scope["headers"], f"{name}\0{client}")
            sizes = self.registry.sizes((routing.model, *routing.fallback))
            async with charged(self.ledger, key, tap, response, path, body, asked.model, sizes, form) as (sent, added):
                headers = [*scope["headers"], *added]
                call = Call(path, query, headers, sent, asked.model, routing, journal, name, client, form)
                run = functools.partial(self._dispatcher.run, client=response, receive=receive, stop=self.stop)
                response.model = asked.model
                async with holding(response) if ollama.streams(path, asked.stream) else contextlib.nullcontext():
                    await respond(call, asked, self._forwarder, self.transcripts, response, run)

    def _may_use(self, exchange: Exchange, model: str) -> bool:
        key = self.ledger.key(exchange.key) if self.ledger else None
        return key is None or self.ledger is None or self.ledger.allows(key, model)

    def _listed(self, exchange: Exchange) -> list[dict[str, Any]]:
        """The models that the client's key may use."""
        return [entry for entry in self.registry.models(self._router.aliases()) if self._may_use(exchange, entry["id"])]

    async def list_models(self, exchange: Exchange) -> None:
        await _json(exchange, anthropic_models.page(self._listed(exchange), exchange.scope["headers"]))

    async def show_model(self, exchange: Exchange) -> None:
        name = exchange.scope["path"].removeprefix(_MODEL_PREFIX)
        if not (entries := [entry for entry in self._listed(exchange) if entry["id"] == name]):
            raise self.registry.absence(name) if self._may_use(exchange, name) else unknown_model(name)
        await _json(exchange, anthropic_models.card(entries[0], exchange.scope["headers"]))

    async def show_health(self, exchange: Exchange) -> None:
        """200 while the proxy itself works, in whatever state its nodes are; 503 while it drains."""
        healthy = [node.healthy for node in self.registry.nodes()]
        status, code = ("draining", 503) if self.draining else ("ok", 200)
        await _json(exchange, {"status": status, "nodes": len(healthy), "healthy_nodes": sum(healthy)}, code)

    async def show_metrics(self, exchange: Exchange) -> None:
        await exchange.response.whole(self.metrics.response(exchange.key))

    async def show_nodes(self, exchange: Exchange) -> None:
        await _json(exchange, self._fleet_status())

    async def add_node(self, exchange: Exchange) -> None:
        with self._bodies.share() as share:
            body = await read_body(exchange.scope, exchange.receive, MAX_ADMIN_BODY, self.config.body_timeout, share)
        node = await self.fleet.add(decode_json(body, Registration, mismatch="not a node's registration"))
        node.owner = ""  # from now on the administrator's
        await self.health.check(node)
        await _json(exchange, self._fleet_status(node.url))

    async def register_node(self, exchange: Exchange) -> None:
        """A node registers itself, or renews its lease."""
        scope, key = exchange.scope, exchange.key
        assert key is not None  # Access.NODE
        with self._bodies.share() as share:
            body = await read_body(scope, exchange.receive, MAX_ADMIN_BODY, self.config.body_timeout, share)
        announced: Announcement = decode_json(body, Announcement, mismatch="not a node's announcement")
        peer = (scope.get("client") or ("",))[0]
        wanted = registration(announced, peer, self.config.node_hosts)
        new = self.registry.get(wanted.url) is None
        node = await self.fleet.announce(announced, wanted, id_of(key.key))
        if new and node is not None:
            log.info("node %s registers itself", node.url)
            await self.health.check(node)
        await _json(exchange, {"url": wanted.url, "healthy": bool(node and node.healthy)})

    async def drain_node(self, exchange: Exchange) -> None:
        """POST: no new requests for the node. DELETE: it gets some again."""
        await self.fleet.drain(url := _node_of(exchange, "/admin/nodes/drain"), exchange.scope["method"] == "POST")
        await _json(exchange, self._fleet_status(url))

    async def remove_node(self, exchange: Exchange) -> None:
        await self.fleet.remove(url := _node_of(exchange, "/admin/nodes"))
        await _json(exchange, {"removed": url, "persistent": self.fleet.persistent})

    def _fleet_status(self, url: str | None = None) -> dict[str, Any]:
        held = {model: held._asdict() for model, held in self.registry.held.items()}
        data = [node for node in self.registry.status() if url in (None, node["url"])]
        told = {"persistent": self.fleet.persistent, "policy": self._router.policy, "held": held}
        return {"object": "list", "data": data, **told}

    async def show_events(self, exchange: Exchange) -> None:
        """What the dashboard shows, as long as the client stays."""
        await while_connected(exchange.receive, self._dashboard.stream(exchange.response, lambda: self.draining))

    async def show_root(self, exchange: Exchange) -> None:
        """For a person who opens the address."""
        await _json(exchange, {"server": "lmkit proxy", "routes": PATHS})


ROUTES: dict[str, dict[str, Route]] = {
    "/": {"GET": Route(Access.USER, Proxy.show_root)},
    "/health": {"GET": Route(Access.OPEN, Proxy.show_health)},
    "/metrics": {"GET": Route(Access.USER, Proxy.show_metrics)},
    "/v1/models": {"GET": Route(Access.USER, Proxy.list_models)},
    "/nodes": {"POST": Route(Access.NODE, Proxy.register_node)},
    "/admin/events": {"GET": Route(Access.ADMIN, Proxy.show_events)},
    "/admin/nodes/drain": {
        "POST": Route(Access.ADMIN, Proxy.drain_node),
        "DELETE": Route(Access.ADMIN, Proxy.drain_node),
    },
    "/admin/nodes": {
        "GET": Route(Access.ADMIN, Proxy.show_nodes),
        "POST": Route(Access.ADMIN, Proxy.add_node),
        "DELETE": Route(Access.ADMIN, Proxy.remove_node),
    },
}


async def _show_list(make: Callable[[ollama.Entries], Any], proxy: Proxy, exchange: Exchange) -> None:
    await _json(exchange, make(proxy._listed(exchange)))


def _of_accounts(access: Access, handler: accounts.Handler) -> Route:
    async def answer(proxy: Proxy, exchange: Exchange) -> None:
        if proxy.ledger is None:
            raise RequestError("not_found", "the proxy has no key_store, so it manages no keys")
        scope, fields = exchange.scope, {}
        if scope["method"] in ("POST", "PATCH"):
            with proxy._bodies.share() as share:
                body = await read_body(scope, exchange.receive, MAX_ADMIN_BODY, proxy.config.body_timeout, share)
            fields = decode_json(body, dict[str, Any], mismatch="expected an object")
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        found = await handler(accounts.Call(proxy.ledger, proxy.ledger.key(exchange.key), query, fields))
        await (exchange.response.whole(found) if isinstance(found, Response) else _json(exchange, found))

    return Route(access, answer)


ROUTES |= {
    path: {method: _of_accounts(*route) for method, route in methods.items()}
    for path, methods in accounts.ROUTES.items()
}
ROUTES |= {
    path: {"GET": Route(Access.USER, functools.partial(_show_list, make))} for path, make in ollama.LISTS.items()
}
_SHOW_MODEL = {"GET": Route(Access.USER, Proxy.show_model)}
_FORWARD = {"POST": Route(Access.USER, Proxy.forward)}
PATHS = [
    *(f"{method} {path}" for path, methods in ROUTES.items() for method in methods),
    f"GET {_MODEL_PREFIX}{{name}}",
    *(f"POST {path}" for path in ROUTES_OF_NODES[:2]),
]


def resolve(method: str, path: str, forwarded: Collection[str] = ROUTES_OF_NODES) -> Route:
    """The route of exactly this path. Without a key, a client does not learn which paths exist."""
    if path in ROUTES:
        methods = ROUTES[path]
    elif path.startswith(_MODEL_PREFIX):
        methods = _SHOW_MODEL
    elif handlers := kept.handlers(path, forwarded):
        methods = {m: Route(Access.USER, functools.partial(_to_keepers, each)) for m, each in handlers.items()}
        methods |= _FORWARD if path == CHATS else {}  # whose POST asks for an answer
    elif path in forwarded:
        methods = _FORWARD
    else:
        return Route(Access.USER, _not_found)
    wanted = "GET" if method == "HEAD" else method
    if wanted not in methods and is_known_elsewhere(path):
        return Route(Access.USER, _not_found)
    refusal = Route(next(iter(methods.values())).access, functools.partial(_not_allowed, methods))
    return methods.get(wanted, refusal)


def _node_of(exchange: Exchange, path: str) -> str:
    """The node that the query names. Raises RequestError."""
    urls = parse_qs(exchange.scope["query_string"].decode("latin-1")).get("url", [])
    try:
        (url,) = map(node_url, urls)
    except ValueError:
        method = exchange.scope["method"]
        raise RequestError("invalid_request", f"say which node: {method} {path}?url=URL", "url") from None
    return url


async def _to_keepers(handler: kept.Handler, proxy: Proxy, exchange: Exchange) -> None:
    scope, receive, response, key, _ = exchange
    async with proxy._admitted(exchange) as (body, journal):
        path, query, headers, method = scope["path"], scope["query_string"], scope["headers"], scope["method"]
        name, client, routing = key.key if key else "", named_client(headers), Routing("", proxy._router.policy)
        call = Call(path, query, headers, body, "", routing, journal, name, client, method=method)
        is_charged = proxy.ledger is not None and proxy.ledger.key(key) is not None
        cluster = kept.Cluster(proxy._forwarder, proxy.registry, proxy._router, proxy.stop, proxy.transcripts)
        await handler(cluster, kept.Asked(call, scope, receive, response, is_charged))


async def _not_found(proxy: Proxy, exchange: Exchange) -> None:
    raise not_found(exchange.scope["path"], PATHS)


async def _not_allowed(allowed: Iterable[str], proxy: Proxy, exchange: Exchange) -> None:
    raise method_not_allowed(exchange.scope["method"], allowed)


async def _json(exchange: Exchange, value: Any, status: int = 200) -> None:
    await exchange.response.whole(Response(msgspec.json.encode(value), status, media_type="application/json"))
