"""How a node learns which client of the proxy asks, so that no client finds or times the KV of another."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from lmkit.proxy.config import NodeConfig
from lmkit.web.auth import TENANT_HEADER, client_name
from lmkit.web.receive import decode_json


def named(node: NodeConfig, key: str, client: str, body: bytes) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """(headers to add, the body to send) for a client with this key, or for the one that another proxy names.

    Raises RequestError for a cache_salt that is no text.
    """
    name = client_name(key, client, node.api_key or "")
    if not name:
        return [], body
    if node.tenants == "header":
        return [(TENANT_HEADER, name.encode())], body
    return [], _salted(body, name) if body else body


def _salted(body: bytes, name: str) -> bytes:
    """The body with a cache_salt of the client's own and of the salt that it sent. Other values keep their bytes."""
    salt: Any = decode_json(body, _Salt, mismatch="cache_salt", param="cache_salt").cache_salt
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    mixed = hashlib.sha256(f"{name}:{salt or ''}".encode()).hexdigest()
    return msgspec.json.encode(fields | {"cache_salt": mixed})


class _Salt(msgspec.Struct):
    cache_salt: str | None = None
