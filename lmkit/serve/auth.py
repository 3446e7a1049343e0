"""Who asks: every path but those of `OPEN_PATHS` needs a key, if the server has any. Each key is a tenant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmkit.config import ServerConfig
from lmkit.errors import RequestError
from lmkit.web.access_log import note_error
from lmkit.web.auth import ApiKey, Headers, Keyring, invalid_api_key, named_client, tenant_of
from lmkit.web.errors import error_response
from lmkit.web.key_file import KeyFile, parse_keys, read_keys
from lmkit.web.prompt_limit import limit_prompts
from lmkit.web.rates import Meter, measure

OPEN_PATHS = frozenset({"/health", "/ping"})  # for load balancers; /metrics shows traffic, so it needs a key
METRICS_PATH = "/metrics"


class Owner(NamedTuple):
    """Whose request it is. Quotas follow the tenant; KV and sessions follow the tenant and the salt."""

    tenant: str = ""  # the key's, or that of the client that a proxy names; "" if the server has no keys
    salt: str = ""  # a client that is named without the proxy's role
    weight: float = 1.0  # of the tenant's share of the engine
    min_priority: int = -1000  # the soonest priority that its requests may have

    def own(self, name: str) -> str:
        """A name that a client chose, made different from the same name of the tenant's other clients."""
        return f"{self.salt}:{name}" if self.salt else name


NOBODY = Owner()


class ApiKeys:
    """Middleware that refuses requests without a known key, if there are keys. It tells the handlers their owner.

    A request that the server makes itself has its owner already, see `inside.call`. No client can set the state.

    It checks `scope["path"]`, as the router does, and never a URL built from the Host header.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], file: str | None = None, proxy_key: str | None = None
    ) -> None:
        """`proxy_key` opens nothing: a request that has it comes from a proxy, if the server has no keys.

        Raises ConfigError for a file or a key that cannot be used.
        """
        assert not isinstance(keys, str)
        self._app = app
        self._from_proxy = Keyring([(proxy_key, True)] if proxy_key else [])
        self._given, self._file = parse_keys(keys), KeyFile(file) if file is not None else None
        self._meters: dict[ApiKey, Meter] = {}
        self._take_keys()

    def _take_keys(self) -> None:
        known = self._given + (self._file.keys if self._file else [])
        self._keyring = Keyring((key.key, key) for key in known) if known else None
        self._meters = {key: self._meters.get(key) or Meter(key) for key in known if key.is_limited}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        if scope["type"] != "lifespan" and scope["path"] not in OPEN_PATHS and "owner" not in state:
            meter: Meter | None = None
            try:
                state["key"] = key = self.key(scope["path"], scope["headers"])
                state["is_proxy"] = key.role == "proxy" if key else bool(self._from_proxy.find(scope["headers"]))
                state["owner"] = owner_of(key, named_client(scope["headers"]))
                limit_prompts(scope["headers"])
                if key is not None and scope["method"] == "POST" and (meter := self._meters.get(key)):
                    meter.request()
            except RequestError as error:
                note_error(scope, error)
                refused = error_response(error, retry_after=meter.wait() if meter else 1, path=scope["path"])
                await refused(scope, receive, _with_limits(send, meter) if meter else send)
                return
            if meter is not None:
                measure(meter)
                send = _with_limits(send, meter)
        await self._app(scope, receive, send)

    def key(self, path: str, headers: Headers) -> ApiKey | None:
        """The key of a request for this path; None if the server has no keys. Raises RequestError."""
        if self._file is not None and self._file.changed():
            self._take_keys()
        if self._keyring is None:
            return None
        key = self._keyring.find(headers)
        if key is None:
            raise invalid_api_key()
        if key.role == "node":
            raise RequestError("permission_denied", "this key has the role node: it registers nodes with a proxy")
        if key.role == "metrics" and path != METRICS_PATH:
            raise RequestError("permission_denied", f"this key has the role metrics: it may only read {METRICS_PATH}")
        return key


def _with_limits(send: Send, meter: Meter) -> Send:
    """`send`, with the key's limits in the headers of the answer."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *meter.headers()]
        await send(message)

    return sending


def owner_of(key: ApiKey | None, client: str) -> Owner:
    """`client`: the name in x-lmkit-tenant, or an empty text."""
    if key is not None and key.role == "proxy":
        return Owner(tenant_of(key.key, client), "", key.weight, key.min_priority)
    if key is not None:
        return Owner(tenant_of(key.key), client, key.weight, key.min_priority)
    return Owner("", client)


def owners(config: ServerConfig) -> list[Owner]:
    """Whose requests the server takes: those of each key, or of nobody."""
    keys = parse_keys(config.api_keys) + (read_keys(config.api_key_file) if config.api_key_file else [])
    return [owner_of(key, "") for key in keys if key.role not in ("metrics", "node")] or [NOBODY]


def owner(request: Request) -> Owner:
    found: Owner = request.state.owner
    return found
