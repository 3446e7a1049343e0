"""The headers that pass through the proxy, in each direction. All others stay behind.

A node trusts what its proxy sends, so a client must not choose headers that frameworks obey (X-Original-URL,
X-HTTP-Method-Override, X-Forwarded-For). A browser trusts what the proxy's site sends, so a node must not set cookies
or policies for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

Headers = Iterable[tuple[bytes, bytes]]

_TO_NODE = frozenset({
    b"accept", b"content-type", b"user-agent", b"x-request-id", b"traceparent", b"tracestate", b"idempotency-key",
    b"openai-beta", b"anthropic-version", b"anthropic-beta", b"x-lmkit-counts",
    b"x-lmkit-prompt-tokens", b"x-lmkit-receipt",
})  # fmt: skip
_TO_NODE_PREFIXES = (b"x-stainless-",)  # the version of OpenAI's and Anthropic's clients
_TO_CLIENT = frozenset({
    b"content-type", b"content-length", b"content-encoding", b"cache-control", b"date", b"retry-after",
    b"retry-after-ms", b"x-should-retry", b"x-accel-buffering", b"server-timing", b"x-request-id", b"request-id",
    b"openai-model", b"openai-version", b"openai-processing-ms", b"x-lmkit-ignored",
    b"x-lmkit-receipt", b"x-lmkit-usage",
})  # fmt: skip
_TO_CLIENT_PREFIXES = (b"x-ratelimit-", b"anthropic-ratelimit-")
_VIA = re.compile(rb"1\.1 lmkit-[0-9a-f]{16}")  # what a proxy writes; another text of a client's stays behind


def to_node(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The part of a request's headers that a node gets, with names in lower case."""
    passing = [*_passing(headers, _TO_NODE, _TO_NODE_PREFIXES)]
    return passing + [(b"via", value) for name, value in headers if name == b"via" and _VIA.fullmatch(value)]


def to_client(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The part of a response's headers that the client gets, with names in lower case."""
    return _passing(headers, _TO_CLIENT, _TO_CLIENT_PREFIXES)


def _passing(headers: Headers, names: frozenset[bytes], prefixes: tuple[bytes, ...]) -> list[tuple[bytes, bytes]]:
    """Headers that `Connection` names concern one connection only, so they never pass."""
    headers = [(name.lower(), value) for name, value in headers]
    hops = {hop.strip().lower() for name, value in headers if name == b"connection" for hop in value.split(b",")}
    return [(n, v) for n, v in headers if (n in names or n.startswith(prefixes)) and n not in hops]
