"""The prefixes that requests found most often, remembered beside the KV on disk from one start to the next.

A prefix is what the cache had of a prompt, in full blocks. System prompts and tools are found by every conversation;
what one conversation has of its own is found once and leaves first. The file has token ids, which are text: it lies
in the private folder of the KV, nothing of a request with a cache_salt or an adapter is in it, and each prefix is
computed for its own tenant alone.
"""

from __future__ import annotations

import hashlib
import os
import time
from array import array
from collections import OrderedDict
from pathlib import Path

import msgspec

from lmkit.log import get_logger
from lmkit.turbo.request import Request

MAX_TOKENS = 1 << 20  # of all prefixes that are remembered
LEAST_TOKENS, LEAST_USES = 64, 2  # of a prefix that is written
SAVE_SECONDS = 60.0  # between writes
MAX_FILE = 16 << 20  # bytes

logger = get_logger(__name__)


class Prefix(msgspec.Struct):
    tenant: str
    ids: bytes  # int32
    uses: float

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // 4

    @property
    def worth(self) -> float:
        """Tokens that it saved."""
        return self.uses * self.num_tokens


class UsedPrefixes:
    """Counts the prefixes of one model. `path` is its file."""

    def __init__(self, path: Path, block_size: int) -> None:
        self._path, self._block_size = path, block_size
        self._found: OrderedDict[bytes, Prefix] = OrderedDict()  # the one used longest ago first
        self._num_tokens = 0
        self._saved_at, self._is_saved = time.monotonic(), True
        for prefix in _read(path):
            prefix.uses /= 2  # so that what is no longer used leaves in some days
            self._add(prefix)

    @classmethod
    def of(cls, folder: str, model_path: str | Path, block_size: int) -> UsedPrefixes:
        name = hashlib.sha256(os.path.realpath(model_path).encode()).hexdigest()[:16]
        return cls(Path(folder) / f"{name}.used", block_size)

    def best(self) -> list[Prefix]:
        """The prefixes, those first that saved the most tokens."""
        return sorted(self._found.values(), key=lambda prefix: prefix.worth, reverse=True)

    def note(self, request: Request, num_cached: int) -> None:
        """A request was answered, and the cache had its first tokens."""
        count = num_cached // self._block_size * self._block_size
        if count < LEAST_TOKENS or count > MAX_TOKENS or request.cache_salt or request.adapter or request.images:
            return
        self._add(Prefix(request.tenant, array("i", request.prompt_ids[:count]).tobytes(), 1.0))
        self._is_saved = False
        if time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the file if anything is new. What cannot be written is a line of the log."""
        self._saved_at = time.monotonic()
        if self._is_saved:
            return
        self._is_saved = True
        kept = [prefix for prefix in self.best() if prefix.uses >= LEAST_USES]
        partial = self._path.with_suffix(".partial")
        try:
            partial.unlink(missing_ok=True)
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.msgpack.encode(kept))
            partial.rename(self._path)
        except OSError as error:
            logger.warning("%s: the most used prefixes cannot be kept: %s", self._path, error.strerror)

    def _add(self, prefix: Prefix) -> None:
        key = hashlib.sha256(prefix.tenant.encode() + b"\0" + prefix.ids).digest()
        if (known := self._found.pop(key, None)) is not None:
            prefix.uses += known.uses
        else:
            self._num_tokens += prefix.num_tokens
        self._found[key] = prefix
        while self._num_tokens > MAX_TOKENS:
            once = (key for key, other in self._found.items() if other.uses < LEAST_USES and other is not prefix)
            others = [key for key, other in self._found.items() if other is not prefix]
            gone = next(once, None) or min(others, key=lambda key: self._found[key].worth)
            self._num_tokens -= self._found.pop(gone).num_tokens


def _read(path: Path) -> list[Prefix]:
    """The prefixes of a file that this process's user alone may write, none if there is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            state = os.fstat(fd)
            if state.st_uid != os.geteuid() or state.st_mode & 0o022 or state.st_size > MAX_FILE:
                logger.warning("%s: left out: it is too large, or others may write to it", path)
                return []
            found = msgspec.msgpack.decode(file.read(), type=list[Prefix])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("%s: left out: %s", path, error)
        return []
    return [prefix for prefix in found if prefix.ids and not len(prefix.ids) % 4 and 0 < prefix.uses < 1e12]
