"""The prefix cache: KV blocks outlive their sequences and are found again by the tokens whose KV they hold."""

from __future__ import annotations

import math
import sys
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import numpy as np

from lmkit.turbo.kv.block_log import BlockLog
from lmkit.turbo.kv.block_pool import HOLE as HOLE
from lmkit.turbo.kv.block_pool import BlockPool
from lmkit.turbo.kv.ledger import Ledger as Ledger
from lmkit.turbo.kv.radix_tree import Match as Match
from lmkit.turbo.kv.radix_tree import Namespace as Namespace
from lmkit.turbo.kv.radix_tree import Node, RadixTree, check_use
from lmkit.turbo.kv.window_view import WindowView
from lmkit.turbo.sequence import Sequence as Seq

LONG_PATH = 32  # nodes; joining shorter paths would cost more than it saves
Order = OrderedDict[Node, None]  # all nodes that hold blocks, least recently used first; within one use see `_seen`


@dataclass
class Tenant:
    num_blocks: int = 0
    order: Order = field(default_factory=OrderedDict)


class RadixCache:
    """Keeps blocks of `pool` in a radix tree. The cache holds one reference to each of them.

    A block with more references is in use and is never evicted. The other blocks are idle and are evicted one by one,
    the least recently used first. One use covers a whole path. Within one use the deepest block is evicted first, so
    the beginning of a path remains. This rests on a rule that the callers keep: a sequence that uses a block holds all
    blocks before it, even where the cache has other blocks for these tokens than the caller's own (see `insert`).

    With a sliding window, sequences give up blocks while they use later ones. Idle blocks may therefore be evicted
    anywhere in a path: the oldest tokens first, but the sinks last. A later match passes over HOLEs before its window.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        window: int = 0,
        sinks: int = 0,
        stripe: int = 1,
        ledger: Ledger | None = None,
        whole_tails: bool = False,
    ) -> None:
        """window: a token at position p sees keys > p - window and the first `sinks` keys; all keys before it if 0.

        stripe: pool blocks that make one block of the cache. ledger: shared by all caches. whole_tails: see RadixTree.
        """
        self.stripe = stripe
        self.num_evicted = 0
        self.log: BlockLog | None = None  # None = nobody wants to know
        self._pool = pool
        self._ledger = ledger or Ledger()
        self._ledger.caches.append(self)
        self._block_size = block_size
        self._window = window
        self._view = WindowView(window, -(-sinks // block_size) if window else 0, block_size)
        # A use marks a whole node. Nodes are short, so blocks that a window has left do not stay as recent as its own.
        self._max_run = window // block_size + 1 if window else sys.maxsize
        self._tree = RadixTree(block_size, whole_tails)
        self._partial: dict[int, Node] = {}  # by block
        self._order: Order = OrderedDict()
        self._tenants: dict[str, Tenant] = {}

    @property
    def num_blocks(self) -> int:
        return sum(tenant.num_blocks for tenant in self._tenants.values())

    def match(self, namespace: Namespace, tokens: np.ndarray) -> Match:
        """Find the longest usable prefix of `tokens` (int32 [n]). This counts as a use, but takes no references."""
        self._ledger.now += 1
        path = self._find(namespace, tokens)
        blocks = _blocks_of(path)
        at = len(blocks) * self._block_size
        tail, rest = self._tree.fitting(path[-1], tokens[at : at + self._block_size])
        usable = self._view.usable(blocks, rest)
        if usable < len(blocks):
            del blocks[usable:]
            tail, rest = None, 0
        num_tokens = usable * self._block_size + rest
        unseen = self._view.first_seen(num_tokens) - self._view.sink_blocks
        if unseen > 0:
            blocks[self._view.sink_blocks : self._view.sink_blocks + unseen] = [HOLE] * unseen
        path += [tail] if tail is not None and self._tree.is_partial(tail) else []
        self._touch(self._seen(path, num_tokens))
        return Match(blocks, num_tokens, None if tail is None else tail.blocks[0])

    def insert(self, namespace: Namespace, tokens: np.ndarray, blocks: list[int], seq: Seq | None = None) -> list[int]:
        """Remember that the KV of `tokens` (int32 [n]), of `seq`, lies in `blocks`, which the caller holds.

        The last block may be partly filled. Blocks that a window has passed may be HOLE. Blocks after the last token
        are ignored. Returns the cache's block for each full block: the given one if it is new, another if the cache had
        these tokens, HOLE if it keeps none. A caller that goes on must hold each block that is not its own.
        """
        self._ledger.now += 1
        size = self._block_size
        full, rest = divmod(len(tokens), size)
        path = self._find(namespace, tokens)
        self._touch(self._seen(path, len(tokens)))
        kept = _blocks_of(path)
        done = len(kept)
        if (rest or done < full) and blocks[done] != HOLE:
            covered = self._replace_shorter(path[-1], tokens[done * size : (done + 1) * size], blocks[done])
            rest = 0 if covered else rest
        holes = [i for i in range(done) if kept[i] == HOLE] if HOLE in kept else []
        missing = [i for i in holes + list(range(done, full)) if blocks[i] != HOLE]
        for i in missing + [full] * bool(rest):
            if (node := self._partial.get(blocks[i])) is not None:  # the caller's block from before it was full
                self._remove_partial(node)
        room = self._make_room(namespace[0], len(missing) + bool(rest))
        chosen = self._view.choose(missing, room)
        kept = _blocks_of(path) + [HOLE] * (full - done)  # read again: making room may have evicted some
        for i in chosen:
            kept[i] = blocks[i]
        self._keep(namespace[0], [blocks[i] for i in chosen])
        if self.log is not None:
            self.log.stored(namespace, tokens, kept, chosen, seq)
        self._fill(path, kept)
        end = self._grow(path, tokens, kept, done)
        if rest and end == full and len(chosen) < room and blocks[full] != HOLE:
            self._keep(namespace[0], [blocks[full]])
            path.append(self._tree.attach(path[-1], tokens[full * size :], [blocks[full]]))
            self._partial[blocks[full]] = path[-1]
        self._touch(self._seen(path, len(tokens)))
        self._forget(self._tree.prune(path[-1]))
        return kept

    def oldest(self, tenant: str | None = None) -> float:
        """The last use of the idle block that an eviction takes first; inf if none is idle."""
        references = self._pool.references
        for node in self._order_of(tenant):
            blocks = node.blocks if self._window else node.blocks[-1:] if not node.children else []
            if any(block != HOLE and references(block) == 1 for block in blocks):
                return node.used
        return math.inf

    def evict(self, count: int, tenant: str | None = None, *, until: float = math.inf, spare: int | None = None) -> int:
        """Evict up to `count` idle blocks. Returns the number of evicted blocks.

        If `tenant` is given, only its blocks are evicted. Only blocks last used up to `until` are evicted, and the path
        that is used at `spare` is kept.
        """
        evicted = self._evict(self._order_of(tenant), count, until, spare)
        self.num_evicted += evicted
        return evicted

    def _order_of(self, tenant: str | None) -> Order:
        if tenant is None:
            return self._order
        return self._tenants[tenant].order if tenant in self._tenants else OrderedDict()

    def derived(self, namespace: Namespace, tokens: np.ndarray, index: int) -> list[Node]:
        """The nodes with block `index` of `tokens`, or with a copy of its first tokens, and below; parents first."""
        self._ledger.now += 1
        at = index * self._block_size
        path = self._tree.find(namespace, tokens[:at])  # it is split there
        self._touch(self._seen(path, at))
        alike = path[-1].children.get(tokens[at : at + 1].tobytes(), {}) if len(_blocks_of(path)) == index else {}
        return list(self._tree.below(*alike.values()))

    def remove(self, nodes: list[Node]) -> None:
        """Drop what `derived` has found, in use or not."""
        above, namespace = nodes[0].parent, nodes[0].namespace
        blocks = [block for block in _blocks_of(nodes) if block != HOLE]
        assert above is not None, "a root was to be removed"
        for node in reversed(nodes):
            self._tree.detach(node)
        for block in blocks:
            self._partial.pop(block, None)
        self._count(namespace[0], -len(blocks))
        self._pool.drop(blocks)
        if self.log is not None:
            self.log.removed(blocks)
        self._forget([*nodes, *self._tree.prune(above)])

    def clear(self) -> None:
        """Evict all idle blocks."""
        self._evict(self._order, self._pool.num_idle)

    # Sliding windows

    def _seen(self, path: list[Node], num_tokens: int) -> list[Node]:
        """The nodes of a path that a query at `num_tokens` sees, its last node, and nodes that are in no order yet.

        The most useful nodes come first: the beginning, or with a window the sinks and then the latest tokens.
        """
        if not self._window:
            return path
        sinks, later, start, first = [], [], 0, self._view.first_seen(num_tokens)
        for node in path:
            end = start + len(node.blocks)
            if start < self._view.sink_blocks:
                sinks.append(node)
            elif end > first or node is path[-1] or node not in self._order:
                later.append(node)
            start = end
        return sinks + later[::-1]

    def _fill(self, path: list[Node], kept: list[int]) -> None:
        """Replace the path's HOLEs by the blocks in `kept`."""
        if self._window:
            at = 0
            for node in path:
                node.blocks = kept[at : at + len(node.blocks)]
                at += len(node.blocks)

    # Growing

    def _replace_shorter(self, parent: Node, tokens: np.ndarray, block: int) -> bool:
        """Whether `tokens` (those of one block or fewer) are already below `parent`, where `block` is to be attached.

        If not, remove the partial nodes that `block` makes superfluous: idle ones, and a node of the same block.
        """
        fitting, length = self._tree.fitting(parent, tokens)
        if fitting is not None and length == len(tokens):
            if self._tree.is_partial(fitting):
                self._touch([fitting])
            return True
        for node in self._tree.shorter(parent, tokens):
            if node.blocks[0] == block or self._pool.references(node.blocks[0]) == 1:
                self._remove_partial(node)
        return False

    def _remove_partial(self, node: Node) -> None:
        (block,) = node.blocks
        del self._partial[block]
        self._tree.detach(node)
        self._pool.drop([block])
        self._count(node.namespace[0], -1)
        self._forget([node])

    def _grow(self, path: list[Node], tokens: np.ndarray, kept: list[int], done: int) -> int:
        """Attach the blocks of `kept` from `done` on below the path, and extend the path. Returns where they end."""
        end = len(kept)
        while end > done and kept[end - 1] == HOLE:
            end -= 1
        size = self._block_size
        while done < end:
            node, run = path[-1], kept[done : min(end, done + self._max_run)]
            run_tokens = tokens[done * size : (done + len(run)) * size]
            if node.is_root or node.children or len(node.blocks) + len(run) > self._max_run:
                path.append(self._tree.attach(node, run_tokens, run))
            else:
                self._tree.extend(node, run_tokens, run)
            done += len(run)
        return end

    def _keep(self, tenant: str, blocks: list[int]) -> None:
        if blocks:
            self._pool.keep(blocks)
            self._count(tenant, len(blocks))

    # Using and evicting

    def _find(self, namespace: Namespace, tokens: np.ndarray) -> list[Node]:
        """The path of `tokens` from its root. The caller touches all of its nodes."""
        path = self._tree.find(namespace, tokens)
        if len(path) > LONG_PATH and not self._window:  # the whole path is used now: one node is enough
            path, gone = self._tree.join(path)
            self._forget(gone)
        return path

    def _touch(self, nodes: list[Node]) -> None:
        """Mark these nodes of a path as used now. The most useful nodes stand first and are evicted last."""
        tenant = self._tenants.get(nodes[-1].namespace[0])
        if tenant is None:
            return  # the path is an empty root
        orders = [self._order] if self._ledger.quota is None else [self._order, tenant.order]
        for node in reversed(nodes):
            if node.is_root:
                continue
            node.used = self._ledger.now
            for order in orders:
                order[node] = None
                order.move_to_end(node)
            siblings = node.siblings()
            if len(siblings) > 1:
                siblings[node.key] = siblings.pop(node.key)

    def _make_room(self, tenant: str, count: int) -> int:
        """Evict the tenant's blocks as far as needed. Returns how many of `count` more blocks it may keep."""
        ledger = self._ledger
        if ledger.quota is None:
            return count
        ledger.evict(ledger.held[tenant] + count * self.stripe - ledger.quota, tenant, spare=ledger.now)
        return min(count, max(ledger.quota - ledger.held[tenant], 0) // self.stripe)

    def _count(self, tenant: str, change: int) -> None:
        """Count `change` more blocks for the tenant."""
        self._tenants.setdefault(tenant, Tenant()).num_blocks += change
        held = self._ledger.held
        held[tenant] += change * self.stripe
        if not held[tenant]:
            del held[tenant]

    def _evict(self, order: Order, count: int, until: float = math.inf, spare: int | None = None) -> int:
        """Drop up to `count` idle blocks of nodes in `order` that were used up to `until`. Returns their number."""
        victims: list[int] = []
        gone: list[Node] = []  # removed from `order` after the loop over it
        count = min(count, self._pool.num_idle)
        for node in order:
            if len(victims) >= count or node.used > until or node.used == spare:
                break
            found = (self._punch if self._window else self._cut)(node, count - len(victims))
            victims += found
            self._count(node.namespace[0], -len(found))
            if found and not node.children:
                gone += self._tree.prune(node, spare)
            elif self._window and node.is_hollow():
                gone.append(node)
        for block in victims:
            self._partial.pop(block, None)
        self._pool.drop(victims)
        if self.log is not None:
            self.log.removed(victims)
        self._forget(gone)
        return len(victims)

    def _cut(self, leaf: Node, count: int) -> list[int]:
        """Remove up to `count` idle blocks from the end of a leaf."""
        if leaf.children:
            return []
        references, start = self._pool.references, len(leaf.blocks)
        least = max(start - count, 0)
        while start > least and references(leaf.blocks[start - 1]) == 1:
            start -= 1
        victims = leaf.blocks[start:][::-1]
        del leaf.blocks[start:]
        return victims

    def _punch(self, node: Node, count: int) -> list[int]:
        """Remove up to `count` idle blocks from a node, the oldest tokens first. They leave HOLEs."""
        victims: list[int] = []
        for i, block in enumerate(node.blocks):
            if len(victims) == count:
                break
            if block != HOLE and self._pool.references(block) == 1:
                victims.append(block)
                node.blocks[i] = HOLE
        return victims

    def _forget(self, nodes: list[Node]) -> None:
        for node in nodes:
            self._order.pop(node, None)
            tenant = self._tenants.get(node.namespace[0])
            if tenant is not None:
                tenant.order.pop(node, None)
                if not tenant.num_blocks and not tenant.order:  # during an insert it may have none for a moment
                    del self._tenants[node.namespace[0]]

    # Checking

    def check_integrity(self) -> None:
        """Check that the tree, the orders, the counts and the pool agree. O(blocks and tokens in the cache)."""
        nodes = list(self._tree)
        held: list[int] = []
        counts: Counter[str] = Counter()
        for node in nodes:
            self._tree.check(node)
            if not self._window:
                check_use(node, self._pool.references)
            blocks = [block for block in node.blocks if block != HOLE]
            held += blocks
            counts[node.namespace[0]] += len(blocks)
        self._pool.check_integrity()
        partial = {node.blocks[0]: node for node in nodes if self._tree.is_partial(node) and node.blocks[0] != HOLE}
        assert partial == self._partial, "partly filled blocks are out of the books"
        assert len(set(held)) == len(held), "a block is in the tree twice"
        assert all(map(self._pool.is_cached, held)), "a block of the tree is not marked as cached"
        assert all(root.children for root in self._tree.roots.values()), "a namespace is empty"
        assert counts == {name: tenant.num_blocks for name, tenant in self._tenants.items()}, "a tenant is miscounted"
        ledger = self._ledger
        if len(ledger.caches) == 1:
            assert ledger.held == {name: count * self.stripe for name, count in counts.items()}, "the ledger is wrong"
            assert len(held) * self.stripe == self._pool.num_cached, "a cached block is not in the tree"
        assert ledger.quota is None or max(ledger.held.values(), default=0) <= ledger.quota, "one is over its quota"
        live = {node for node in nodes if not node.is_root and not node.is_hollow()}
        orders: dict[str | None, Order] = {None: self._order}
        if ledger.quota is not None:
            orders |= {name: tenant.order for name, tenant in self._tenants.items()}
        for name, order in orders.items():
            mine = {node for node in live if name in (None, node.namespace[0])}
            assert mine <= order.keys() <= set(nodes), "a node with blocks is in no order, or a lost one is"
            used = [node.used for node in order]
            assert used == sorted(used), "nodes are not in the order of their use"


def _blocks_of(path: list[Node]) -> list[int]:
    return [block for node in path for block in node.blocks]
