"""A compressed radix tree over blocks of tokens. It maps tokens to the blocks with their KV: ids only, no policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from lmkit.turbo.kv.block_pool import HOLE

Namespace = tuple[str, str]  # (tenant, anything else that decides a block's content: cache salt, later an adapter)

TOKEN_BYTES = 4
MAX_CANDIDATES = 8  # children that the search for a partly fitting block compares


@dataclass(frozen=True)
class Match:
    """The longest prefix that does not need to be computed.

    With a sliding window it is valid only for queries at `num_tokens` and later. A caller that wants fewer tokens must
    match again.
    """

    blocks: list[int]  # its full blocks in order; HOLE where the sliding window hides a block from all such queries
    num_tokens: int  # len(blocks) * block_size, plus the tokens of `tail`
    tail: int | None  # a block whose first num_tokens % block_size tokens fit as well: copy it before you write


class Node:
    """An edge and its subtree. The edge is a run of blocks that is used and evicted as one until it has to be split.

        tokens [ t0 ... t31 | t32 ... t63 | ... ]   int32
        blocks [     17     |     HOLE    | ... ]   HOLE: evicted, although later blocks are still there

    A root has neither tokens nor blocks. A *partial* node is a leaf of one block that is not full.
    """

    __slots__ = ("blocks", "children", "key", "namespace", "parent", "tokens", "used")

    def __init__(self, namespace: Namespace, parent: Node | None, tokens: np.ndarray, blocks: list[int]) -> None:
        self.namespace = namespace
        self.parent = parent
        self.tokens = tokens  # int32 [<= len(blocks) * block_size]
        self.blocks = blocks
        self.key = b""  # bytes of the first block's tokens
        # First token -> key -> child; the most recently used child stands last. The inner dict finds the child that
        # begins with a given whole block. The outer dict limits the search for a partly fitting block to children
        # with the same first token.
        self.children: dict[bytes, dict[bytes, Node]] = {}
        self.used = 0  # time of the last use, in ticks of the cache's clock

    @property
    def is_root(self) -> bool:
        return not self.key

    def is_hollow(self) -> bool:
        return self.blocks.count(HOLE) == len(self.blocks)

    def has_one_child(self) -> bool:
        return len(self.children) == 1 and len(next(iter(self.children.values()))) == 1

    def siblings(self) -> dict[bytes, Node]:
        """The children of its parent with the same first token, including itself."""
        assert self.parent is not None
        return self.parent.children[self.key[:TOKEN_BYTES]]


class RadixTree:
    """One root per namespace. A root lives as long as it has children.

    A match compares the tokens themselves: a key is all bytes of a block, and the rest of a run is compared as arrays.
    """

    def __init__(self, block_size: int, whole_tails: bool = False) -> None:
        """whole_tails: only partial nodes fit, each with all of its tokens, because a state stands after them."""
        self.block_size, self._whole_tails = block_size, whole_tails
        self.roots: dict[Namespace, Node] = {}

    def __iter__(self) -> Iterator[Node]:
        """All nodes, parents first."""
        return self.below(*self.roots.values())

    def below(self, *nodes: Node) -> Iterator[Node]:
        """These nodes and all that continue them, parents first."""
        stack = list(nodes)
        while stack:
            yield (node := stack.pop())
            stack += [child for group in node.children.values() for child in group.values()]

    def find(self, namespace: Namespace, tokens: np.ndarray) -> list[Node]:
        """Find the path, from the root, of the full blocks of `tokens` (int32 [n]) that are in the tree.

        The node in which they end is split, so that the whole path belongs to `tokens`.
        """
        assert tokens.dtype == np.int32, f"tokens are int32, not {tokens.dtype}"
        node = self.roots.get(namespace) or Node(namespace, None, tokens[:0], [])
        path = [node]
        at, end = 0, len(tokens) // self.block_size * self.block_size
        while at < end:
            key = tokens[at : at + self.block_size].tobytes()
            group = node.children.get(key[:TOKEN_BYTES])
            if group is None or (child := group.get(key)) is None:
                break
            same = 1  # the first block is the key
            if len(child.blocks) > 1:
                same = common_length(child.tokens, tokens[at:end]) // self.block_size
            node = child if same == len(child.blocks) else self._split(child, same)
            path.append(node)
            at += same * self.block_size
        return path

    def fitting(self, node: Node, tokens: np.ndarray) -> tuple[Node | None, int]:
        """The child of `node` whose first block begins with the most of `tokens`, and the number of these tokens.

        Only some children are compared: an equal one, and the most recently used ones with the same first token.
        """
        if self._whole_tails:
            tail = self._beginning(node, tokens)
            return tail, 0 if tail is None else len(tail.tokens)
        key = tokens.tobytes()
        group = node.children.get(key[:TOKEN_BYTES], {})
        equal = [group[key]] if key in group else []
        best, longest = None, 0
        for child in (*equal, *islice(reversed(group.values()), MAX_CANDIDATES)):
            length = common_length(child.tokens[: self.block_size], tokens)
            if length > longest and child.blocks[0] != HOLE:
                best, longest = child, length
        return best, longest

    def _beginning(self, node: Node, tokens: np.ndarray) -> Node | None:
        """The longest partial child of `node` all of whose tokens come first in `tokens`."""
        key = tokens[: self.block_size - 1].tobytes()
        group = node.children.get(key[:TOKEN_BYTES], {})
        lengths = range(len(key), 0, -TOKEN_BYTES) if group else ()
        return next((group[key[:length]] for length in lengths if key[:length] in group), None)

    def shorter(self, node: Node, tokens: np.ndarray) -> list[Node]:
        """The partial children of `node` whose tokens are a proper prefix of `tokens`."""
        key = tokens.tobytes()
        group = node.children.get(key[:TOKEN_BYTES], {})
        lengths = range(TOKEN_BYTES, len(key), TOKEN_BYTES)
        return [group[key[:length]] for length in lengths if key[:length] in group]

    def is_partial(self, node: Node) -> bool:
        return 0 < len(node.tokens) < self.block_size

    def attach(self, parent: Node, tokens: np.ndarray, blocks: list[int]) -> Node:
        """Add a new child. The parent must not have its key yet."""
        node = Node(parent.namespace, parent, tokens.copy(), blocks)
        self._hang(node, parent)
        if parent.is_root:
            self.roots[parent.namespace] = parent
        return node

    def extend(self, leaf: Node, tokens: np.ndarray, blocks: list[int]) -> None:
        leaf.tokens = np.concatenate((leaf.tokens, tokens))
        leaf.blocks += blocks

    def join(self, path: list[Node]) -> tuple[list[Node], list[Node]]:
        """Join each row of only children on a path from its root into one node. Returns (new path, removed nodes)."""
        joined, gone, start = path[:1], [], 1
        for end, node in enumerate(path[1:], 2):
            if end == len(path) or not node.has_one_child():
                if end - start > 1:
                    self._join(path[start:end])
                joined.append(node)
                gone += path[start : end - 1]
                start = end
        return joined, gone

    def detach(self, leaf: Node) -> None:
        parent, group = leaf.parent, leaf.siblings()
        assert parent is not None
        assert not leaf.children, "a node with children cannot be taken out"
        del group[leaf.key]
        if not group:
            del parent.children[leaf.key[:TOKEN_BYTES]]
        if parent.is_root and not parent.children:
            self.roots.pop(parent.namespace, None)
        leaf.parent = None

    def prune(self, node: Node, spare: int | None = None) -> list[Node]:
        """Cut the HOLEs off the end of a leaf, and detach the leaf if nothing is left. Then do the same to its parents.

        Nodes used at `spare` stay. Returns the detached nodes.
        """
        gone = []
        while node.parent is not None and not node.children and node.used != spare:
            while node.blocks and node.blocks[-1] == HOLE:
                node.blocks.pop()
            if node.blocks:
                node.tokens = shortened(node.tokens, len(node.blocks) * self.block_size)
                break
            parent = node.parent
            self.detach(node)
            gone.append(node)
            node = parent
        return gone

    def check(self, node: Node) -> None:
        """Check that the node fits its place in the tree. Raises AssertionError."""
        for child in (child for group in node.children.values() for child in group.values()):
            assert child.parent is node, "a child has another parent"
            assert child.siblings()[child.key] is child, "a child hangs elsewhere"
            assert child.namespace == node.namespace, "a child has another namespace"
        if node.is_root:
            return
        assert node.key == node.tokens[: self.block_size].tobytes(), "a key is not its block's tokens"
        assert node.blocks, "a node is empty"
        if self.is_partial(node):
            assert len(node.blocks) == 1, "a partial node has more than a block"
            assert not node.children, "a partial block is not the end"
        else:
            assert len(node.tokens) == len(node.blocks) * self.block_size, "a run has other tokens than blocks"
        assert node.children or node.blocks[-1] != HOLE, "a leaf ends in a hole"

    def _join(self, row: list[Node]) -> None:
        """Make the last node of the row take over the runs of all and the place of the first."""
        first, last = row[0], row[-1]
        first.siblings()[first.key] = last
        last.key, last.parent = first.key, first.parent
        last.tokens = np.concatenate([node.tokens for node in row])
        last.blocks = [block for node in row for block in node.blocks]
        for node in row[:-1]:
            node.parent = None

    def _split(self, node: Node, num_blocks: int) -> Node:
        """Move the first `num_blocks` blocks of the run to a new parent. `node` keeps the rest and its children."""
        at = num_blocks * self.block_size
        upper = Node(node.namespace, node.parent, node.tokens[:at].copy(), node.blocks[:num_blocks])
        upper.key, upper.used = node.key, node.used
        node.siblings()[node.key] = upper
        node.tokens, node.blocks = node.tokens[at:].copy(), node.blocks[num_blocks:]
        self._hang(node, upper)
        return upper

    def _hang(self, node: Node, parent: Node) -> None:
        node.parent, node.key = parent, node.tokens[: self.block_size].tobytes()
        parent.children.setdefault(node.key[:TOKEN_BYTES], {})[node.key] = node


def check_use(node: Node, references: Callable[[int], int]) -> None:
    """Check that a node without a window is used with those before it. Raises AssertionError."""
    for child in (child for group in node.children.values() for child in group.values()):
        assert node.is_root or child.used <= node.used, "a child was used without its parent"
    assert HOLE not in node.blocks, "a hole without a window"
    if not node.is_root:
        assert node.parent is not None
        run = node.parent.blocks[-1:] + node.blocks
        in_use = [references(block) > 1 for block in run]
        assert in_use == sorted(in_use, reverse=True), "a block is in use, but not the one before it"


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """The length of the common prefix of `a` and `b`."""
    length = min(len(a), len(b))
    if not length:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


def shortened(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return the first `length` tokens.

    The result is a view, because a run is often cut block by block, but never of an array of more than twice its size.
    """
    view = tokens[:length]
    return view if view.base is None or view.base.size <= 2 * length else view.copy()
