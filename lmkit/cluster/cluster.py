"""Runs a cluster: compares what there is with what the file asks for, and starts and ends processes."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmkit.cluster.config import ClusterConfig, Group
from lmkit.cluster.decide import Autoscaler, Backoff, Seen, State, changes
from lmkit.cluster.processes import Launcher, LocalLauncher, Replica, Say
from lmkit.cluster.proxy_process import Held, ProxyProcess, Status
from lmkit.errors import ConfigError, LMKitError
from lmkit.log import get_logger
from lmkit.web.listen import on_signals

LOOK_SECONDS = 0.5  # between two looks at the replicas and at the file
KILL_SECONDS = 30.0  # after its drain in which a process must have ended

log = get_logger(__name__)


@dataclass(eq=False)
class Running:
    """A replica that was started and has not been seen to end."""

    id: str
    group: str
    digest: str
    process: Replica
    state: State
    since: float  # of the state
    ready_at: float | None = None  # when it was ready first
    in_flight: int = 0

    def become(self, state: State, now: float) -> None:
        if state != self.state:
            self.state, self.since = state, now
        if state == "ready" and self.ready_at is None:
            self.ready_at = now


@dataclass(eq=False)
class Scale:
    """What is remembered of a group."""

    autoscaler: Autoscaler = field(default_factory=Autoscaler)
    backoff: Backoff = field(default_factory=Backoff)


class Cluster:
    """`await Cluster(...).run()` ends after a drain: the first signal starts it, a second one cuts it short."""

    def __init__(
        self, load: Callable[[], ClusterConfig], path: Path | None, say: Say, on_ready: Callable[[str], None]
    ) -> None:
        """`load` reads the file at `path`. Raises ConfigError for a mistake in it.

        With a file the cluster is ready when its proxy is. Without one nobody can mend the configuration: it is ready
        when its first replica is, and a replica that ends before ends the cluster.
        """
        self._load, self._path, self._say, self._on_ready = load, path, say, on_ready
        self._seen = _version(path)
        self.config = load()
        self._replicas: list[Running] = []
        self._scales: dict[str, Scale] = {}
        self._numbers = Counter[str]()  # of the replicas of a group so far
        self._proxy_backoff = Backoff()
        self._proxy_since = 0.0
        self._was_ready = False  # any replica
        self._stopping, self._killing, self._changed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Raises LMKitError if the proxy does not start, Ray cannot be reached, or without a file no replica starts."""
        self._take_signals()
        with tempfile.TemporaryDirectory(prefix="lmkit-up-") as folder:  # others may not look into it
            self._proxy = ProxyProcess(self.config, Path(folder), self._say)
            self._kv_key = Path(folder) / "kv.key"  # of the pairs on this machine
            self._kv_key.touch(0o600)
            self._kv_key.write_text(secrets.token_hex(32))
            try:
                await self._proxy.start()
                self._proxy_since = time.monotonic()
                self._launcher = self._make_launcher()
                self._take_signals()  # Ray takes them for itself
                if self._path is not None:
                    self._on_ready(self._proxy.url)
                while not self._stopping.is_set():
                    await self._step()
                    await self._sleep()
                log.info("draining: first the proxy, then %d replicas", len(self._replicas))
            finally:
                await self._end()

    def _take_signals(self) -> None:
        on_signals(self._stopping.set, self._killing.set, self._changed.set)

    def _make_launcher(self) -> Launcher:
        if self.config.ray is None:
            return LocalLauncher("127.0.0.1", self._say)
        from lmkit.cluster.on_ray import RayLauncher

        return RayLauncher.connect(self.config.ray, self._proxy.address)

    async def _sleep(self) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (self._stopping, self._changed)]
        await asyncio.wait(waits, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def _step(self) -> None:
        if self._changed.is_set() or _version(self._path) != self._seen:
            self._reload()
        await self._keep_proxy()
        status = await self._proxy.status()
        now = time.monotonic()
        self._observe(status, now)
        for group in self.config.models:
            await self._keep(group, status, now)
        labels = {group.label for group in self.config.models}
        for replica in self._replicas:
            if replica.group not in labels and replica.state != "draining":
                self._drain(replica, now)

    def _reload(self) -> None:
        self._changed.clear()
        self._seen = _version(self._path)
        try:
            fresh = self._load()
        except ConfigError as error:
            log.error("%s; the cluster goes on as it is", error)
            return
        late = [name for name in ("ray", "address") if getattr(fresh, name) != getattr(self.config, name)]
        late += ["proxy.port"] if fresh.proxy.port != self.config.proxy.port else []
        if late:
            log.warning("%s: a change of %s takes effect at the next start", self._path, ", ".join(late))
        if fresh != self.config:
            log.info("%s has changed", self._path)
            self.config = fresh
            self._proxy.configure(fresh)

    async def _keep_proxy(self) -> None:
        """Start the proxy again if it has ended. The replicas then register with it by themselves."""
        child, now = self._proxy.child, time.monotonic()
        assert child is not None
        if not child.ended:
            return
        if self._proxy_since:
            log.error("the proxy %s", child.ended)
            self._proxy_backoff.failed(now - self._proxy_since, now)
            self._proxy_since = 0.0
        if self._proxy_backoff.allows(now):
            self._proxy_since = now
            try:
                await self._proxy.start()
            except LMKitError as error:
                log.error("%s", error)

    def _observe(self, status: Status | None, now: float) -> None:
        """Note what became of each replica, and end those that hang."""
        told = {tag: node for node in status.data for tag in node.tags} if status else {}
        for replica in list(self._replicas):
            if ended := replica.process.ended:
                self._replicas.remove(replica)
                if replica.state == "draining":
                    log.info("%s has ended", replica.id)
                else:
                    log.error("%s %s", replica.id, ended)
                    if self._path is None and not self._was_ready:
                        raise LMKitError(f"{replica.id} {ended} before it was ready; its lines above say why")
                    ready = 0.0 if replica.ready_at is None else now - replica.ready_at
                    self._scale(replica.group).backoff.failed(ready, now)
                continue
            node = told.get(replica.id)
            replica.in_flight = node.in_flight + node.other_requests if node else 0
            if status is not None and replica.state != "draining":
                well = node is not None and node.healthy
                replica.become("ready" if well else "starting" if replica.ready_at is None else "lost", now)
                if well and not self._was_ready:
                    self._was_ready = True
                    if self._path is None:
                        self._on_ready(self._proxy.url)
            if now - replica.since > self._limits[replica.state]:
                log.error("%s is killed: %s for %.0f s", replica.id, replica.state, now - replica.since)
                replica.process.kill()
                replica.since = now

    @property
    def _limits(self) -> Mapping[State, float]:
        """The seconds that a state may last."""
        config = self.config
        return {
            "starting": config.start_seconds,
            "ready": float("inf"),
            "lost": config.silent_seconds,
            "draining": config.drain_seconds + KILL_SECONDS,
        }

    def _scale(self, group: str) -> Scale:
        return self._scales.setdefault(group, Scale())

    async def _keep(self, group: Group, status: Status | None, now: float) -> None:
        """One step of a group towards what it should be."""
        if status is None:  # nothing is known of its replicas
            return
        scale, own = self._scale(group.label), [r for r in self._replicas if r.group == group.label]
        held, ids = status.held.get(group.called, Held()), {replica.id for replica in own}
        nodes = [node for node in status.data if ids.intersection(node.tags)]
        requests = held.requests + sum(node.in_flight + node.other_requests for node in nodes)
        tokens = held.tokens + sum(node.queued_tokens for node in nodes)
        want = scale.autoscaler.want(group.bounds, group.scaling, requests, tokens, now)
        seen = [Seen(r.id, r.digest, r.state, r.in_flight) for r in own]
        todo = changes(group.digest, want, seen, surge=group.surge)
        for replica in own:
            if replica.id in todo.drain:
                self._drain(replica, now)
        for _ in range(todo.start if scale.backoff.allows(now) else 0):
            await self._start(group, now)

    async def _start(self, group: Group, now: float) -> None:
        self._numbers[group.label] += 1
        id = f"{re.sub(r'[^A-Za-z0-9._-]', '-', group.label)[-40:]}-{self._numbers[group.label]}"
        log.info("%s starts", id)
        try:
            process = await self._launcher.start(id, self._options(id, group), group.cores)
        except LMKitError as error:
            log.error("%s cannot be started: %s", id, error)
            self._scale(group.label).backoff.failed(0.0, now)
            return
        self._replicas.append(Running(id, group.label, group.digest, process, "starting", now))

    def _options(self, id: str, group: Group) -> dict[str, Any]:
        options = {name.replace("-", "_"): value for name, value in group.options.items()}
        tags = options.get("node_tag") or []
        proxy = self.config.proxy
        if len(proxy.api_keys) < 2 and proxy.key_store is None:  # one client has the replica's cache and queue
            options = {"cache_quota": 1.0, "queue_quota": 1.0} | options
        if group.role != "both":
            options = self._of_role(group) | options
        return options | {
            "model": group.model,
            "served_model_name": group.called,
            "port": 0,
            "api_key": [secrets.token_urlsafe(32)],  # nobody but the proxy has one
            "proxy": self._proxy.address,
            "node_key": self._proxy.node_key,
            "node_tag": [id, *([tags] if isinstance(tags, str) else tags)],
            "drain_seconds": self.config.drain_seconds,
        }

    def _of_role(self, group: Group) -> dict[str, Any]:
        """What a replica of a pair gets beside its options."""
        own: dict[str, Any] = {"role": group.role, "kv_key_file": str(self._kv_key)}
        return own | ({"kv_listen": f"{self._launcher.host}:0"} if group.role == "prefill" else {})

    def _drain(self, replica: Running, now: float) -> None:
        log.info("%s drains", replica.id)
        replica.become("draining", now)
        replica.process.drain()

    async def _end(self) -> None:
        """Drain the proxy, so that no new request comes, and then the replicas. After a second signal, kill them."""
        if self._proxy.child is not None:
            self._proxy.child.drain()
            await self._until_ended([self._proxy.child], self.config.proxy.drain_seconds)
        for replica in self._replicas:
            replica.process.drain()
        await self._until_ended([r.process for r in self._replicas], self.config.drain_seconds)
        await self._proxy.close()
        if hasattr(self, "_launcher"):
            await self._launcher.close()

    async def _until_ended(self, processes: list[Any], seconds: float) -> None:
        deadline = time.monotonic() + seconds + KILL_SECONDS
        while left := [process for process in processes if not process.ended]:
            if self._killing.is_set() or time.monotonic() > deadline:
                for process in left:
                    process.kill()
            await asyncio.sleep(0.05)


def _version(path: Path | None) -> tuple[int, int, int] | None:
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
