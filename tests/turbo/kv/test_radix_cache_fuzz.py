"""Random callers against a naive model: a dict from (namespace, all tokens up to a block's end) to the block."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from lmkit.turbo.kv.block_pool import HOLE, BlockPool
from lmkit.turbo.kv.ledger import Ledger
from lmkit.turbo.kv.radix_cache import Match, Namespace, RadixCache

SIZE = 3  # with two tokens at most 7 blocks compete for a place in a path, fewer than the cache looks at
Key = tuple[Namespace, tuple[int, ...]]


@dataclass
class Entry:
    block: int
    used: int


@dataclass
class User:
    """A running sequence as the scheduler has it: it owns one reference on each entry of its table."""

    namespace: Namespace
    tokens: list[int]
    table: list[int]
    extra: list[int]  # references on the cache's blocks where its own differ


class Model:
    """What the cache keeps and when each block was used, found by going through everything."""

    def __init__(self, pool: BlockPool, quota: int | None) -> None:
        self.pool, self.quota, self.now = pool, quota, 0
        self.entries: dict[Key, Entry] = {}

    def path(self, namespace: Namespace, tokens: list[int]) -> list[Entry]:
        found = []
        for end in range(SIZE, len(tokens) + 1, SIZE):
            if (entry := self.entries.get((namespace, tuple(tokens[:end])))) is None:
                break
            found.append(entry)
        return found

    def tail(self, namespace: Namespace, tokens: list[int], start: int) -> tuple[int, Key | None]:
        """How many tokens from `start` on the best block there gives; of equal ones the same one or that used last."""
        piece, best = tokens[start : start + SIZE], (0, False, 0)
        found = None
        for key, entry in self.entries.items():
            theirs = key[1]
            if key[0] == namespace and start < len(theirs) <= start + SIZE and theirs[:start] == tuple(tokens[:start]):
                common = next((i for i, (a, b) in enumerate(zip(piece, theirs[start:], strict=False)) if a != b), None)
                common = min(len(piece), len(theirs) - start) if common is None else common
                rank = (common, list(theirs[start:]) == piece, entry.used)
                if common and rank > best:
                    best, found = rank, key
        return best[0], found

    def match(self, namespace: Namespace, tokens: list[int]) -> tuple[list[int], int, int | None]:
        self.now += 1
        path = self.path(namespace, tokens)
        for entry in path:
            entry.used = self.now
        rest, key = self.tail(namespace, tokens, len(path) * SIZE)
        if key is not None and len(key[1]) % SIZE:
            self.entries[key].used = self.now
        blocks = [entry.block for entry in path]
        return blocks, len(blocks) * SIZE + rest, None if key is None else self.entries[key].block

    def idle(self, tenant: str | None = None, before: int | None = None) -> list[Key]:
        """In the order of their eviction."""
        keys = [k for k, e in self.entries.items() if self.pool.references(e.block) == 1 and tenant in (None, k[0][0])]
        keys = [k for k in keys if before is None or self.entries[k].used < before]
        return sorted(keys, key=lambda k: (self.entries[k].used, -len(k[1])))

    def remove(self, keys: list[Key]) -> None:
        for key in keys:
            del self.entries[key]

    def insert(self, namespace: Namespace, tokens: list[int], blocks: list[int]) -> list[int]:
        """Called before the cache's own insert, as it looks at the pool's counts."""
        self.now += 1
        path = self.path(namespace, tokens)
        for entry in path:
            entry.used = self.now
        done, full, rest = len(path), len(tokens) // SIZE, len(tokens) % SIZE
        piece = tokens[done * SIZE : (done + 1) * SIZE]
        common, covering = self.tail(namespace, tokens, done * SIZE)
        if piece and covering is not None and common == len(piece):
            rest = 0
            if len(covering[1]) % SIZE:
                self.entries[covering].used = self.now
        elif piece:
            for length in range(1, len(piece)):
                key = (namespace, tuple(tokens[: done * SIZE + length]))
                shorter = self.entries.get(key) if length % SIZE else None
                if shorter and (shorter.block == blocks[done] or self.pool.references(shorter.block) == 1):
                    del self.entries[key]
        wanted, room = full - done + bool(rest), full + 1
        if self.quota is not None:
            kept = sum(k[0][0] == namespace[0] for k in self.entries)
            victims = self.idle(namespace[0], self.now)[: max(kept + wanted - self.quota, 0)]
            self.remove(victims)
            room = self.quota - kept + len(victims)
        end = min(full, done + room)
        for i in range(done, end):
            self.entries[namespace, tuple(tokens[: (i + 1) * SIZE])] = Entry(blocks[i], self.now)
        if rest and end == full and room > full - done:
            self.entries[namespace, tuple(tokens)] = Entry(blocks[full], self.now)
        return [e.block for e in self.path(namespace, tokens)] + [HOLE] * (full - end)


class World:
    """A pool, the cache, its users, and what every block holds: (namespace, all tokens up to the last one in it)."""

    def __init__(self, seed: int, window: int = 0, sinks: int = 0, quota: int | None = None) -> None:
        self.rng = random.Random(seed)
        self.pool = BlockPool(40)
        self.window, self.sinks = window, sinks
        self.cache = RadixCache(self.pool, SIZE, window=window, sinks=sinks, ledger=Ledger(quota))
        self.model = Model(self.pool, quota)
        self.users: list[User] = []
        self.holds: dict[int, Key] = {}

    def allocate(self, count: int) -> list[int] | None:
        missing = count - self.pool.num_free
        if missing > 0:
            self.evict(missing)
        if count > self.pool.num_free:
            return None
        blocks = self.pool.allocate(count)
        assert not set(blocks) & {b for user in self.users for b in (*user.table, *user.extra)}, "a used block went"
        return blocks

    def evict(self, count: int) -> None:
        idle = self.pool.num_idle
        victims = self.model.idle()[:count]
        assert self.cache.evict(count) == min(count, idle)
        if not self.window:
            self.model.remove(victims)
            assert {b for b in range(40) if self.pool.is_cached(b)} == {e.block for e in self.model.entries.values()}

    def arrive(self) -> None:
        namespace = (self.rng.choice("ab"), self.rng.choice("xy"))
        tokens = self.tokens(self.rng.randint(1, 30))
        match = self.match(namespace, tokens)
        held = [*match.blocks, match.tail if match.tail is not None else HOLE]
        self.pool.share_all(held)
        need = -(-len(tokens) // SIZE)
        blocks = self.allocate(need - len(match.blocks))
        self.pool.free_all(held[-1:])  # copied by now
        if blocks is None:
            self.pool.free_all(match.blocks)
            return
        user = User(namespace, tokens, match.blocks + blocks, [])
        for i in range(len(match.blocks), need):
            self.holds[user.table[i]] = (namespace, tuple(tokens[: (i + 1) * SIZE]))
        self.users.append(user)

    def tokens(self, count: int) -> list[int]:
        """Often the beginning of those of another one."""
        shared = self.rng.choice(self.users).tokens[: self.rng.randint(0, count)] if self.users else []
        return shared + [self.rng.randrange(2) for _ in range(count - len(shared))]

    def match(self, namespace: Namespace, tokens: list[int]) -> Match:
        match = self.cache.match(namespace, np.array(tokens, np.int32))
        if self.window:
            self.check_window(namespace, tokens, match)
        else:
            assert (match.blocks, match.num_tokens, match.tail) == self.model.match(namespace, tokens)
        for i, block in enumerate(match.blocks):
            assert block == HOLE or self.holds[block] == (namespace, tuple(tokens[: (i + 1) * SIZE]))
        if match.tail is not None:
            where, theirs = self.holds[match.tail]
            assert where == namespace
            assert theirs[: match.num_tokens] == tuple(tokens[: match.num_tokens])
        return match

    def seen(self, position: int) -> set[int]:
        return {k for k in range(position) if k > position - self.window or k < self.sinks}

    def check_window(self, namespace: Namespace, tokens: list[int], match: Match) -> None:
        n = match.num_tokens
        assert all(k // SIZE == len(match.blocks) or match.blocks[k // SIZE] != HOLE for k in self.seen(n))
        assert (n % SIZE > 0) == (match.tail is not None)
        cached = set(self.full_blocks())
        for longer in range(n + 1, len(tokens) + 1):
            if longer % SIZE == 0:
                ends = {(k // SIZE + 1) * SIZE for k in self.seen(longer)}
                assert any((namespace, tuple(tokens[:e])) not in cached for e in ends), "a longer prefix was usable"

    def full_blocks(self) -> Iterator[Key]:
        """What the tree says it has."""
        for node in self.cache._tree:
            above, parent = np.zeros(0, np.int32), node.parent
            while parent is not None:
                above, parent = np.concatenate((parent.tokens, above)), parent.parent
            for i in range(len(node.tokens) // SIZE):
                if node.blocks[i] != HOLE:
                    yield node.namespace, (*above.tolist(), *node.tokens[: (i + 1) * SIZE].tolist())

    def publish(self, user: User) -> None:
        blocks = user.table + self.rng.choices(range(40), k=self.rng.randrange(2))  # reserved ones after do not matter
        expected = None if self.window else self.model.insert(user.namespace, user.tokens, blocks)
        kept = self.cache.insert(user.namespace, np.array(user.tokens, np.int32), blocks)
        assert expected in (None, kept)
        if self.cache._ledger.quota is None:
            assert all(b != HOLE or own == HOLE for b, own in zip(kept, user.table, strict=False)), "one was not kept"
        for i, block in enumerate(kept):
            if block not in (HOLE, user.table[i]):
                self.pool.share(block)
                if user.table[i] != HOLE and self.rng.random() < 0.5:
                    self.pool.free(user.table[i])
                    user.table[i] = block
                else:
                    user.extra.append(block)

    def grow(self, user: User) -> None:
        tokens = user.tokens + [self.rng.randrange(2) for _ in range(self.rng.randint(1, 7))]
        blocks = self.allocate(-(-len(tokens) // SIZE) - len(user.table))
        if blocks is None:
            return
        first = len(user.tokens) // SIZE
        user.tokens, user.table = tokens, user.table + blocks
        for i in range(first, len(user.table)):
            if user.table[i] != HOLE:
                self.holds[user.table[i]] = (user.namespace, tuple(tokens[: (i + 1) * SIZE]))

    def retire(self, user: User) -> None:
        """Give up what the next token does not see."""
        needed = {k // SIZE for k in self.seen(len(user.tokens))} | {len(user.tokens) // SIZE}
        for i in set(range(len(user.table))) - needed:
            self.pool.free_all([user.table[i]])
            user.table[i] = HOLE
        self.pool.free_all(user.extra)
        user.extra = []

    def leave(self, user: User) -> None:
        self.users.remove(user)
        self.pool.free_all(reversed(user.table + user.extra))

    def step(self) -> None:
        action = self.rng.randrange(8)
        if action < 2 or not self.users:
            self.arrive()
        elif action == 2:
            self.match((self.rng.choice("ab"), self.rng.choice("xy")), self.tokens(self.rng.randint(0, 30)))
        elif action == 7:
            self.evict(self.rng.randint(1, 6))
        else:
            user = self.rng.choice(self.users)
            if action == 6:
                self.leave(user)
            elif action == 5:
                self.grow(user)
            else:
                self.publish(user)
            if self.window and user in self.users:
                self.retire(user)


@pytest.mark.parametrize("quota", [None, 0, 1, 5, 12])
@pytest.mark.parametrize("window", [0, 2, 4, 9])
def test_agrees_with_a_naive_model(window: int, quota: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        monkeypatch.setattr("lmkit.turbo.kv.radix_cache.LONG_PATH", 2 if seed else 32)
        world = World(seed, window, sinks=4 if seed % 2 else 0, quota=quota)
        for _ in range(250):
            world.step()
            world.cache.check_integrity()
        for user in list(world.users):
            world.leave(user)
        world.cache.check_integrity()
        assert world.pool.num_free + world.pool.num_idle == 40
        world.cache.clear()
        world.cache.check_integrity()
        assert world.pool.num_free == 40, "all comes back"
        assert not world.cache._order, "nothing is left of the tree"
        assert not world.cache._tree.roots
        assert not world.cache._tenants
