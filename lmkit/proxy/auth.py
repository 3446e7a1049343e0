"""Roles and what they allow. Pure: `authorize` takes a role and headers, and returns nothing or raises RequestError."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from lmkit.errors import RequestError
from lmkit.web.auth import Headers, Keyring, invalid_api_key

_FORWARDED = {b"origin", b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"}


class Role(Enum):
    OPEN = "open"  # anyone
    USER = "user"  # a client key, if there are any
    ADMIN = "admin"  # an admin key


@dataclass(frozen=True)
class Keys:
    """All keys, and the roles that have any. `loopback`: only this machine can reach the listener."""

    keyring: Keyring[Role]
    roles: frozenset[Role]
    loopback: bool

    @classmethod
    def of(cls, user: Collection[str], admin: Collection[str], *, loopback: bool) -> Keys:
        entries = [(key, Role.USER) for key in user] + [(key, Role.ADMIN) for key in admin]
        return cls(Keyring(entries), frozenset(role for _, role in entries), loopback)


def authorize(keys: Keys, role: Role, headers: Headers) -> None:
    """Raise invalid_api_key or permission_denied unless the request may act as `role`.

    An admin key is good for every route. If there is no key at all, a loopback listener lets local programs manage
    nodes. Web pages may not manage nodes (they send Origin, or a Host of their own), and neither may requests that
    another proxy relays.
    """
    if role is Role.OPEN or (role is Role.USER and Role.USER not in keys.roles):
        return
    if role is Role.ADMIN and Role.ADMIN not in keys.roles:
        if keys.roles or not keys.loopback:
            raise RequestError("permission_denied", "node management is off: the proxy has no admin_keys")
        if not _is_local(headers):
            raise RequestError("permission_denied", "without admin_keys only local programs manage nodes")
        return
    held = keys.keyring.find(headers)
    if held is None:
        raise invalid_api_key()
    if role is Role.ADMIN and held is not Role.ADMIN:
        raise RequestError("permission_denied", "this needs an admin key")


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
