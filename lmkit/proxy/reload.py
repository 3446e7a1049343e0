"""The configuration file of a running proxy: read again when it changes, or at SIGHUP. A bad file changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable

from lmkit.errors import ConfigError
from lmkit.log import get_logger
from lmkit.proxy.config import ProxyConfig

RELOADED = frozenset({"nodes", "policy", "aliases", "rules", "prices", "on_demand"})

log = get_logger(__name__)


class ConfigFile:
    """The file at `path`, which `load` reads. `look` and `reload` hand a new configuration to `apply`."""

    def __init__(self, path: str, load: Callable[[], ProxyConfig]) -> None:
        """Raises ConfigError if the file cannot be used."""
        self.path, self._load = path, load
        self._seen = self._version()
        self.config = load()

    def look(self, apply: Callable[[ProxyConfig], None]) -> None:
        """Reload if the file has changed."""
        if self._version() != self._seen:
            self.reload(apply)

    def reload(self, apply: Callable[[ProxyConfig], None]) -> None:
        self._seen = self._version()
        try:
            fresh = self._load()
        except ConfigError as error:
            log.error("%s; the proxy goes on with the configuration that it has", error)
            return
        changed = {name for name in fresh.__struct_fields__ if getattr(fresh, name) != getattr(self.config, name)}
        if late := sorted(changed - RELOADED):
            log.warning("%s: a change of %s takes effect when the proxy is started again", self.path, ", ".join(late))
        if now := sorted(changed & RELOADED):
            apply(fresh)
            log.info("%s: %s changed", self.path, ", ".join(now))
        self.config = fresh

    def _version(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size
