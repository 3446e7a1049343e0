"""API keys, what each may do, and the tenants that they stand for.

A key comes as `Authorization: Bearer KEY` or `x-api-key: KEY`. Keys are compared by their digests.

A proxy calls its nodes with keys of its own, so it names the client of each request in `x-lmkit-tenant`. A server
believes it only from a key with the proxy's role. From all others the name may separate more, but never join: it splits
the cache of the tenant that sends it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Generic, Literal, TypeVar

import msgspec

from lmkit.config import StrictStruct
from lmkit.errors import RequestError

Headers = Iterable[tuple[bytes, bytes]]  # names in lower case, as ASGI gives them
T = TypeVar("T")
TENANT_HEADER = b"x-lmkit-tenant"
PerMinute = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
_TENANT = re.compile(rb"[0-9a-f]{32}")


class ApiKey(StrictStruct, frozen=True):
    """One key and its attributes."""

    key: Annotated[str, msgspec.Meta(max_length=512, pattern=r"^[\x21-\x7e]+$")]
    # admin: manages a proxy's nodes; proxy: names its clients; metrics: may read /metrics and nothing else;
    # node: may register nodes of a proxy and nothing else
    role: Literal["user", "admin", "proxy", "metrics", "node"] = "user"
    weight: Annotated[float, msgspec.Meta(ge=0.01, le=100)] = 1.0  # of its share of a server beside other keys
    min_priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] = 0  # the soonest that its requests may ask for
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None  # of prompts and answers together

    @property
    def is_limited(self) -> bool:
        return self.requests_per_minute is not None or self.tokens_per_minute is not None


def parse_key(text: str) -> ApiKey:
    """`KEY [name=value ...]` -> the key with its attributes. Raises ValueError, which does not tell the key."""
    key, *attributes = text.split() or [""]
    known = ApiKey.__struct_fields__[1:]
    if key.partition("=")[0] in known:
        raise ValueError("an attribute stands where the key should; write KEY name=value on one line")
    fields = {}
    for name, equals, value in (attribute.partition("=") for attribute in attributes):
        if name not in known or not equals or name in fields:
            raise ValueError(f"after the key, expected name=value with each of {', '.join(known)} at most once")
        fields[name] = value
    try:
        return msgspec.convert({"key": key, **fields}, ApiKey, strict=False)
    except msgspec.ValidationError as error:
        reason = "expected printable ASCII" if "$.key" in str(error) else str(error)
        raise ValueError(reason) from None


class Keyring(Generic[T]):
    """Known keys, each with the tenant or the role that it stands for."""

    def __init__(self, keys: Iterable[tuple[str, T]]) -> None:
        self._entries = [(_digest(key.encode()), value) for key, value in keys]

    def find(self, headers: Headers) -> T | None:
        """The value of the request's key, see `only_known`.

        The time does not depend on the keys: their digests are compared with those of all keys.
        """
        return only_known(headers, self.value)

    def value(self, key: bytes) -> T | None:
        """The value of one key; None if it is not known."""
        digest = _digest(key)
        values = [value for known, value in self._entries if hmac.compare_digest(digest, known)]
        return values[0] if values else None


def tenant_of(key: str, client: str = "") -> str:
    """The name of the key's tenant, or of the client that a proxy with this key names.

    It is the same after a restart, and the key cannot be found from it.
    """
    named = f"\0{client}" if client else ""
    return hashlib.sha256(b"lmkit tenant " + key.encode() + named.encode()).hexdigest()[:32]


def named_client(headers: Headers) -> str:
    """The client that `x-lmkit-tenant` names, or an empty text. Raises RequestError for anything but one name."""
    values = [value for name, value in headers if name == TENANT_HEADER]
    if not values:
        return ""
    if len(values) > 1 or not _TENANT.fullmatch(values[0]):
        raise RequestError("invalid_request", "x-lmkit-tenant: expected 32 hexadecimal digits, once")
    return values[0].decode()


def client_name(key: str, client: str, node_key: str) -> str:
    """The name that a node gets for a client of a proxy; an empty text for clients that cannot be told apart.

    It depends on the client's key and on the name that another proxy gave. The node's key keeps it from being guessed.
    """
    if not key and not client:
        return ""
    return hmac.digest(node_key.encode(), f"lmkit tenant {key}\0{client}".encode(), "sha256").hex()[:32]


def invalid_api_key() -> RequestError:
    return RequestError("invalid_api_key", "missing or wrong API key; send Authorization: Bearer KEY")


def key_id(headers: Headers) -> str:
    """A short name of the key that a request presents first, for the log; "" without one. It does not tell the key."""
    presented = presented_keys(headers)
    return id_of(presented[0]) if presented else ""


def id_of(key: str | bytes) -> str:
    """The short name of a key. It does not tell the key."""
    return hashlib.sha256(b"lmkit key " + (key.encode() if isinstance(key, str) else key)).hexdigest()[:8]


def presented_keys(headers: Headers) -> list[bytes]:
    """The different keys that a request sends: those of Authorization, then those of x-api-key; at most four."""
    headers = list(headers)
    bearer = [value.strip().partition(b" ") for name, value in headers if name == b"authorization"]
    if len(bearer) > 1:  # HTTP has one such header, and what stands between may read the other
        return []
    keys = [key.strip() for scheme, _, key in bearer if scheme.lower() == b"bearer"]
    keys += [value.strip() for name, value in headers if name == b"x-api-key"]
    return list(dict.fromkeys(key for key in keys if key))[:4]


def only_known(headers: Headers, known: Callable[[bytes], T | None]) -> T | None:
    """What `known` says of the one key of a request of which it says anything. None: of no key, or of two.

    Clients send a stale or an empty x-api-key of their environment beside the right Authorization, or the other way
    round. So the one that is known counts. If two are known, nobody can say who asks, and the request is refused.
    """
    found = [value for key in presented_keys(headers) if (value := known(key)) is not None]
    return found[0] if len(found) == 1 else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
