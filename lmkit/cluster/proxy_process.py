"""The proxy of a cluster: its process, its configuration, and what it tells of the replicas."""

from __future__ import annotations

import asyncio
import re
import secrets
import ssl
from pathlib import Path

import httpx
import msgspec

from lmkit.cluster.config import ClusterConfig
from lmkit.cluster.processes import Child, Say
from lmkit.config import wrong_host
from lmkit.errors import JSON_ERRORS, LMKitError
from lmkit.log import get_logger
from lmkit.proxy.config import ProxyConfig
from lmkit.web.running import admin_key_at
from lmkit.web.tls import trusting

START_SECONDS = 60.0
TIMEOUT = 5.0
ID = "proxy"
_ANY = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}

log = get_logger(__name__)


class Told(msgspec.Struct, frozen=True):
    """What the proxy says of one node."""

    tags: tuple[str, ...]
    healthy: bool
    models: tuple[str, ...]
    in_flight: int
    queued_tokens: int
    other_requests: int


class Held(msgspec.Struct, frozen=True):
    requests: int = 0
    tokens: int = 0


class Status(msgspec.Struct, frozen=True):
    data: tuple[Told, ...]
    held: dict[str, Held]  # requests that wait for a node, by model


class ProxyProcess:
    """Its address and the nodes' key stay the same if it is started again."""

    def __init__(self, config: ClusterConfig, folder: Path, say: Say) -> None:
        """`folder` is private: the configuration has keys."""
        self._config, self._file, self._say_line = config, folder / "proxy.json", say
        self.node_key = secrets.token_urlsafe(32)
        self.url = ""  # where it listens
        self.child: Child | None = None
        self._ready = asyncio.Event()
        self._admin_key: str | None = None
        tls: ssl.SSLContext = trusting(httpx.create_ssl_context(trust_env=False))
        self._http = httpx.AsyncClient(timeout=TIMEOUT, trust_env=False, verify=tls)

    def configure(self, config: ClusterConfig) -> None:
        """Let a running proxy read a new configuration."""
        self._config = config
        self._write()
        if self.child is not None and self._ready.is_set():
            self.child.reload()

    def _write(self) -> None:
        config, default = self._config, ProxyConfig()
        named = httpx.URL(config.address or "").host
        proxy = msgspec.structs.replace(
            config.proxy,
            allowed_hosts=(*config.proxy.allowed_hosts, *([named] if wrong_host([named]) is None else [])),
            on_demand={group.called: config.start_seconds for group in config.models},
            mixed_weights=True,
            api_keys=(*config.proxy.api_keys, f"{self.node_key} role=node"),
        )
        self._admin_key = proxy.admin_keys[0] if proxy.admin_keys else None
        proxy = msgspec.structs.replace(proxy, port=default.port)  # `start` gives it
        fields = {
            name: value for name, value in msgspec.structs.asdict(proxy).items() if value != getattr(default, name)
        }
        new = self._file.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_bytes(msgspec.json.encode(fields))
        new.rename(self._file)

    async def start(self) -> None:
        """Start it, again at the port that it had. Raises LMKitError if it does not come up."""
        self._write()
        self._ready.clear()
        port = self.url.rpartition(":")[2] or str(self._config.proxy.port)
        arguments = ["proxy", "--config", str(self._file), "--port", port]
        self.child = child = await Child.start(ID, arguments, self._say)
        waits = [asyncio.ensure_future(wait) for wait in (self._ready.wait(), child.wait())]
        await asyncio.wait(waits, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if not self._ready.is_set():
            child.kill()
            raise LMKitError(f"the proxy {child.ended or 'did not come up'}; its lines above say why")

    def _say(self, id: str, line: str) -> None:
        if found := re.fullmatch(r"proxy on (https?://\S+)", line):
            self.url = found[1]
            self._ready.set()
        else:
            self._say_line(id, line)

    @property
    def address(self) -> str:
        """Where processes of this machine reach it."""
        return self._config.address or re.sub(r"(?<=//)(0\.0\.0\.0|\[::\])(?=:)", lambda host: _ANY[host[0]], self.url)

    async def status(self) -> Status | None:
        """None if the proxy does not answer now."""
        key = self._admin_key or admin_key_at(self.url)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            answer = await self._http.get(self.address + "/admin/nodes", headers=headers)
            return msgspec.json.decode(answer.raise_for_status().content, type=Status)
        except (httpx.HTTPError, *JSON_ERRORS) as error:
            log.debug("the proxy does not answer: %s", error)
            return None

    async def close(self) -> None:
        await self._http.aclose()
