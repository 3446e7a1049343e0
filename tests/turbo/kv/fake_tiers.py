"""Real tiers below FakeRunner's memory. Chance decides when loads end, and blocks get lost and damaged."""

from __future__ import annotations

import errno
import random
import time
from pathlib import Path

from lmkit.turbo.kv.tiers.disk import DiskTier
from lmkit.turbo.kv.tiers.store import Loaded, TierStore
from lmkit.turbo.plan import Load, Save
from tests.turbo.fakes import FakeRunner


class Unreliable:
    """FakeRunner's blocks as tiers see them. Reading and writing fail while `broken`."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.broken = False

    @property
    def nbytes(self) -> int:
        return self.runner.nbytes

    @property
    def state_parts(self) -> int:
        return self.runner.state_parts

    def read(self, block: int, out: memoryview) -> None:
        self._check()
        self.runner.read(block, out)

    def write(self, block: int, data: memoryview) -> None:
        self._check()
        self.runner.write(block, data)

    def _check(self) -> None:
        if self.broken:
            raise RuntimeError("injected")


class ChanceTiers:
    """A TierStore in which everything happens in the order of the calling thread. So a seed always gives the same run.

    A load is held back and carried out in full just before it is reported. Its blocks change as late as possible. This
    shows if they were used meanwhile, or given to other sequences.
    """

    def __init__(
        self, runner: FakeRunner, rng: random.Random, folder: Path | None, num_host: int, num_disk: int
    ) -> None:
        self.rng = rng
        self.blocks = Unreliable(runner)
        self.disk = None
        if folder is not None:
            self.disk = DiskTier(folder, bytes(32), block_bytes=runner.nbytes, max_bytes=4096 * num_disk)
        self.store = TierStore(self.blocks, host_bytes=num_host * runner.nbytes, disk=self.disk)
        self.held: list[Load] = []
        self.lookup, self.last = self.store.lookup, self.store.last
        self.stats, self.close = self.store.stats, self.store.close

    def load_seconds(self, keys: list[bytes]) -> float:
        return 0.0 if self.rng.random() < 0.9 else 1e9

    def touch(self, keys: list[bytes]) -> None:
        self.store.touch(keys)
        self._settle()

    def save(self, saves: list[Save]) -> None:
        self.store.save(saves)
        self._settle()

    def load(self, load: Load) -> None:
        self.held.append(load)

    def finished(self) -> list[Loaded]:
        ended: list[Loaded] = []
        while self.held and self.rng.random() < 0.4:
            self.store.load(self.held.pop(0))
            while not (new := self.store.finished()):
                self.store.wait(1)
            ended += new
            self._settle()
        return ended

    def wait(self, seconds: float) -> None:
        pass

    def _settle(self) -> None:
        while (stats := self.store.stats())["queued_saves"] or stats["queued_loads"]:
            time.sleep(0)

    def disturb(self) -> None:
        """Damage a random block, or break all writes for a while."""
        host, disk = self.store._host, self.disk
        kind = self.rng.randrange(6)
        if kind == 0:
            self.blocks.broken = not self.blocks.broken
        elif kind == 1 and host is not None and host._blocks:
            key = self.rng.choice(list(host._blocks))
            host.remove(key)
        elif kind == 2 and host is not None and host._blocks:
            self.rng.choice(list(host._blocks.values())).data[0] ^= 1
        elif disk is not None:
            self._disturb_disk(disk, kind)

    def _disturb_disk(self, disk: DiskTier, kind: int) -> None:
        paths = sorted(Path(disk.folder).glob("*/*.kv"))
        if kind == 3 or not paths:
            disk.failures._in_a_row = self.rng.choice([0, 5])  # writing stops, or starts again
            disk.failures._rests_until = float("inf")
        elif kind == 4:
            self.rng.choice(paths).unlink()
        else:
            path = self.rng.choice(paths)
            data = bytearray(path.read_bytes())
            data[self.rng.randrange(len(data))] ^= 1
            path.write_bytes(data[: self.rng.choice([len(data), len(data), 10])])


def full_disk(*args: object) -> None:
    """Replaces files.write."""
    raise OSError(errno.ENOSPC, "No space left on device")
