"""Publishes what the prefix caches get and lose, over ZeroMQ, in the form of vLLM's KV events (docs/kv_events.md).

    PUB socket      [topic, sequence number, batch]              one message for each step that changes a cache
    ROUTER socket   a request [sequence number] is answered by   [number, batch] for each batch from there on,
                                                                 [-1, empty]
    number          8 bytes, big-endian
    batch           msgpack: [seconds since 1970, [event, ...], 0]

Numbers begin with the microseconds since 1970, so that an engine that has started again goes on with higher ones: its
readers see a gap and ask for what they lack. A request for batches that are no longer kept gets one that clears
everything and stores what there was at that point.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
import zmq

from lmkit.errors import ConfigError
from lmkit.log import get_logger
from lmkit.turbo.kv.block_log import AllBlocksCleared, BlockLog, BlockRemoved, BlockStored, Event
from lmkit.turbo.kv.limits import KVLimits
from lmkit.turbo.kv.radix_cache import RadixCache
from lmkit.turbo.kv.snapshots import Snapshots

KEPT_BATCHES = 1024  # for replays
QUEUED_MESSAGES = 1 << 16  # for one reader that is slow; it misses what is more
POLL_MILLISECONDS = 200  # between looks of the replaying thread whether it is to end
LINGER_MILLISECONDS = 1000  # at the end, for readers to get the last message
END = (-1).to_bytes(8, signed=True)

log = get_logger(__name__)


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """The events of one step."""

    ts: float  # seconds since 1970
    events: Sequence[Event]
    data_parallel_rank: int = 0


class Publisher:
    """Publishes the events of an engine's caches from its making until `close`."""

    def __init__(
        self,
        address: str,
        topic: str,
        events: list[Event],
        *,
        kept: int = KEPT_BATCHES,
    ) -> None:
        """`address` is tcp://HOST:PORT; replays are at the next port, or both are at free ones if it is 0.

        `events` is what `recorded` gives of empty caches. Raises ConfigError if it cannot listen there.
        """
        self._events = events
        self._topic, self._kept = topic.encode(), kept
        self._encode = msgspec.msgpack.Encoder().encode
        self._lock = threading.Lock()  # of the two lines below
        self._batches: deque[tuple[int, Batch]] = deque()
        self._before: dict[tuple[int, int], BlockStored] = {}  # blocks that there were before these batches
        self._next = time.time_ns() // 1000
        self._context = zmq.Context()
        self._pub, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._pub.sndhwm, self._router.sndhwm = QUEUED_MESSAGES, 2 * kept
        self.address = self._bind(self._pub, address)
        host, _, port = self.address.rpartition(":")
        self.replay_address = self._bind(self._router, f"{host}:{0 if address.endswith(':0') else int(port) + 1}")
        log.info("KV events at %s, replays at %s", self.address, self.replay_address)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._replay, name="kv-events", daemon=True)
        self._thread.start()
        self._clear()

    def _bind(self, socket: zmq.Socket, address: str) -> str:
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"kv_events: cannot listen at {address}: {error.strerror}") from None
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.decode().rstrip("\0")

    def publish(self) -> None:
        """Publish what has changed since the last call. It never waits for a reader."""
        if not self._events:
            return
        batch = Batch(time.time(), self._events[:])
        self._events.clear()
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._batches.append((number, batch))
            if len(self._batches) > self._kept:
                fold(self._before, self._batches.popleft()[1].events)
        self._pub.send_multipart([self._topic, number.to_bytes(8), self._encode(batch)])

    def close(self) -> None:
        """Tell readers that the caches are gone."""
        self._clear()
        self._ended.set()
        self._thread.join()
        self._context.destroy(linger=LINGER_MILLISECONDS)

    def _clear(self) -> None:
        self._events[:] = [AllBlocksCleared()]
        self.publish()

    def _replay(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        while not self._ended.is_set():
            if self._router.poll(POLL_MILLISECONDS):
                reader, *frames = self._router.recv_multipart()
                if len(frames) == 2 and len(frames[1]) == 8:
                    for number, batch in self._since(int.from_bytes(frames[1])):
                        self._router.send_multipart([reader, b"", number.to_bytes(8), encode(batch)])
                    self._router.send_multipart([reader, b"", END, b""])

    def _since(self, start: int) -> list[tuple[int, Batch]]:
        with self._lock:
            first = self._batches[0][0]
            kept = [(number, batch) for number, batch in self._batches if number >= start]
            if start < first:
                kept.insert(0, (first - 1, Batch(time.time(), [AllBlocksCleared(), *self._before.values()])))
        return kept


def recorded(caches: Sequence[RadixCache], limits: KVLimits, snapshots: Snapshots | None = None) -> list[Event]:
    """Returns the list to which these caches, one for each class of layers or none, and the snapshots of recurrent
    states after their blocks append their events from now on."""
    events: list[Event] = []
    for group, (cache, layers) in enumerate(zip(caches, limits.classes, strict=False)):
        cache.log = BlockLog(events, limits.block_size, group, layers.window)
    if snapshots is not None:
        snapshots.log = caches[0].log
    return events


def fold(blocks: dict[tuple[int, int], BlockStored], events: Iterable[Event]) -> None:
    """Carry out events on the blocks that there are, by class of layers and hash."""
    for event in events:
        match event:
            case BlockStored():
                above, size = event.parent_block_hash, event.block_size
                for i, hash in enumerate(event.block_hashes):
                    tokens = event.token_ids[i * size : (i + 1) * size]
                    extra = event.extra_keys and event.extra_keys[i : i + 1]
                    blocks[event.group_idx, hash] = msgspec.structs.replace(
                        event, block_hashes=[hash], parent_block_hash=above, token_ids=tokens, extra_keys=extra
                    )
                    above = hash
            case BlockRemoved():
                for hash in event.block_hashes:
                    del blocks[event.group_idx, hash]
            case AllBlocksCleared():
                blocks.clear()
