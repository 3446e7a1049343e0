"""Who may do what. Pure: a role and the request's headers go in, nothing or a RequestError comes out."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from lmkit.errors import RequestError

Headers = Iterable[tuple[bytes, bytes]]  # names in lower case, as ASGI gives them
_FORWARDED = {b"origin", b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"}


class Role(Enum):
    OPEN = "open"  # anyone
    USER = "user"  # a client key, if there are any
    ADMIN = "admin"  # an admin key


@dataclass(frozen=True)
class Keys:
    """Digests of the keys. `loopback`: only this machine can reach the listener."""

    user: tuple[bytes, ...]
    admin: tuple[bytes, ...]
    loopback: bool

    @classmethod
    def of(cls, user: Iterable[str], admin: Iterable[str], *, loopback: bool) -> Keys:
        return cls(tuple(map(_digest, user)), tuple(map(_digest, admin)), loopback)


def authorize(keys: Keys, role: Role, headers: Headers) -> None:
    """Raise invalid_api_key or permission_denied unless the request may act as `role`.

    An admin key is good for every route. Without any key at all, a loopback listener lets local programs manage
    nodes, but not web pages (they send Origin, or a Host of their own) and not what another proxy relays.
    """
    if role is Role.OPEN or (role is Role.USER and not keys.user):
        return
    if role is Role.ADMIN and not keys.admin:
        if keys.user or not keys.loopback:
            raise RequestError("permission_denied", "node management is off: the proxy has no admin_keys")
        if not _is_local(headers):
            raise RequestError("permission_denied", "without admin_keys only local programs manage nodes")
        return
    presented = _presented(headers)
    if _is_one_of(presented, keys.admin):
        return
    known = _is_one_of(presented, keys.user)
    if role is Role.USER and known:
        return
    if known:
        raise RequestError("permission_denied", "this needs an admin key")
    raise RequestError("invalid_api_key", "the API key is missing or wrong")


def _presented(headers: Headers) -> bytes | None:
    """The one key of a request: `Authorization: Bearer KEY` or `x-api-key: KEY`."""
    found = []
    for name, value in headers:
        if name == b"x-api-key":
            found.append(value.strip())
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            found.append(key.strip() if scheme.lower() == b"bearer" else b"")
    return found[0] if len(set(found)) == 1 else None


def _is_one_of(presented: bytes | None, digests: tuple[bytes, ...]) -> bool:
    if presented is None:
        return False
    digest = hashlib.sha256(presented).digest()
    return sum(hmac.compare_digest(digest, known) for known in digests) > 0  # all of them: constant time


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _is_local(headers: Headers) -> bool:
    hosts = []
    for name, value in headers:
        if name in _FORWARDED:
            return False
        if name == b"host":
            hosts.append(value.decode("latin-1"))
    return len(hosts) == 1 and is_loopback(_host_name(hosts[0]))


def _host_name(host: str) -> str:
    """`127.0.0.1:80`, `[::1]:80`, `localhost` -> the name alone."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
