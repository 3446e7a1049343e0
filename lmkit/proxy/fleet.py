"""Changes of the set of nodes at run time. They are made first on disk and then in the registry."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from lmkit.config import StrictStruct
from lmkit.errors import JSON_ERRORS, ConfigError, RequestError
from lmkit.log import get_logger
from lmkit.proxy.announce import Announcement, heard, no_names, no_place, owners, refusal
from lmkit.proxy.config import NodeConfig, ProxyConfig, Registration
from lmkit.proxy.registry import Node, Registry

log = get_logger(__name__)


class FleetState(StrictStruct, frozen=True):
    """Differences from the configuration: nodes added, nodes removed, and nodes drained."""

    version: Literal[1] = 1
    added: tuple[Registration, ...] = ()
    removed: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()  # nodes that get no new requests
    names: dict[str, str] = {}  # of models -> the id of the key whose nodes serve or served it; "" = an administrator


def load_state(path: Path) -> FleetState:
    """The saved state, or an empty one if there is no file.

    Raises ConfigError for a damaged file, which is not overwritten.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=FleetState)
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ConfigError(f"state_file {path}: there is no directory {path.parent}") from None
        return FleetState()
    except OSError as error:
        raise ConfigError(f"state_file {path}: cannot be read: {error.strerror}") from None
    except JSON_ERRORS as error:
        raise ConfigError(f"state_file {path}: {error}; repair or delete it") from None


def save_state(path: Path, state: FleetState) -> None:
    """Replace the file atomically and durably. Only its owner may read it, because it holds keys. Raises OSError."""
    fresh = path.with_name(f".{path.name}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(os.open(fresh, flags, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(msgspec.json.format(msgspec.json.encode(state), indent=2))
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class Fleet:
    """Changes the registry's nodes together with the state file."""

    def __init__(self, config: ProxyConfig, registry: Registry) -> None:
        """Fill the registry from the configuration and the state file. Raises ConfigError for a damaged state file."""
        self._path = Path(config.state_file) if config.state_file is not None else None
        self._state = load_state(self._path) if self._path is not None else FleetState()
        self._configured = {node.url for node in config.nodes}
        self._registry = registry
        self._max_nodes, self._mixed = config.max_nodes, config.mixed_weights
        self._lock = asyncio.Lock()
        self._owners = owners(config)
        known = self._owners | ({""} if config.nodes or self._state.added else set())
        names = {model: owner for model, owner in self._state.names.items() if owner in known}
        self._state, self._aliases = msgspec.structs.replace(self._state, names=names), config.aliases
        registry.gone.update(dict.fromkeys(names, registry.clock()))
        for node in config.nodes:
            if node.url in self._state.removed:
                log.warning(
                    "node %s of the configuration is not used: it was removed at run time (%s)", node.url, self._path
                )
            else:
                registry.add(node, "config")
        for registration in self._state.added:
            if registration.url in self._configured:
                log.info(
                    "node %s: its settings from run time (%s) override the configuration", registration.url, self._path
                )
            registry.add(registration, "added")
        self._mark_drained()

    def configure(self, nodes: Sequence[NodeConfig]) -> None:
        """Take the nodes of a new configuration. What was changed at run time stays as it is."""
        configured = {node.url: node for node in nodes}
        added = {registration.url for registration in self._state.added}
        for node in self._registry.nodes():
            if node.origin == "config" and node.url not in configured:
                self._registry.remove(node.url)
                log.info("node %s has left the configuration; its running requests continue", node.url)
        for url, config in configured.items():
            if url not in added and url not in self._state.removed:
                self._registry.add(config, "config")
        self._configured = set(configured)
        self._mark_drained()

    async def drain(self, url: str, drained: bool) -> None:
        """Give a node no new requests, or give it some again. Raises RequestError as `remove` does."""
        async with self._lock:
            if self._registry.get(url) is None:
                raise RequestError("not_found", f"there is no node {url!r}", "url")
            others = {known for known in self._state.drained if known != url}
            drains = tuple(sorted(others | {url} if drained else others))
            await self._save(msgspec.structs.replace(self._state, drained=drains))
            self._mark_drained()

    def _mark_drained(self) -> None:
        for node in self._registry.nodes():
            node.draining = node.url in self._state.drained

    @property
    def persistent(self) -> bool:
        return self._path is not None

    async def add(self, registration: Registration) -> Node:
        """Add a node, or renew one. Raises RequestError if the change cannot be saved; then nothing has changed."""
        async with self._lock:
            if self._registry.get(registration.url) is None and len(self._registry.nodes()) >= self._max_nodes:
                raise RequestError("invalid_request", f"there are {self._max_nodes} nodes already: see max_nodes")
            added = tuple(r for r in self._state.added if r.url != registration.url)
            removed = tuple(url for url in self._state.removed if url != registration.url)
            await self._save(msgspec.structs.replace(self._state, added=(*added, registration), removed=removed))
            return self._registry.add(registration, "added")

    async def announce(self, announced: Announcement, registration: Registration, owner: str) -> Node | None:
        """Register a node, or renew its lease. None if it leaves. It is not saved: it comes again by itself.

        Raises RequestError for a node that was removed, is one too many, or would take over a name.
        """
        async with self._lock:
            url, known = registration.url, self._registry.get(registration.url)
            if url in self._state.removed:
                raise RequestError("permission_denied", f"{url} was removed; `lmkit proxy add {url}` admits it again")
            if known is None or known.origin == "registered":  # of others only the load counts
                names = self._state.names
                aliases = {alias: names[model] for alias, model in self._aliases.items() if model in names}
                owned = aliases | names
                if reason := refusal(announced, url, owner, self._registry.nodes(), owned, mixed=self._mixed):
                    raise RequestError("permission_denied", reason, "models")
                if announced.state == "leaving":
                    self._registry.remove(url, may_return=True)
                    return None
                if known is None and (full := no_place(owner, self._owners, self._registry.nodes(), self._max_nodes)):
                    raise RequestError("invalid_request", full)
                fresh = names | dict.fromkeys(announced.models, owner)
                if len(fresh) > len(names) and (full := no_names(owner, self._owners, fresh)):
                    raise RequestError("invalid_request", full)
                await self._save(msgspec.structs.replace(self._state, names=fresh))
                known = self._registry.add(registration, "registered")
                known.owner = owner
            if heard(known, announced):
                self._registry.prefixes.forget(known)
            self._registry.keeps(known, announced.load.kept_seconds)
            self._mark_drained()
            return known

    async def remove(self, url: str) -> None:
        """Remove a node; its running requests continue.

        The names of models that no other node serves are free again. Raises RequestError if there is no such node, or
        if it cannot be saved.
        """
        async with self._lock:
            if (node := self._registry.get(url)) is None:
                raise RequestError("not_found", f"there is no node {url!r}", "url")
            served = {model for other in self._registry.nodes() if other is not node for model in other.models or ()}
            names = {m: owner for m, owner in self._state.names.items() if m in served or m not in (node.models or ())}
            await self._drop([url], refused={url} if node.origin == "registered" else set(), names=names)

    async def expire(self) -> list[str]:
        """Remove the nodes whose lease has ended, and return their URLs.

        Names that an administrator's nodes serve are no one else's: a node that came with one before it was known that
        these have it is removed, too.
        """
        async with self._lock:
            nodes = self._registry.nodes()
            theirs = [node for node in nodes if node.origin != "registered"]
            served = {model for node in theirs for model in node.models or ()}
            is_asked = all(node.models is not None for node in theirs)
            for node in nodes:
                if node.origin == "registered" and not served.isdisjoint(node.models or ()):
                    log.warning("node %s is removed: an administrator's nodes have the name of its model", node.url)
                    self._registry.remove(node.url)
            urls = self._registry.expired()
            if urls:
                await self._drop(urls, may_return=True)
            kept = {m: owner for m, owner in self._state.names.items() if owner or not is_asked}
            await self._save(msgspec.structs.replace(self._state, names=kept | dict.fromkeys(served, "")))
            return urls

    async def _drop(
        self, urls: list[str], refused: Collection[str] = (), *, may_return: bool = False, **changed: Any
    ) -> None:
        """`refused` may not register again. `changed` has other fields of the state, which is saved once."""
        added = tuple(r for r in self._state.added if r.url not in urls)
        removed = {*self._state.removed, *self._configured.intersection(urls), *refused}
        drained = tuple(url for url in self._state.drained if url not in urls)
        changed |= {"added": added, "removed": tuple(sorted(removed)), "drained": drained}
        await self._save(msgspec.structs.replace(self._state, **changed))
        for url in urls:
            self._registry.remove(url, may_return=may_return)

    async def _save(self, state: FleetState) -> None:
        if self._path is not None and state != self._state:
            try:
                await asyncio.to_thread(save_state, self._path, state)
            except OSError as error:
                log.error("state_file %s: cannot be written: %s", self._path, error.strerror)
                raise RequestError("internal_error", "the change cannot be saved; nothing has changed") from None
        self._state = state
