"""Finds the node that keeps a response, a chat, a conversation, a file or a batch: what concerns it goes there.

The id is read in passing from the head of the answer that makes it, except for chats: few are stored. The nodes are
asked for an id that this proxy does not know: it was started again, or stands beside another.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from lmkit.proxy.registry import Node, Registry
from lmkit.web.upstream import UpstreamError

PATH, FILES, BATCHES = "/v1/responses", "/v1/files", "/v1/batches"
CHATS, CONVERSATIONS = "/v1/chat/completions", "/v1/conversations"
REMEMBERED = 100_000  # ids; the one that was used longest ago is forgotten
ASK_SECONDS = 5.0  # for one node to say whether it has a response
ASKED_AT_ONCE = 32  # nodes, by all clients together: one request must not become a thousand at once
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_MADE = re.compile(rb'"id": ?"((?:resp_|file-|batch_|conv_)[A-Za-z0-9_-]{1,121})"')
_HEAD_BYTES = 4096
_BELOW = re.compile(
    rf"({PATH}|{FILES}|{BATCHES}|{CHATS}|{CONVERSATIONS})/({_ID.pattern})((?:/[a-z_]+)?)(/{_ID.pattern})?"
)
_METHODS: dict[tuple[str, str], tuple[str, ...]] = {  # by root, and what follows the id
    (PATH, ""): ("GET", "DELETE"), (PATH, "/cancel"): ("POST",), (PATH, "/input_items"): ("GET",),
    (FILES, ""): ("GET", "DELETE"), (FILES, "/content"): ("GET",),
    (BATCHES, ""): ("GET",), (BATCHES, "/cancel"): ("POST",),
    (CHATS, ""): ("GET", "POST", "DELETE"), (CHATS, "/messages"): ("GET",),
    (CONVERSATIONS, ""): ("GET", "POST", "DELETE"), (CONVERSATIONS, "/items"): ("GET", "POST"),
    (CONVERSATIONS, "/items/ID"): ("GET", "DELETE"),
}  # fmt: skip

Ask = Callable[[Node, str], Awaitable[bool]]  # whether a node has the path


class Named(NamedTuple):
    """A path that names something kept."""

    root: str  # PATH, FILES, BATCHES, CHATS or CONVERSATIONS
    id: str
    methods: tuple[str, ...]


def named_by(path: str) -> Named | None:
    """What a path names, if it is one below a root."""
    match = _BELOW.fullmatch(path)
    methods = _METHODS.get((match[1], match[3] + ("/ID" if match[4] else ""))) if match else None
    return Named(match[1], match[2], methods) if match and methods else None


class Keepers:
    """The ids of what nodes keep, and the nodes."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._nodes = OrderedDict[str, Node]()
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)

    def learn(self, node: Node, piece: bytes) -> None:
        """Read the id of what is new. `piece` is the first of an answer."""
        if made := _MADE.search(piece, 0, _HEAD_BYTES):
            self.remember(made[1].decode(), node)

    def remember(self, id: str, node: Node) -> None:
        """`node` keeps `id`, from now on."""
        self._nodes[id] = node
        self._nodes.move_to_end(id)
        if len(self._nodes) > REMEMBERED:
            self._nodes.popitem(last=False)

    def able(self, client_is_named: bool) -> list[Node]:
        """The nodes that may keep something for a client.

        A node that does not learn whose request it gets cannot keep clients apart, so it counts only if there is one.
        """
        return [n for n in self._registry.nodes() if n.config.tenants == "header" or not client_is_named]

    async def keeper(self, root: str, id: str, client_is_named: bool, ask: Ask) -> Node | None:
        """The node that keeps `id`, below the path `root`; None if no healthy one does."""
        if not _ID.fullmatch(id):
            return None
        known, able = self._nodes.get(id), self.able(client_is_named)
        if known in able:
            return known
        healthy = [node for node in able if node.healthy]
        answers = await asyncio.gather(*(self._has(node, f"{root}/{id}", ask) for node in healthy))
        found = next((node for node, has in zip(healthy, answers, strict=True) if has), None)
        if found is not None:
            self.remember(id, found)
        return found

    async def _has(self, node: Node, path: str, ask: Ask) -> bool:
        async with self._asking:
            try:
                async with asyncio.timeout(ASK_SECONDS):
                    return await ask(node, path)
            except (UpstreamError, ValueError, TimeoutError):  # ValueError: a header cannot be sent on
                return False
