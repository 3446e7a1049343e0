"""The rules of the prefix cache one by one. Blocks hold 4 tokens; a path is written as a string, a letter per token."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from lmkit.turbo.kv.block_pool import BlockPool
from lmkit.turbo.kv.ledger import MAX_SAMPLES, Ledger
from lmkit.turbo.kv.radix_cache import HOLE, LONG_PATH, Match, RadixCache
from lmkit.turbo.kv.radix_tree import MAX_CANDIDATES, Node

ME, OTHER = ("me", ""), ("other", "")
NOTHING = Match([], 0, None)


def tokens(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], np.int32)


class Setup:
    def __init__(self, window: int = 0, sinks: int = 0, quota: int | None = None, num_blocks: int = 40) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = RadixCache(self.pool, 4, window=window, sinks=sinks, ledger=Ledger(quota))

    def match(self, text: str, namespace: tuple[str, str] = ME) -> Match:
        found = self.cache.match(namespace, tokens(text))
        self.cache.check_integrity()
        return found

    def insert(self, text: str, blocks: list[int], namespace: tuple[str, str] = ME) -> list[int]:
        """By a caller that goes on: it takes references on those blocks of the cache that are not its own."""
        kept = self.cache.insert(namespace, tokens(text), blocks)
        self.pool.share_all(block for block, own in zip(kept, blocks, strict=False) if block != own)
        self.cache.check_integrity()
        return kept

    def run(self, text: str, namespace: tuple[str, str] = ME) -> list[int]:
        """A sequence comes, leaves its KV in the cache, and goes; its blocks."""
        found = self.match(text, namespace).blocks
        self.pool.share_all(found)
        blocks = found + self.pool.allocate(-(-len(text) // 4) - len(found))
        self.insert(text, blocks, namespace)
        self.pool.free_all(blocks)
        self.cache.check_integrity()
        return blocks

    def evict(self, count: int) -> int:
        count = self.cache.evict(count)
        self.cache.check_integrity()
        return count

    def cached(self) -> set[int]:
        return {block for block in range(self.pool.num_blocks) if self.pool.is_cached(block)}


def test_finds_full_blocks_and_part_of_one_more() -> None:
    s = Setup()
    a, b, c = s.run("aaaabbbbcc")
    assert s.match("aaaabbbbcc") == Match([a, b], 10, c)
    assert s.match("aaaabbbbccc") == Match([a, b], 10, c)
    assert s.match("aaaabbbbc") == Match([a, b], 9, c)
    assert s.match("aaaabbbb") == Match([a, b], 8, None)
    assert s.match("aaaabbb") == Match([a], 7, b)
    assert s.match("aaaabbx") == Match([a], 6, b)
    assert s.match("aa") == Match([], 2, a)
    assert s.match("xaaa") == s.match("") == NOTHING


def test_takes_no_references() -> None:
    s = Setup()
    blocks = s.run("aaaabb")
    s.match("aaaabb")
    assert [s.pool.references(block) for block in blocks] == [1, 1]
    assert s.cache.num_blocks == s.pool.num_idle == 2


def test_the_tail_is_the_child_that_gives_most_and_of_equal_ones_that_used_last() -> None:
    s = Setup()
    one, two, three = s.run("aaaabbbb")[1], s.run("aaaabbcc")[1], s.run("aaaabx")[1]
    assert s.match("aaaabbbx").tail == one
    assert s.match("aaaabbxx").tail == two
    assert s.match("aaaabxbb").tail == three
    s.match("aaaabbbb")
    assert s.match("aaaabbxx").tail == one


def test_an_equal_partial_block_is_known_among_many_with_the_same_first_token() -> None:
    s = Setup()
    (block,) = s.run("abc")
    for i in range(MAX_CANDIDATES + 1):
        s.run(f"ax{i}y")
    assert s.match("abc") == Match([], 3, block)
    assert s.insert("abc", s.pool.allocate(1)) == []
    assert s.match("abc") == Match([], 3, block)


def test_namespaces_know_nothing_of_each_other_and_vanish_when_empty() -> None:
    s = Setup()
    s.run("aaaabb", ("me", "one"))
    s.run("aaaabb", ("me", "two"))
    assert s.match("aaaabb") == s.match("aaaabb", OTHER) == NOTHING
    assert len(s.cache._tree.roots) == 2
    s.evict(2)
    assert list(s.cache._tree.roots) == [("me", "two")]
    s.cache.clear()
    assert not s.cache._tree.roots
    assert not s.cache._tenants
    assert s.pool.num_free == 40


def test_tokens_that_are_there_keep_their_blocks() -> None:
    s = Setup()
    a, b = s.run("aaaabbbb")
    own = s.pool.allocate(3)
    assert s.insert("aaaabbbbcccc", own) == [a, b, own[2]]
    assert s.insert("aaaabbbb", own) == [a, b], "shorter"
    assert s.match("aaaabbbbcccc").blocks == [a, b, own[2]]


def test_runs_split_while_they_are_in_use() -> None:
    s = Setup()
    own = s.pool.allocate(4)
    s.insert("aaaabbbbccccdddd", own)
    other = s.run("aaaabbbbxxxxyyyy")
    assert other[:2] == own[:2]
    assert s.match("aaaabbbbccccdddd").blocks == own
    assert s.match("aaaabbbbxxxxyyyy").blocks == other
    assert s.evict(40) == 2, "only what the other one added is idle"
    s.pool.free_all(own)
    assert s.match("aaaabbbbccccdddd").blocks == own


def test_long_rows_of_short_runs_become_one() -> None:
    s = Setup(num_blocks=60)
    text = "".join(chr(i) * 4 for i in range(60))
    blocks = s.run(text)
    for end in range(4, 240, 4):
        assert s.match(text[:end]).blocks == blocks[: end // 4]
    assert s.match(text).blocks == blocks
    assert sum(not node.is_root for node in s.cache._tree) <= LONG_PATH
    s.match(text[:40])
    assert s.evict(50) == 50, "what was not matched again goes first"
    assert s.match(text).blocks == blocks[:10]


def test_a_longer_block_takes_the_place_of_shorter_ones() -> None:
    s = Setup()
    a, short = s.run("aaaab")
    longer = s.pool.allocate(2)
    s.insert("aaaabb", longer)  # beside an idle one
    assert s.cached() == {a, longer[1]}
    assert s.pool.references(short) == 0
    s.insert("aaaabbb", longer)  # the same block with more in it
    assert s.match("aaaabbb") == Match([a], 7, longer[1])
    full = s.pool.allocate(2)
    s.insert("aaaabbbb", full)  # the shorter one is in use
    assert s.cached() == {a, longer[1], full[1]}
    assert s.insert("aaaabb", s.pool.allocate(2)) == [a], "nothing new in a shorter one"
    assert s.cached() == {a, longer[1], full[1]}


def test_used_longest_ago_goes_first_then_the_deepest() -> None:
    s = Setup()
    a, b, c = s.run("aaaabbbbcc")
    x, y = s.run("xxxxyyyy")
    _, _, d = s.run("aaaabbbbdddd")
    order = []
    while s.pool.num_idle:
        before = s.cached()
        assert s.evict(1) == 1
        order += before - s.cached()
    assert order == [c, y, x, d, b, a]
    assert s.cache.num_evicted == 6
    assert s.evict(1) == 0


def test_a_match_is_a_use_of_what_it_finds_only() -> None:
    s = Setup()
    a, b, c = s.run("aaaabbbbcccc")
    x, y = s.run("xxxxyy")
    s.match("aaaazzzz")
    s.match("xxxx")
    assert s.evict(2) == 2
    assert s.cached() == {a, x, y}
    s.match("xxxxyy")
    s.match("xxxx")  # the tail is older than its path now
    s.match("aaaa")
    s.evict(1)
    assert s.cached() == {a, x}
    assert s.cached().isdisjoint({b, c})


def test_blocks_in_use_never_go() -> None:
    s = Setup()
    blocks = s.run("aaaabbbbcccc")
    s.pool.share_all(blocks[:2])
    assert s.evict(40) == 1
    s.cache.clear()
    assert s.match("aaaabbbbcccc").blocks == blocks[:2]
    s.pool.free_all(blocks[:2])
    assert s.evict(1) == 1
    assert s.match("aaaabbbbcccc").blocks == blocks[:1]


def test_a_run_that_was_cut_does_not_hold_the_memory_of_what_it_was() -> None:
    s = Setup(num_blocks=100)
    s.run("a" * 400)
    for _ in range(99):
        s.evict(1)
    (leaf,) = [node for node in s.cache._tree if node.blocks]
    assert leaf.tokens.size == 4
    assert leaf.tokens.base is None or leaf.tokens.base.size <= 8


def test_reserved_blocks_behind_the_last_token_are_ignored() -> None:
    s = Setup()
    blocks = s.pool.allocate(4)
    assert s.insert("aaaabb", blocks) == blocks[:1]
    assert s.cached() == set(blocks[:2])
    assert s.insert("", blocks) == []


def test_a_tenant_over_its_quota_loses_its_own_oldest() -> None:
    s = Setup(quota=3)
    theirs = s.run("aaaabbbbcccc", OTHER)
    old = s.run("aaaabbbb", ("me", "one"))
    new = s.run("xxxxyyyy", ("me", "two"))
    assert s.cached() == {*theirs, old[0], *new}
    assert s.cache.num_evicted == 1
    s.run("zzzzzz")
    assert s.match("zzzzzz").num_tokens == 6
    assert s.match("xxxx", ("me", "two")).num_tokens == 4


def test_what_has_no_room_in_the_quota_is_not_kept() -> None:
    s = Setup(quota=3)
    used = s.pool.allocate(2)
    s.insert("aaaabbbb", used)
    blocks = s.pool.allocate(3)
    assert s.insert("xxxxyyyyzz", blocks) == [blocks[0], HOLE]
    assert s.match("xxxxyyyyzz") == Match(blocks[:1], 4, None)
    s.pool.free_all(blocks)
    # The path itself is not taken apart to make room for its end.
    assert s.insert("aaaabbbbccccdd", used + s.pool.allocate(2))[2] != HOLE
    assert s.match("aaaabbbbccccdd").num_tokens == 12
    assert Setup(quota=0).run("aaaabb")
    none = Setup(quota=0)
    assert none.insert("aaaabb", none.pool.allocate(2)) == [HOLE]


def test_a_window_passes_over_holes_that_it_does_not_see() -> None:
    s = Setup(window=6)
    blocks = s.pool.allocate(5)
    s.insert("aaaabbbbccccddddee", blocks)
    s.pool.free_all(blocks[:3])  # position 18 sees 13 and on
    assert s.evict(40) == 3
    assert s.match("aaaabbbbccccddddee") == Match([HOLE, HOLE, HOLE, blocks[3]], 18, blocks[4])
    assert s.match("aaaabbbbccccdddd") == NOTHING, "position 16 sees 11 and 12 too, in a block that is gone"
    assert s.match("aaaabbbbccccddddeeee") == Match([HOLE, HOLE, HOLE, blocks[3]], 18, blocks[4])


def test_a_window_gives_the_longest_prefix_before_a_hole_it_would_see() -> None:
    s = Setup(window=6)
    blocks = s.pool.allocate(5)
    s.insert("aaaabbbbccccddddeeee", blocks)
    s.pool.free(blocks[2])
    assert s.evict(40) == 1
    assert s.match("aaaabbbbccccdddd") == Match(blocks[:2], 8, None)
    assert s.match("aaaabbbbccccddddeeee") == Match([HOLE, HOLE, HOLE, *blocks[3:]], 20, None)


def test_the_sinks_are_always_seen() -> None:
    s = Setup(window=6, sinks=2)
    blocks = s.pool.allocate(5)
    s.insert("aaaabbbbccccddddeeee", blocks)
    s.pool.free_all(blocks[1:3])
    assert s.evict(40) == 2
    assert s.match("aaaabbbbccccddddeeee").blocks == [blocks[0], HOLE, HOLE, *blocks[3:]]
    s.pool.free(blocks[0])
    assert s.evict(40) == 1
    assert s.match("aaaabbbbccccddddeeee") == NOTHING


def test_given_blocks_fill_holes() -> None:
    s = Setup(window=6)
    blocks = s.pool.allocate(3)
    assert s.insert("aaaabbbbcccc", [HOLE, *blocks[1:]]) == [HOLE, *blocks[1:]]
    assert s.match("aaaa") == NOTHING
    assert s.insert("aaaabbbb", [blocks[0], HOLE]) == blocks[:2]
    assert s.match("aaaa") == Match(blocks[:1], 4, None)


def test_with_a_window_the_oldest_tokens_of_a_node_go_first_and_empty_nodes_vanish() -> None:
    s = Setup(window=6)
    blocks = s.run("aaaabbbb")
    other = s.run("xxxx")
    s.evict(1)
    assert s.cached() == {blocks[1], *other}
    s.evict(1)
    assert s.cached() == set(other)
    assert s.match("aaaabbbb") == NOTHING
    assert sum(not node.is_root for node in s.cache._tree) == 1
    assert s.evict(1) == 1
    assert not s.cache._tree.roots


def test_what_a_window_has_left_ages() -> None:
    s = Setup(window=6)
    blocks = s.run("a" * 12 + "b" * 12)
    other = s.run("xxxx")
    s.match("a" * 12 + "b" * 12)
    assert s.evict(3) == 3
    assert s.cached() == {*blocks[3:], *other}
    s.evict(2)
    assert s.cached() == {*blocks[4:]}, "the other one went before those that were seen again"


def test_a_quota_keeps_the_sinks_and_what_a_window_still_sees() -> None:
    s = Setup(window=6, sinks=2, quota=3)
    blocks = s.pool.allocate(5)
    kept = [blocks[0], HOLE, HOLE, *blocks[3:]]
    assert s.insert("aaaabbbbccccddddeeee", blocks) == kept
    assert s.match("aaaabbbbccccddddeeee").blocks == kept


def test_tokens_of_another_type_are_refused() -> None:
    with pytest.raises(AssertionError, match="int32, not int64"):
        Setup().cache.match(ME, np.zeros(4, np.int64))


def _longest(cache: RadixCache) -> Node:
    return max(cache._tree, key=lambda node: len(node.blocks))


DAMAGE: dict[str, Callable[[Setup], object]] = {
    "twice": lambda s: _longest(s.cache).blocks.__setitem__(1, _longest(s.cache).blocks[0]),
    "without a window": lambda s: _longest(s.cache).blocks.__setitem__(0, HOLE),
    "not its block's tokens": lambda s: _longest(s.cache).tokens.__setitem__(0, 9),
    "other tokens than blocks": lambda s: setattr(_longest(s.cache), "tokens", _longest(s.cache).tokens[:9]),
    "node is empty": lambda s: setattr(_longest(s.cache), "blocks", []),
    "in no order": lambda s: s.cache._order.clear(),
    "of their use": lambda s: setattr(_longest(s.cache), "used", 0),
    "tenant is miscounted": lambda s: setattr(s.cache._tenants["me"], "num_blocks", 9),
    "over its quota": lambda s: setattr(s.cache._ledger, "quota", 1),
    "namespace is empty": lambda s: s.cache._tree.roots.update({OTHER: Node(OTHER, None, tokens(""), [])}),
    "but not the one before": lambda s: s.pool.share(_longest(s.cache).blocks[1]),
    "blocks are idle": lambda s: setattr(s.pool, "_num_idle", 1),
    "another parent": lambda s: setattr(_longest(s.cache), "parent", Node(ME, None, tokens(""), [])),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_check_integrity_sees_damage(message: str) -> None:
    s = Setup()
    s.run("aaaabbbbcccc")
    s.run("xxxx")
    s.match("aaaabbbbcccc")
    _ = [DAMAGE[message](s)]
    with pytest.raises(AssertionError, match=message):
        s.cache.check_integrity()


def test_what_was_used_since_a_time_is_all_there() -> None:
    """Against a record of all uses: texts of eight blocks, of which three fit, in a random order."""
    rng, setup = Random(0), Setup(num_blocks=24)
    cache, ledger = setup.cache, setup.cache._ledger
    used: dict[str, float] = {}
    assert ledger.kept_since(0.0) == 0.0
    for now in range(1, 300):
        used[name := rng.choice("abcdefgh")] = float(now)
        text = tokens(name * 32)
        if len(cache.match(ME, text).blocks) < 8:
            ledger.evict(8 - setup.pool.num_free)
            blocks = setup.pool.allocate(8)
            cache.insert(ME, text, blocks)
            setup.pool.free_all(blocks)
        since = ledger.kept_since(float(now))
        there = {name: sum(len(node.blocks) for node in cache._tree.find(ME, tokens(name * 32))) for name in used}
        assert all(there[name] == 8 for name, time in used.items() if time > since)
        assert all(there[name] < 8 for name, time in used.items() if time < since)
    assert len(ledger._samples) < 100, "samples of what is gone are dropped"


def test_the_record_of_uses_is_bounded() -> None:
    ledger = Ledger()
    for ledger.now in range(10_000):
        assert ledger.kept_since(ledger.now + 5.0) == 5.0
    assert len(ledger._samples) <= MAX_SAMPLES
