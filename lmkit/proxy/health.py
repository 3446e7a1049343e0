"""Health checks: all nodes are asked at once, each within a time limit."""

from __future__ import annotations

import asyncio

import msgspec

from lmkit.errors import JSON_ERRORS, ConfigError
from lmkit.log import get_logger
from lmkit.proxy.config import ProxyConfig
from lmkit.proxy.registry import ModelEntries, Node, Registry
from lmkit.proxy.rules import ModelName
from lmkit.web.running import Entry, proxy_key_at, running
from lmkit.web.upstream import Upstream, UpstreamError

log = get_logger(__name__)
NO_KEY = (
    "node %s: its streams end when it fails, because it has no key of this proxy: start it with --api-key "
    "'KEY role=proxy', and give the proxy the api_key KEY for it"
)
MAX_ANSWER_BYTES, MAX_MODELS = 1 << 20, 1000


class _MissingError(ConfigError):
    """The node has no such route."""


class HealthChecker:
    """A node is up when `GET /health` is 2xx and its models are configured or listed by `GET /v1/models`.

    A server without /health is up when it lists its models.
    """

    def __init__(self, registry: Registry, upstream: Upstream, config: ProxyConfig) -> None:
        self._registry = registry
        self._upstream = upstream
        self._timeout = config.health_timeout

    async def check_all(self) -> None:
        """Check every node, and compare those that are up."""
        here = running()
        await asyncio.gather(*(self.check(node, here) for node in self._registry.nodes()))
        for node, why in self._registry.eject().items():
            log.warning("node %s gets no requests for a while: %s", node.url, why)

    async def check(self, node: Node, here: list[Entry] | None = None) -> None:
        """Check one node and record the result; `here` are this user's processes on this machine. Never raises."""
        if node.config.api_key is None and node.config.tenants == "header":
            node.found_key = proxy_key_at(node.url, running() if here is None else here)
        try:
            async with asyncio.timeout(self._timeout):
                if not await self._is_well(node):
                    await self._get(node, "/v1/models")
                models, note = await self._models(node)
        except TimeoutError:
            failure = f"no answer to a check within {self._timeout:g} s"
        except UpstreamError as error:
            failure = f"cannot be reached ({error})"
        except ConfigError as error:
            failure = str(error)
        else:
            if self._registry.succeeded(node, models, note=note):
                log.info("node %s is up, models: %s", node.url, ", ".join(sorted(node.models or ())))
                if node.key is None and node.config.tenants == "header":
                    log.warning(NO_KEY, node.url)
            return
        if self._registry.failed(node, failure):
            log.warning("node %s is down: %s", node.url, failure)

    async def _is_well(self, node: Node) -> bool:
        """False for a server without /health, which must then list its models. Raises if it is not well."""
        try:
            await self._get(node, "/health")
        except _MissingError:
            return False
        return True

    async def _models(self, node: Node) -> tuple[ModelEntries | None, str | None]:
        """(a new list or None, a note). A node that has listed its models once keeps them if a later list fails."""
        if node.config.models is not None:
            return None, None
        try:
            return parse_models(await self._get(node, "/v1/models")), None
        except ConfigError as error:
            if node.models is None:
                raise
            return None, str(error)

    async def _get(self, node: Node, path: str) -> bytes:
        headers = [(b"accept-encoding", b"identity")]
        if node.config.api_key is not None:
            headers.append((b"authorization", b"Bearer " + node.config.api_key.encode()))
        answer = await self._upstream.send("GET", node.url + path, headers)
        try:
            if not 200 <= answer.status <= 299:
                if answer.status == 404:
                    raise _MissingError(f"{path} answered 404")
                hint = ": check its api_key, or its --allowed-host" if answer.status in (401, 403) else ""
                raise ConfigError(f"{path} answered {answer.status}{hint}")
            body = await answer.body(MAX_ANSWER_BYTES)
        finally:
            answer.close()
        if body is None:
            raise ConfigError(f"{path} answered more than {MAX_ANSWER_BYTES} bytes")
        return body


class _Entry(msgspec.Struct):
    id: ModelName


def parse_models(body: bytes) -> ModelEntries:
    """A /v1/models list -> its entries by model id. Raises ConfigError for anything else."""
    try:
        entries = msgspec.json.decode(body)["data"]
        names = [entry.id for entry in msgspec.convert(entries, list[_Entry])]
    except (*JSON_ERRORS, TypeError, KeyError):
        raise ConfigError("/v1/models did not answer a list of models") from None
    if len(names) > MAX_MODELS:
        raise ConfigError(f"/v1/models lists more than {MAX_MODELS} models")
    return dict(zip(names, entries, strict=True))
