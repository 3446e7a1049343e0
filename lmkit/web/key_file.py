"""Files of API keys, which may change while a server runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from lmkit.errors import ConfigError
from lmkit.log import get_logger
from lmkit.web.auth import ApiKey, parse_key

MAX_BYTES = 1 << 20
LOOK_SECONDS = 1.0  # between looks at the file

log = get_logger(__name__)


def parse_keys(lines: Iterable[str]) -> list[ApiKey]:
    """The keys of lines `KEY [name=value ...]`. Raises ConfigError, which does not tell the key."""
    keys = []
    for i, line in enumerate(lines, 1):
        try:
            keys.append(parse_key(line))
        except ValueError as error:
            raise ConfigError(f"API key {i}: {error}") from None
    return keys


def read_keys(path: str | Path) -> list[ApiKey]:
    """The keys of a file, one a line; blank lines count for nothing. Raises ConfigError."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read API keys: {error}") from None
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES >> 20} MiB")
    try:
        keys = parse_keys(line.strip() for line in text.splitlines() if line.strip())
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not keys:
        raise ConfigError(f"{path}: no API key in it")
    return keys


class KeyFile:
    """The keys of a file, read again when the file changes. If they cannot be used, the old keys stay."""

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError if the file cannot be used."""
        self._path, self._clock = path, clock
        self._version, self._looked = self._seen(), clock()
        self.keys = read_keys(path)

    def changed(self) -> bool:
        """Look at the file, at most once a second. True if `keys` are new."""
        now = self._clock()
        if now - self._looked < LOOK_SECONDS:
            return False
        self._looked = now
        if (version := self._seen()) == self._version:
            return False
        self._version = version
        try:
            self.keys = read_keys(self._path)
        except ConfigError as error:
            log.error("the old API keys stay: %s", error)
            return False
        log.info("%s: read again, %d API keys", self._path, len(self.keys))
        return True

    def _seen(self) -> tuple[int, ...] | None:
        """What tells one version of the file from another; None if there is no file."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
