"""What a proxy says to two of its nodes of which one computes a prompt and the other decodes (docs/parallel.md).

    to the prefill node   x-lmkit-pair: prefill TENANT       and the whole request
    its answer            the head once the first blocks of the prompt are kept; the body at the end of the prompt
    to the decode node    x-lmkit-pair: decode HOST:PORT     and the whole request

TENANT is the name that the decode node has for the client, because the KV of two tenants has nothing in common; "-" if
nodes have no keys. A node believes both only from a key with the role proxy. A node without keys takes the address of
its own kv_peer only, and no tenant.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from lmkit.errors import RequestError

PAIR_HEADER = b"x-lmkit-pair"
_HEADER = re.compile(r"(prefill) (-|[0-9a-f]{32})|(decode) ([A-Za-z0-9.\-]+:\d{1,5}|\[[0-9a-fA-F:.]+\]:\d{1,5})")


class Part(NamedTuple):
    """What a node does of a request."""

    role: str  # prefill or decode
    value: str  # the tenant, or the address of the other node's KV

    @classmethod
    def read(cls, text: str) -> Part:
        found = _HEADER.fullmatch(text)
        if found is None:
            raise RequestError("invalid_request", f"{PAIR_HEADER.decode()} is malformed")
        return cls(found[1] or found[3], found[2] or found[4])

    def header(self) -> tuple[bytes, bytes]:
        return PAIR_HEADER, f"{self.role} {self.value}".encode()
