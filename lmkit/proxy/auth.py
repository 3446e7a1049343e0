"""What a key allows. Pure: `authorize` takes an access and headers, and returns the key or raises RequestError."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from lmkit.errors import RequestError
from lmkit.proxy.accounts.ledger import Ledger
from lmkit.web.auth import ApiKey, Headers, Keyring, invalid_api_key, only_known, parse_key, presented_keys


class Access(Enum):
    OPEN = "open"  # anyone
    USER = "user"  # a key, if clients have any
    NODE = "node"  # a key with the role node
    ADMIN = "admin"  # a key with the role admin


@dataclass(frozen=True)
class Keys:
    """All keys. Clients need one as soon as there is one for them."""

    keyring: Keyring[ApiKey]
    for_clients: bool
    for_admin: bool
    for_nodes: bool
    managed: Ledger | None = None  # keys of the key_store

    @classmethod
    def of(cls, lines: Collection[str], admin: Collection[str], managed: Ledger | None = None) -> Keys:
        """`lines`: `KEY [name=value ...]`; `admin`: keys with the role admin. Raises ValueError."""
        keys = [*map(parse_key, lines), *(ApiKey(key=key, role="admin") for key in admin)]
        roles = {key.role for key in keys}
        for_clients = bool(roles - {"admin", "node"}) or managed is not None
        return cls(Keyring((key.key, key) for key in keys), for_clients, "admin" in roles, "node" in roles, managed)

    def find(self, headers: Headers) -> ApiKey | None:
        """The request's key, see `only_known`. Raises RequestError if there is none but one that has expired."""
        found = only_known(headers, self._value)
        if found is None and self.managed is not None:
            self.managed.check_expiry(presented_keys(headers))
        return found

    def _value(self, key: bytes) -> ApiKey | None:
        return self.keyring.value(key) or (self.managed.value(key) if self.managed else None)


def authorize(keys: Keys, access: Access, headers: Headers) -> ApiKey | None:
    """The request's key, or None if it needs none. Raises invalid_api_key or permission_denied.

    An admin key is good for every route. Without one, nobody manages nodes: an address proves nothing, because a web
    page or another proxy on this machine may relay for anyone.
    """
    if access is Access.OPEN or (access is Access.USER and not keys.for_clients):
        return None
    if access is Access.ADMIN and not keys.for_admin:
        raise RequestError("permission_denied", "node management is off: the proxy has no admin_keys")
    if access is Access.NODE and not (keys.for_nodes or keys.for_admin):
        raise RequestError("permission_denied", "no node may register: the proxy has no key with role=node")
    held = keys.find(headers)
    if held is None:
        raise invalid_api_key()
    if access is Access.NODE and held.role not in ("node", "admin"):
        raise RequestError("permission_denied", "this needs a key with role=node")
    if access is Access.USER and held.role == "node":
        raise RequestError("permission_denied", "this key has the role node: it may only register nodes")
    if access is Access.ADMIN and held.role != "admin":
        raise RequestError("permission_denied", "this needs an admin key")
    return held
