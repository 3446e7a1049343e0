"""Which beginnings of prompts each node has probably cached, by what was sent to it.

A proxy has no tokenizer, so a prompt is the bytes of its JSON. They are cut at fixed positions, and each cut has a
digest of everything before it. Two prompts share a digest if they begin with the same bytes up to there. The chunks
grow with their position, so that a long prompt has few.

    bytes     0 .. 256 .. 512 .. 4096 .... 4352 ...... 16384 ........ 17408 ...
    digests        d0     d1     d15       d16         ...
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

BYTES_PER_TOKEN = 4  # of JSON text, about
CHUNK_BYTES = 256
MAX_BYTES = 1 << 20  # of a prompt; what comes after them is not looked at
MAX_ENTRIES = 1 << 18  # for all nodes together, about 110 MB

N = TypeVar("N", bound=Hashable)


class Cut(NamedTuple):
    """The beginning of a prompt."""

    digest: int
    end: int  # bytes


def cuts(prompt: Iterable[bytes | memoryview], secret: bytes = b"") -> list[Cut]:
    """The cuts of a prompt whose bytes are all `prompt` one after the other. A last chunk that is not full has none.

    `secret` goes into each digest, so that prompts of different tenants have nothing in common.
    """
    state, found = hashlib.blake2b(digest_size=8, key=secret[:64]), []
    at, end = 0, CHUNK_BYTES
    for piece in prompt:
        part, start = memoryview(piece), 0
        while end <= MAX_BYTES and end - at <= len(part) - start:
            state.update(part[start : start + end - at])
            found.append(Cut(int.from_bytes(state.digest()), end))
            start += end - at
            at, end = end, end + max(CHUNK_BYTES, end >> 4 & -CHUNK_BYTES)
        if end > MAX_BYTES:
            break
        state.update(part[start:])
        at += len(part) - start
    return found


class PrefixIndex(Generic[N]):
    """The cuts that each node has got, the most recently used last. What a node used longest ago leaves first.

    A node may tell since when it has lost nothing (`expire`). A prompt's end is older than its beginning: a node that
    has a cut has all cuts before it.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self.secret = secrets.token_bytes(16)  # nobody outside can make two prompts collide
        self._max_entries = max_entries
        self._held: dict[N, OrderedDict[int, tuple[int, float]]] = {}  # digest -> bytes of its chunk, last use
        self._sizes: dict[N, int] = {}  # bytes
        self._holders: dict[int, set[N]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def cached(self, prompt: Sequence[Cut]) -> dict[N, int]:
        """The tokens of the prompt that each node has, about. Nodes that have none are left out."""
        low, high = 0, len(prompt)  # the first cut that no node has
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if prompt[middle].digest in self._holders else (low, middle)
        found: dict[N, int] = {}
        seen = set[N]()
        for cut in reversed(prompt[:low]):
            new = self._holders.get(cut.digest, seen) - seen
            found.update(dict.fromkeys(new, cut.end // BYTES_PER_TOKEN))
            seen |= new
            if len(seen) == len(self._held):
                break
        return found

    def add(self, node: N, prompt: Sequence[Cut], capacity: int | None = None, now: float = 0.0) -> None:
        """The node gets this prompt. `capacity` is the number of tokens that it can keep, None if it is not known."""
        held = self._held.setdefault(node, OrderedDict())
        size = self._sizes.get(node, 0)
        for i in range(len(prompt) - 1, -1, -1):
            digest, end = prompt[i]
            nbytes = end - (prompt[i - 1].end if i else 0)
            if digest in held:
                held.move_to_end(digest)
            else:
                size += nbytes
                self._holders.setdefault(digest, set()).add(node)
            held[digest] = nbytes, now
        self._sizes[node] = size
        most = self._max_entries // len(self._held)
        limit = float("inf") if capacity is None else capacity * BYTES_PER_TOKEN
        while len(held) > most or (self._sizes[node] > limit and held):
            self._pop(node, held)

    def touch(self, node: N, prompt: Sequence[Cut], now: float) -> None:
        """The node has used this prompt up to now. Nothing is known of a node that was forgotten meanwhile."""
        if node in self._held:
            self.add(node, prompt, now=now)

    def expire(self, node: N, until: float) -> None:
        """The node has lost what it used last at `until` or before."""
        held = self._held.get(node)
        while held and next(iter(held.values()))[1] <= until:
            self._pop(node, held)

    def _pop(self, node: N, held: OrderedDict[int, tuple[int, float]]) -> None:
        digest, (nbytes, _) = held.popitem(last=False)
        self._sizes[node] -= nbytes
        self._drop(digest, node)

    def forget(self, node: N) -> None:
        """The node has lost its cache, or is gone."""
        for digest in self._held.pop(node, ()):
            self._drop(digest, node)
        self._sizes.pop(node, None)

    def _drop(self, digest: int, node: N) -> None:
        holders = self._holders[digest]
        holders.discard(node)
        if not holders:
            del self._holders[digest]
