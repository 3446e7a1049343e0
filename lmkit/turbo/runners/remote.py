"""Tensor parallelism over machines: ranks that another program has started come to the engine over TCP.

    engine, rank 0  -- listens at an address --   Ray or torchrun tells it to   `rank_process HOST:PORT` elsewhere
                    <-- key, `ready` --
                    -- start, plans, tokens -->
                    <== gloo: slots of the exchanges ==>

The connection stands in place of the pipes of a rank on this machine, so all else is as there (runners.ranks). Sums are
added up by the same jobs in the same order, hence the same bits. Only those who know the key get a rank. Nothing is
encrypted.
"""

from __future__ import annotations

import hmac
import mmap
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import IO, Any

import numpy as np
import torch

from lmkit.errors import EngineLostError, LMKitError
from lmkit.kernels.cpu import threads
from lmkit.kernels.cpu.collective import HEADER, SharedRanks, shared_bytes
from lmkit.turbo.runners.placing import PLACERS
from lmkit.turbo.runners.processes import ENDED, SharedModel, Start
from lmkit.turbo.runners.ranks import Ranks, slot_bytes

COME_SECONDS = 600.0  # in which all ranks must come
KEY_SECONDS = 5.0  # for a connection to say the key
EXCHANGE_SECONDS = 120.0  # after which an exchange has failed


class GlooRanks(SharedRanks):
    """SharedRanks whose memory is each rank's own. An exchange fills in the slots of the others."""

    def __init__(self, store: Callable[[], Any], rank: int, size: int, slot_bytes: int, vocab_size: int) -> None:
        memory = mmap.mmap(-1, shared_bytes(size, slot_bytes))
        super().__init__(memory, rank, size, slot_bytes, vocab_size)
        buffers = np.frombuffer(memory, np.uint8)[HEADER:]
        self._slots = torch.from_numpy(buffers).view(2, size, slot_bytes)
        self._store = store
        self._group: Any = None  # of the first exchange, when all ranks are ready

    def _meet(self, args: list[int], num_bytes: int) -> None:
        threads.run_on_host(partial(self._gather, num_bytes))

    def _gather(self, num_bytes: int) -> None:
        """Raises EngineLostError, here or in a captured step, if a rank has ended."""
        slots = [slot[:num_bytes] for slot in self._slots[int(self._turn[0]) & 1]]
        self._turn += 1
        try:
            if self._group is None:
                from torch.distributed import ProcessGroupGloo

                seconds = timedelta(seconds=EXCHANGE_SECONDS)
                self._group = ProcessGroupGloo(self._store(), self._rank, self._size, seconds)
            self._group.allgather([slots], [slots[self._rank].clone()]).wait()
        except RuntimeError:
            self.lose()
            raise EngineLostError(ENDED) from None


class Connection:
    """A process on another machine, as Processes sees one. It ends with its connection."""

    pid = 0

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.stdin: IO[bytes] | None = connection.makefile("wb")
        self.stdout: IO[bytes] | None = connection.makefile("rb")

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the connection, or with a `timeout` end it."""
        if timeout is None:
            assert self.stdout is not None
            with suppress(OSError):
                self.stdout.read()
        else:
            self.kill()
        return 1

    def kill(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


class Door:
    """Where ranks come to, until it is closed. `address` is HOST:PORT, `key` what they must say."""

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0))
        self.address, self.key = f"{host}:{self._listener.getsockname()[1]}", secrets.token_hex(32)
        self._end = time.monotonic() + COME_SECONDS

    def enter(self, start: Start) -> Connection:
        """The next process that comes. Raises LMKitError if none comes in time."""
        while (left := self._end - time.monotonic()) > 0:
            self._listener.settimeout(left)
            with suppress(OSError):
                connection, _ = self._listener.accept()
                connection.settimeout(KEY_SECONDS)
                said = connection.recv(len(self.key), socket.MSG_WAITALL)
                if hmac.compare_digest(said, self.key.encode()):
                    connection.settimeout(None)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return Connection(connection)
                connection.close()
        raise LMKitError(f"rank {start.rank} did not come to {self.address} within {COME_SECONDS:.0f} s")

    def close(self) -> None:
        self._listener.close()


def enter(address: str, key: str) -> socket.socket:
    """Come to the door of an engine, as another rank."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), COME_SECONDS)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(key.encode())
    return connection


def joined(start: Start, vocab_size: int) -> GlooRanks:
    """Another rank's view of the ranks."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, _, port = start.store.rpartition(":")
    store = partial(TCPStore, host, int(port), is_master=False)
    return GlooRanks(store, start.rank, start.config.num_ranks, start.slot_bytes, vocab_size)


class RemoteRanks(Ranks):
    """Ranks on other machines, which `config.cluster` starts."""

    @contextmanager
    def _starts(self, model: SharedModel) -> Iterator[list[Start]]:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        config, size, slot = model.config, model.config.num_ranks, slot_bytes(model.config, model.spec)
        placer = PLACERS[config.cluster](config)
        store = TCPStore(placer.host, 0, is_master=True, wait_for_workers=False)
        self.shared = GlooRanks(lambda: store, 0, size, slot, model.spec.vocab_size)
        self._door = Door(placer.host)
        try:
            placer.place(self._door.address, self._door.key)
            there = f"{placer.host}:{store.port}"
            yield [Start(rank, model.path, config, [], slot, store=there) for rank in range(1, size)]
        finally:
            self._door.close()

    def _begin(self, start: Start) -> Connection:
        """The next rank that comes. Raises LMKitError if none does."""
        return self._door.enter(start)
