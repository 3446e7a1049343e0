"""Registers this server with proxies under a lease, tells them its load, and leaves when it ends."""

from __future__ import annotations

import asyncio
import secrets
import ssl
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from lmkit.config import ServerConfig
from lmkit.formats.fingerprint import files_digest
from lmkit.log import get_logger
from lmkit.serve.pool import ModelPool
from lmkit.web.key_file import parse_keys, read_keys
from lmkit.web.running import admin_key_at
from lmkit.web.tls import trusting

if TYPE_CHECKING:
    import httpx

LEASE_SECONDS = 15.0
RENEW_SECONDS = 3.0  # also the age of the load that a proxy knows
LOOK_SECONDS = 0.2  # between looks whether the server drains
TIMEOUT = 5.0

log = get_logger(__name__)


@asynccontextmanager
async def announced(models: ModelPool, config: ServerConfig) -> AsyncGenerator[None]:
    """Keep the server registered with `config.proxies` while the block runs. `config.port` is the one it listens on."""
    if not config.proxies:
        yield
        return
    import httpx

    tls: ssl.SSLContext = trusting(httpx.create_ssl_context(trust_env=False))
    instance = secrets.token_hex(8)
    async with httpx.AsyncClient(timeout=TIMEOUT, trust_env=False, verify=tls) as http:
        told = [Told(http, proxy, models, config, instance) for proxy in config.proxies]
        tasks = [asyncio.create_task(one.keep()) for one in told]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(TIMEOUT):
                    await asyncio.gather(*(one.tell("leaving") for one in told))


class Told:
    """One proxy, and what it was told."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        proxy: str,
        models: ModelPool,
        config: ServerConfig,
        instance: str,
    ) -> None:
        self._http, self._url, self._models, self._config = http, proxy.rstrip("/"), models, config
        self._fixed = {
            "port": config.port,
            "scheme": "https" if config.tls_cert else "http",
            "url": config.node_url,
            "api_key": _key_for_proxies(config),
            "tags": config.node_tags,
            "role": config.role,
            "instance": instance,
            "lease_seconds": LEASE_SECONDS,
        }
        self._found = admin_key_at(self._url)  # of a proxy of the same user here
        self._trouble = "not registered"  # with this proxy, for the log

    async def keep(self) -> None:
        """Register, and again before the lease ends. Tell at once that the server drains."""
        told, due = "", 0.0
        while True:
            state = "draining" if self._models.is_ending else "ready"
            if state != told or time.monotonic() >= due:
                await self.tell(state)
                told, due = state, time.monotonic() + RENEW_SECONDS
            await asyncio.sleep(LOOK_SECONDS)

    async def tell(self, state: str) -> None:
        """One announcement. A failure is logged once."""
        import httpx

        key = self._config.node_key or self._found
        headers = {"authorization": f"Bearer {key}"} if key else {}
        now = {"state": state, "load": self._load(), "models": self._names(), "kv_port": self._kv_port()}
        try:
            answer = await self._http.post(self._url + "/nodes", json=self._fixed | now, headers=headers)
            trouble = "" if answer.is_success else _reason(answer)
            if answer.status_code == 401:  # a proxy that started again has made a new key
                self._found = admin_key_at(self._url)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            trouble = f"cannot be reached ({type(error).__name__})"
        if trouble != self._trouble:
            if trouble:
                log.warning("proxy %s: %s; this server goes on trying", self._url, trouble)
            else:
                log.info("registered with the proxy %s", self._url)
        self._trouble = trouble

    def _names(self) -> dict[str, str]:
        """Each name with a digest of the files behind it."""
        models = self._models.models
        folders = {model: model.engine.config.adapter_folders for model in models}
        return {
            name: files_digest(model.engine.model_path, folders[model].get(name))
            for model in models
            for name in model.names
        }

    def _kv_port(self) -> int | None:
        """Where a node that computes prompts gives their KV. It has one model."""
        info = self._models.models[0].engine.info
        return info.kv_port or None if info is not None and self._config.role == "prefill" else None

    def _load(self) -> dict[str, Any]:
        stats = [model.engine.stats() for model in self._models.models]
        infos = [model.engine.info for model in self._models.models]
        kept = stats[0].kept_since
        used, total = sum(s.blocks_used for s in stats), sum(s.blocks_total for s in stats)
        return {
            "running": sum(s.num_running for s in stats),
            "waiting": sum(s.num_waiting for s in stats),
            "kv_use": min(1.0, used / total) if total else 0.0,
            "kept_seconds": max(0.0, time.monotonic() - kept) if len(stats) == 1 and kept is not None else None,
            "kv_tokens": sum(info.num_blocks * info.block_size for info in infos if info is not None),
        }


def _key_for_proxies(config: ServerConfig) -> str | None:
    """The key with which proxies call this server, None if it has keys and none of a proxy."""
    keys = parse_keys(config.api_keys) + (read_keys(config.api_key_file) if config.api_key_file else [])
    return next((key.key for key in keys if key.role == "proxy"), config.proxy_key)


def _reason(answer: httpx.Response) -> str:
    try:
        return f"refuses this server: {answer.json()['error']['message'][:300]}"
    except (ValueError, KeyError, TypeError):
        return f"answered {answer.status_code}, and not as a proxy does"
