"""Finds the node that keeps a stored response (/v1/responses), so that all that concerns it goes there.

The id is read in passing from the head of the answer that makes it. The nodes are asked for one that this proxy has
not seen: it was started again, or stands beside another.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from lmkit.proxy.registry import Node, Registry
from lmkit.proxy.upstream import UpstreamError

PATH = "/v1/responses"
REMEMBERED = 100_000  # ids; the one that was used longest ago is forgotten
ASK_SECONDS = 5.0  # for one node to say whether it has a response
ASKED_AT_ONCE = 32  # nodes, by all clients together: one request must not become a thousand at once
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_MADE = re.compile(rb'"id": ?"(resp_[A-Za-z0-9_-]{1,123})"')
_HEAD_BYTES = 4096
_BELOW = re.compile(rf"{PATH}/({_ID.pattern})(/cancel|/input_items)?")
_METHODS = {None: ("GET", "DELETE"), "/cancel": ("POST",), "/input_items": ("GET",)}

Ask = Callable[[Node, str], Awaitable[bool]]  # whether a node has the path


def response_of(path: str) -> tuple[str, tuple[str, ...]] | None:
    """(id, methods) of a path below /v1/responses that names a response."""
    match = _BELOW.fullmatch(path)
    return (match[1], _METHODS[match[2]]) if match else None


class StoredResponses:
    """The ids of responses and their nodes."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._nodes = OrderedDict[str, Node]()
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)

    def learn(self, node: Node, piece: bytes) -> None:
        """Read the id of a new response. `piece` is the first of an answer."""
        if made := _MADE.search(piece, 0, _HEAD_BYTES):
            self.remember(made[1].decode(), node)

    def remember(self, id: str, node: Node) -> None:
        """`node` keeps the response `id`, from now on."""
        self._nodes[id] = node
        self._nodes.move_to_end(id)
        if len(self._nodes) > REMEMBERED:
            self._nodes.popitem(last=False)

    async def keeper(self, id: str, client_is_named: bool, ask: Ask) -> Node | None:
        """The node that keeps a response; None if no healthy one does.

        A node that does not learn whose request it gets cannot keep clients apart, so it counts only if there is one.
        """
        if not _ID.fullmatch(id):
            return None
        known = self._nodes.get(id)
        able = [n for n in self._registry.nodes() if n.config.tenants == "header" or not client_is_named]
        if known in able:
            return known
        healthy = [node for node in able if node.healthy]
        answers = await asyncio.gather(*(self._has(node, f"{PATH}/{id}", ask) for node in healthy))
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
