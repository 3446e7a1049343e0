"""The tiers below the device: saves and loads of whole blocks, by two background threads.

    scheduler: lookup, load_seconds, finished, wait      none waits for a copy or a file
    runner:    load -> loader thread: host memory, else disk, else the peer (then kept on host) -> BlockBytes.write
               save -> BlockBytes.read -> saver thread: the copy's end, then host memory and disk (write-through)
               load from an engine that is computing the blocks -> a thread of its own (awaited.py)
               filling.step, filling.advance -> other engines, layer by layer; then the saver thread

The least recently used blocks leave a tier. A chain of keys is only found from its first block on. Each use of a chain
therefore counts its first block as used last, and the chain shrinks from its end.

A block is written to the device after its checksum was found right. A failure is a miss, or a save that did not happen.
Failures are counted, never raised.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lmkit.log import get_logger
from lmkit.turbo.kv.tiers import record, wire
from lmkit.turbo.kv.tiers.awaited import AwaitedLoads
from lmkit.turbo.kv.tiers.cost import LoadCost
from lmkit.turbo.kv.tiers.disk import DiskTier
from lmkit.turbo.kv.tiers.failures import Failures
from lmkit.turbo.kv.tiers.filling import Filling, LayerBytes
from lmkit.turbo.kv.tiers.host import BlockBytes, HostBlock, HostTier, check_host_bytes
from lmkit.turbo.kv.tiers.peer import PeerTier
from lmkit.turbo.kv.tiers.thread import TierThread
from lmkit.turbo.plan import Load, Save
from lmkit.turbo.plan import Loaded as Loaded

log = get_logger(__name__)

BACKLOG_BYTES = 256 << 20  # size of the copies that wait to be saved
PATIENCE = 4, 1.0  # after so many times its expected time, and these seconds, a job asks other engines no more
CLOSE_SECONDS = 1.0  # time for the work that is left at the end
FAILURES = (OSError, RuntimeError, ValueError, MemoryError)  # includes failures of a copy from or to the device


class _Job(NamedTuple):
    load: Load
    submitted: float
    first: bool  # no job was before it


class _Copy(NamedTuple):
    key: bytes
    data: memoryview
    wait: Callable[[], None] | None  # see BlockBytes.read
    edition: int  # of the store: a copy from before it was cleared is not kept


class _Used(NamedTuple):
    keys: Sequence[bytes]


class _Removed(NamedTuple):
    keys: Sequence[bytes]  # of files


class TierStore:
    """Host memory of `host_bytes` (0 = none) above a disk tier, and the blocks of a peer. Each may be missing.

    Raises ConfigError if `host_bytes` holds no block. `finished` reports each job exactly once.
    """

    def __init__(
        self,
        blocks: BlockBytes,
        *,
        host_bytes: int = 0,
        disk: DiskTier | None = None,
        peer: PeerTier | None = None,
        kind: wire.Kind | None = None,
        layers: LayerBytes | None = None,
        backlog_bytes: int = BACKLOG_BYTES,
    ) -> None:
        """kind: blocks that other engines compute may be loaded, too. layers: `filling` gives them such blocks."""
        check_host_bytes(host_bytes, blocks.nbytes)
        self.blocks, self._disk, self._peer = blocks, disk, peer
        self._host = HostTier(blocks.nbytes, host_bytes) if host_bytes else None
        self._max_backlog = max(64, backlog_bytes // blocks.nbytes)
        self._cost = LoadCost(blocks.nbytes)
        self._failures = Failures()
        self._counts: Counter[str] = Counter()
        self._edition = 0  # how often it was cleared
        self._patience = 0.0  # until when the current job asks the peer
        self._ended = threading.Condition()  # guards the two below
        self._loaded: list[Loaded] = []
        self._left: dict[int, float] = {}  # job -> expected remaining seconds
        self._queued: set[bytes] = set()  # keys of blocks that wait to be saved
        self.filling = Filling(layers, self.lookup_here, self.read_here, self._put) if layers is not None else None
        self._awaited = AwaitedLoads(kind, self._find, self._arrived, self._end_awaited) if kind is not None else None
        self._loader: TierThread[_Job] = TierThread("kv-load", self._load, lambda job: self._end_load(job.load, ()))
        self._saver: TierThread[_Copy | _Used | _Removed] = TierThread("kv-save", self._save, self._drop)

    def lookup(self, keys: Sequence[bytes]) -> int:
        """The number of `keys`, from the first on, that some tier has."""
        count = self.lookup_here(keys)
        if self._peer is not None and count < len(keys):
            self._peer.ask(keys[count:])
            count = next((i for i, key in enumerate(keys) if self._tier_of(key) is None), len(keys))
        return count

    def last(self, keys: Sequence[bytes]) -> int:
        """The number of `keys` up to the last one that some tier has."""
        count = self.last_here(keys)
        return count + self._peer.last(keys[count:]) if self._peer is not None else count

    def lookup_here(self, keys: Sequence[bytes]) -> int:
        """Like `lookup`, without the peer, as is the next one. Any thread may call them."""
        return next((i for i, key in enumerate(keys) if self._tier_of(key) in (None, "peer")), len(keys))

    def last_here(self, keys: Sequence[bytes]) -> int:
        return next((i for i in range(len(keys), 0, -1) if self._tier_of(keys[i - 1]) in ("host", "disk")), 0)

    @property
    def can_await(self) -> bool:
        """Whether blocks that other engines are computing may be loaded."""
        return self._awaited is not None

    def load_seconds(self, keys: Sequence[bytes]) -> float:
        """The expected time from now until all blocks with `keys` are loaded, including the jobs queued before them."""
        expected = self._expected(keys)
        with self._ended:
            return sum(self._left.values()) + expected

    def finished(self) -> list[Loaded]:
        """Loads that have ended since the last call."""
        with self._ended:
            loaded, self._loaded = self._loaded, []
            return loaded

    def wait(self, seconds: float) -> None:
        """Wait until `finished` has a load to report, or `seconds` have passed."""
        with self._ended:
            self._ended.wait_for(lambda: self._loaded, seconds)

    def stats(self) -> dict[str, int]:
        """Counts since the start; bytes, blocks, queues and expected microseconds as they are now."""
        names = ("saved", "present", "loaded_host", "loaded_disk", "misses", "damaged", "dropped")
        stats = {name: self._counts[name] for name in names}
        stats |= {"failures": self._failures.count, "queued_loads": len(self._loader), "queued_saves": len(self._saver)}
        for name, tier in (("host", self._host), ("disk", self._disk)):
            if tier is not None:
                stats |= {f"{name}_bytes": tier.num_bytes, f"{name}_blocks": tier.num_blocks}
                stats |= {f"{name}_evicted": tier.num_evicted}
                stats |= {f"{name}_block_microseconds": round(1e6 * self._cost.per_block[name])}
        if self._disk is not None:
            stats["damaged"] += self._disk.num_damaged
        if self._peer is not None:
            stats["peer_connected"] = int(self._peer.connected)
            stats["peer_block_microseconds"] = round(1e6 * self._cost.per_block["peer"])
        stats["failures"] += sum(part.failures.count for part in (self._disk, self._peer, self._awaited) if part)
        if self._peer is not None or self._awaited is not None:
            stats["loaded_peer"] = self._counts["loaded_peer"]
        stats["loaded"] = stats["loaded_host"] + stats["loaded_disk"] + self._counts["loaded_peer"]
        return stats

    def load(self, load: Load) -> None:
        """Queue a job. Its blocks are filled after those of the jobs before it, or as its source computes them."""
        if load.source and self._awaited is not None:
            self._awaited.start(load)
            return
        expected, first = self._expected(load.keys), len(self._loader) == 0
        with self._ended:
            self._left[load.job] = expected
        self._loader.put([_Job(load, time.perf_counter(), first)])

    def cancel(self, job: int) -> None:
        """End a job soon if it waits for another engine. It is reported as ended then."""
        if self._awaited is not None:
            self._awaited.cancel(job)

    def save(self, saves: Sequence[Save]) -> None:
        """Begin to copy the blocks' bytes, and queue them to be saved. The blocks may change once this returns.

        Blocks that exceed the backlog are dropped. These are the last ones, because a chain needs its first blocks.
        """
        for save in saves:
            if save.key in self._queued or self._is_kept(save.key):
                self._counts["present"] += 1
                self._saver.put([_Used([save.key])])
            elif len(self._saver) >= self._max_backlog:
                self._counts["dropped"] += 1
            elif (copy := self._read(save)) is not None:
                self._saver.put([copy])

    def _put(self, blocks: dict[bytes, memoryview]) -> None:
        """Queue blocks to be saved. Those that exceed the backlog are left to `save`."""
        room = max(0, self._max_backlog - len(self._saver))
        wanted = [(key, data) for key, data in blocks.items() if not self._is_kept(key)][:room]
        copies = [_Copy(key, data, None, self._edition) for key, data in wanted]
        self._queued.update(copy.key for copy in copies)
        self._saver.put(copies)

    def _is_kept(self, key: bytes) -> bool:
        on_host = self._host is None or key in self._host
        return on_host and (self._disk is None or not self._disk.wants(key))

    def _read(self, save: Save) -> _Copy | None:
        try:
            data = _new_block(self.blocks.nbytes)
            return _Copy(save.key, data, self.blocks.read(save.block, data), self._edition)
        except FAILURES as error:
            self._failures.note("saving KV", error)
            return None

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark a sequence's blocks as used, wherever they are: others are evicted before them. Does not wait."""
        self._saver.put([_Used(keys)])

    def close(self) -> None:
        """Finish as much work as possible in CLOSE_SECONDS, and drop the rest."""
        deadline = time.monotonic() + CLOSE_SECONDS
        self._loader.stop(deadline)
        self._saver.stop(deadline)
        if self._awaited is not None:
            self._awaited.close()
        if self._peer is not None:
            self._peer.close()
        ended = [thread.join(CLOSE_SECONDS + 0.5) for thread in (self._loader, self._saver)]
        if self._disk is not None and all(ended):
            self._disk.close()

    def clear(self) -> None:
        """Forget all blocks, and those that wait to be saved. Files are removed in the background."""
        self._edition += 1
        if self._host is not None:
            self._host.clear()
        if self._disk is not None:
            self._saver.put([_Removed(self._disk.clear())])

    def read_here(self, key: bytes) -> memoryview | None:
        """The bytes of a block in host memory or on disk, checked. Any thread may call it, and must not write to it."""
        found = self._host.get(key) if self._host is not None else None
        if found is not None and record.checksum(key, found.data) == found.crc:
            return found.data
        if self._disk is None or key not in self._disk:
            return None
        data = _new_block(self.blocks.nbytes)
        return data if self._disk.read(key, data) is not None else None

    def _tier_of(self, key: bytes) -> str | None:
        if self._host is not None and key in self._host:
            return "host"
        if self._disk is not None and key in self._disk:
            return "disk"
        return "peer" if self._peer is not None and key in self._peer else None

    def _expected(self, keys: Sequence[bytes]) -> float:
        tiers = Counter(map(self._tier_of, keys))
        return self._cost.seconds({tier: count for tier, count in tiers.items() if tier is not None})

    def _touch(self, keys: Sequence[bytes]) -> None:
        for tier in (self._host, self._disk):
            if tier is not None:
                tier.touch(keys)

    # The loader thread.

    def _load(self, job: _Job) -> None:
        if job.first:
            self._cost.observe_latency(time.perf_counter() - job.submitted)
        self._touch(job.load.keys)  # blocks about to be loaded are not evicted meanwhile
        tiers: list[str] = []
        factor, least = PATIENCE
        self._patience = time.perf_counter() + least + factor * self._expected(job.load.keys)
        try:
            for key, block in zip(job.load.keys, job.load.blocks, strict=True):
                tier = None if self._loader.overdue else self._load_block(key, block)
                if tier is None:
                    self._counts["misses"] += 1
                    break
                tiers.append(tier)
                self._left[job.load.job] -= self._cost.per_block[tier]
        except FAILURES as error:
            self._failures.note("loading KV", error)
        self._end_load(job.load, tiers)
        self._touch(job.load.keys)  # also those that are in host memory by now
        if self._disk is not None:
            self._disk.remember(job.load.keys)

    def _end_load(self, load: Load, tiers: Sequence[str]) -> None:
        with self._ended:
            self._left.pop(load.job, None)
            self._loaded.append(Loaded(load.job, len(tiers), dict(Counter(tiers)), tuple(tiers)))
            self._ended.notify_all()

    def _load_block(self, key: bytes, block: int) -> str | None:
        """Load a block. Returns the tier it came from, or None if no tier has it."""
        start = time.perf_counter()
        tier = self._find(key, block) or ("peer" if self._from_peer(key, block) else None)
        if tier is None:
            return None
        self._cost.observe(tier, 1, time.perf_counter() - start)
        self._counts["loaded_" + tier] += 1
        return tier

    def _find(self, key: bytes, block: int) -> str | None:
        """Load a block from host memory or disk. Any thread may call it."""
        if self._from_host(key, block):
            return "host"
        return "disk" if self._from_disk(key, block) else None

    def _end_awaited(self, load: Load, tiers: list[str]) -> None:
        with self._ended:
            self._counts.update("loaded_" + tier for tier in tiers)
            self._counts["misses"] += len(tiers) < len(load.keys)
        self._end_load(load, tiers)

    def _from_host(self, key: bytes, block: int) -> bool:
        found = self._host.get(key) if self._host is not None else None
        if self._host is None or found is None:
            return False
        if record.checksum(key, found.data) != found.crc:
            self._counts["damaged"] += 1
            log.warning("a KV block in host memory is damaged; is this machine's memory sound?")
            self._host.remove(key)
            return False
        self.blocks.write(block, found.data)
        return True

    def _from_disk(self, key: bytes, block: int) -> bool:
        if self._disk is None or key not in self._disk:
            return False
        data = _new_block(self.blocks.nbytes)
        crc = self._disk.read(key, data)
        if crc is None:
            return False
        self.blocks.write(block, data)
        if self._host is not None:
            self._host.put(key, HostBlock(data, crc))
        return True

    def _from_peer(self, key: bytes, block: int) -> bool:
        if self._peer is None or key not in self._peer or time.perf_counter() > self._patience:
            return False
        data = _new_block(self.blocks.nbytes)
        if not self._peer.read(key, data):
            return False
        self._arrived(key, block, data)
        return True

    def _arrived(self, key: bytes, block: int, data: memoryview) -> None:
        self.blocks.write(block, data)
        if self._host is not None:
            self._host.put(key, HostBlock(data, record.checksum(key, data)))

    # The saver thread.

    def _save(self, item: _Copy | _Used | _Removed) -> None:
        if isinstance(item, _Removed):
            if self._disk is not None:
                self._disk.remove(item.keys)
            return
        if isinstance(item, _Used):
            self._touch(item.keys)
            if self._disk is not None:
                self._disk.remember(item.keys)
            return
        try:
            if item.wait is not None:
                item.wait()
            if item.edition == self._edition:
                self._keep(item.key, item.data)
        except FAILURES as error:
            self._failures.note("saving KV", error)
        finally:
            self._queued.discard(item.key)

    def _keep(self, key: bytes, data: memoryview) -> None:
        crc = record.checksum(key, data)
        kept = False
        if self._host is not None and key not in self._host:
            self._host.put(key, HostBlock(data, crc))
            kept = True
        if self._disk is not None and self._disk.wants(key):
            kept |= self._disk.write(key, data, crc)
        self._counts["saved" if kept else "present"] += 1
        if self.filling is not None:
            self.filling.notify()

    def _drop(self, item: _Copy | _Used | _Removed) -> None:
        if isinstance(item, _Copy):
            self._queued.discard(item.key)
            self._counts["dropped"] += 1


def _new_block(num_bytes: int) -> memoryview:
    return np.empty(num_bytes, np.uint8).data
