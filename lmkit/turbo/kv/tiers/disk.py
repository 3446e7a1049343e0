"""Blocks on disk: one file for each block. The least recently used are evicted first. Blocks survive a restart.

A file gets its name when it is whole, so a killed process leaves no partial file. A loss of power may leave one, and
the checksum finds it. A file with any fault is a miss and is removed: the KV is computed again.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lmkit.errors import ConfigError
from lmkit.log import get_logger
from lmkit.turbo.kv.tiers import files, record
from lmkit.turbo.kv.tiers.failures import Failures
from lmkit.turbo.kv.tiers.folder import Neighbours, claim
from lmkit.turbo.kv.tiers.host import use_chain

log = get_logger(__name__)

# How far a file's time of modification may lag behind its last use. The next start takes the
# time of modification as the last use.
REFRESH_SECONDS = 600


class DiskTier:
    """At most `max_bytes` of files, in pages, below `path`, for blocks of `block_bytes`.

    Any thread may call any method, but `write` only one thread at a time. OSErrors become misses and failed writes.
    Raises ConfigError if nothing can be kept at all: see folder.claim.
    """

    def __init__(self, path: str | Path, identity: bytes, *, block_bytes: int, max_bytes: int) -> None:
        root, name = Path(path), identity.hex()[:16]
        self._file_bytes = record.HEADER_BYTES + block_bytes
        self._taken = files.disk_bytes(self._file_bytes)
        if max_bytes < self._taken:
            raise ConfigError(f"kv_disk_memory {max_bytes} holds no block of {self._taken} bytes; raise it")
        self.folder, lock = claim(root, name)
        self._let_go = weakref.finalize(self, os.close, lock)  # also if the owner of this tier cannot be made
        self.max_bytes = max_bytes
        self.failures = Failures()
        self.num_damaged = self.num_evicted = 0
        self._mutex = threading.Lock()  # guards only the index: no thread waits for the disk
        try:
            self._index = self._listed()  # key -> time of modification, least recently used first
            self._neighbours = Neighbours(root, name)
            self._make_room(0)
        except OSError as error:
            self._let_go()
            raise ConfigError(f"{root}: cannot keep KV: {error.strerror}; choose another kv_disk_path") from None
        log.info("KV on disk: %d blocks, %d MiB in %s", self.num_blocks, self.num_bytes >> 20, self.folder)

    def _listed(self) -> OrderedDict[bytes, int]:
        start, found = time.perf_counter(), []
        for stored in files.listing(self.folder):
            if stored.size == self._file_bytes:
                found.append((stored.modified, stored.key))
            else:
                self.num_damaged += 1
                files.remove(files.file_of(self.folder, stored.key))
        found.sort()
        log.debug("listed %d blocks in %.2f s", len(found), time.perf_counter() - start)
        return OrderedDict((key, modified) for modified, key in found)

    @property
    def num_blocks(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Bytes of this identity's files."""
        return len(self._index) * self._taken

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def touch(self, keys: Sequence[bytes]) -> None:
        with self._mutex:
            use_chain(self._index, keys)

    def remember(self, keys: Sequence[bytes]) -> None:
        """Update the modification times of used files for the next start, but not too often."""
        now = int(time.time())
        for key in reversed(keys):
            with self._mutex:
                if abs(now - self._index.get(key, now)) < REFRESH_SECONDS:
                    continue
                self._index[key] = now
            with suppress(OSError):
                os.utime(files.file_of(self.folder, key))

    def read(self, key: bytes, out: memoryview) -> int | None:
        """Fill `out` [block_bytes] and return its checksum; None = a miss, and the content of `out` is undefined."""
        if key not in self._index:
            return None
        path, head = files.file_of(self.folder, key), bytearray(record.HEADER_BYTES)
        try:
            files.read(path, head, out)
            crc = record.checksum(key, out)
            if head == record.header(key, out.nbytes, crc):
                return crc
            self._damaged(path)
        except FileNotFoundError:
            pass  # evicted at this moment, or removed from outside
        except OSError as error:
            if error.errno == errno.EBADMSG:
                self._damaged(path)
            else:
                self.failures.note("reading KV from disk", error)
        with self._mutex:
            self._index.pop(key, None)
        files.remove(path)
        return None

    def _damaged(self, path: str) -> None:
        self.num_damaged += 1
        log.warning("%s: damaged, removed; its KV is computed again", path)

    def wants(self, key: bytes) -> bool:
        """Whether to call `write`."""
        return key not in self._index and not self.failures.resting

    def write(self, key: bytes, data: memoryview, crc: int) -> bool:
        """Write a block. Returns False if that failed."""
        try:
            self._make_room(self._taken)
            files.write(self.folder, key, record.header(key, data.nbytes, crc), data)
        except OSError as error:
            self.failures.note_write("writing KV to disk", error)
            return False
        self.failures.written()
        with self._mutex:
            self._index[key] = int(time.time())
        return True

    def clear(self) -> list[bytes]:
        """Forget all blocks. Returns their keys, for `remove`."""
        with self._mutex:
            keys = list(self._index)
            self._index.clear()
        return keys

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove the files of forgotten blocks, unless they were written anew."""
        for key in keys:
            if key not in self._index:
                files.remove(files.file_of(self.folder, key))

    def _make_room(self, num_bytes: int) -> None:
        """Make room for `num_bytes` more: evict blocks of other identities first, then the least recently used."""
        while self.num_bytes + self._neighbours.num_bytes + num_bytes > self.max_bytes:
            if self._neighbours.evict():
                continue
            with self._mutex:
                key = next(iter(self._index), None)
            if key is None:
                return
            files.remove(files.file_of(self.folder, key))
            with self._mutex:
                self._index.pop(key, None)
            self.num_evicted += 1

    def close(self) -> None:
        """Release the folder, so that another engine can use it."""
        self._let_go()
