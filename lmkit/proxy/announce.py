"""What a node says of itself when it registers, and whether the proxy believes it. Pure functions over plain values.

A node may name only its own address, so that nobody can lead the proxy to another host. It may not serve a model under
a name that another owner's nodes serve or have served, nor other weights under the name of its own ones. A name belongs
to the key that had it first, until an administrator removes its last node or the key leaves the configuration.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import httpx
import msgspec

from lmkit.config import NodeRole, StrictStruct
from lmkit.errors import RequestError
from lmkit.proxy.config import Key, ProxyConfig, Registration
from lmkit.proxy.registry import Node
from lmkit.proxy.rules import ModelName, Tag
from lmkit.web.auth import id_of, parse_key
from lmkit.web.ollama import untagged

MAX_NAMES = 10_000  # of models that are owned
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class Load(StrictStruct, frozen=True):
    running: Count = 0
    waiting: Count = 0
    kv_use: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0  # share of its KV cache
    kv_tokens: Count = 0  # the size of its KV cache; 0 = not known
    kept_seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None  # its cache has all that it used in these seconds


class Announcement(StrictStruct, frozen=True):
    """The body of POST /nodes. A node sends it again before its lease ends."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    models: Annotated[dict[ModelName, Annotated[str, msgspec.Meta(max_length=128)]], msgspec.Meta(min_length=1)]
    instance: Annotated[str, msgspec.Meta(max_length=64)]  # another one for each start of the node: its cache is empty
    scheme: Literal["http", "https"] = "http"
    url: str | None = None  # None = the address that the announcement comes from
    state: Literal["ready", "draining", "leaving"] = "ready"
    lease_seconds: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 15.0
    api_key: Key | None = None
    weight: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    tags: Annotated[tuple[Tag, ...], msgspec.Meta(max_length=32)] = ()
    role: NodeRole = "both"
    kv_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    load: Load = Load()


def registration(announced: Announcement, peer: str, allowed: Sequence[str]) -> Registration:
    """The node as the proxy keeps it. `peer` is the caller's address, `allowed` the other hosts that nodes may name.

    Raises RequestError for a host that the caller may not name, and for a node that cannot be one.
    """
    host = f"[{peer}]" if ":" in peer else peer
    try:
        node = Registration(
            url=announced.url or f"{announced.scheme}://{host}:{announced.port}",
            models=tuple(announced.models),
            api_key=announced.api_key,
            weight=announced.weight,
            tags=announced.tags,
            role=announced.role,
            kv_port=announced.kv_port,
            lease_seconds=announced.lease_seconds,
        )
    except ValueError as error:
        raise RequestError("invalid_request", str(error)) from None
    named = httpx.URL(node.url).host
    if not (_same(named, peer) or any(_covers(pattern, named) for pattern in allowed)):
        raise RequestError(
            "permission_denied", "a node may name its own address only; node_hosts of the proxy allows others", "url"
        )
    return node


def owners(config: ProxyConfig) -> set[str]:
    """The ids of the keys that may register nodes."""
    keys = [key.key for key in map(parse_key, config.api_keys) if key.role == "node"]
    return {id_of(key) for key in (*keys, *config.admin_keys)}


def no_place(owner: str, owners: Collection[str], nodes: Sequence[Node], max_nodes: int) -> str:
    """Why there is no place for another node of this owner, or an empty text.

    Half of the places are shared out among the owners. Nobody takes what is left of another's share.
    """
    kept = _kept(owner, owners, [node.owner for node in nodes], max_nodes)
    if len(nodes) + kept < max_nodes:
        return ""
    return f"there are {len(nodes)} nodes already, and {kept} places are kept for other keys: see max_nodes"


def no_names(owner: str, owners: Collection[str], names: Mapping[str, str]) -> str:
    """Why these names of models and their owners are too many, or an empty text. Names are shared out as places are."""
    kept = _kept(owner, owners, names.values(), MAX_NAMES)
    if len(names) + kept <= MAX_NAMES:
        return ""
    return f"these would be {len(names)} names of models, of {MAX_NAMES} at most, and {kept} are kept for other keys"


def _kept(owner: str, owners: Collection[str], taken: Iterable[str], most: int) -> int:
    """What is left of the shares of others; `taken` has the owner of each place that is taken."""
    counts, share = Counter(taken), most // (2 * max(1, len(owners)))
    return sum(max(0, share - counts[other]) for other in owners if other != owner)


def refusal(
    announced: Announcement,
    url: str,
    owner: str,
    nodes: Sequence[Node],
    names: Mapping[str, str],
    *,
    mixed: bool = False,
) -> str:
    """Why a node of this owner may not serve these models here, or an empty text. `mixed`: other weights are fine.

    `names` has the owner of each name that a registered node has had, also while none of its nodes is here. To Ollama's
    clients a name and the same with the tag `latest` are one, so another owner's are.
    """
    if any(node.url == url and node.owner != owner for node in nodes):
        return f"{url} is a node of another owner"
    others = [node for node in nodes if node.url != url]
    owned = {untagged(name): whose for name, whose in names.items()}
    owned |= {untagged(model): node.owner for node in others for model in node.models or ()}
    for model in announced.models:
        if owned.get(untagged(model), owner) != owner:
            return f"the model name {model!r} belongs to another owner's nodes"
    for node in others:
        for model in announced.models.keys() & (node.models or {}).keys():
            if not mixed and announced.models[model] != node.fingerprints.get(model, announced.models[model]):
                return f"{model!r} is served here with other weights; give these another name, and rules or an alias"
    return ""


def heard(node: Node, announced: Announcement) -> bool:
    """Take what a node says of its state. True if it has been started anew, so that its cache is empty."""
    load = announced.load
    node.others = max(0, load.running + load.waiting - node.in_flight)
    node.kv_tokens, node.kv_use = load.kv_tokens or None, load.kv_use
    node.fingerprints = announced.models
    node.leaving = announced.state != "ready"
    anew = node.instance not in ("", announced.instance)
    node.instance = announced.instance
    return anew


def _same(host: str, peer: str) -> bool:
    try:
        return _address(host) == _address(peer)
    except ValueError:
        return False


def _covers(pattern: str, host: str) -> bool:
    """Whether a network (10.0.0.0/8) or a host name (*.nodes.example) of the configuration covers the host."""
    try:
        return _address(host) in ipaddress.ip_network(pattern)
    except (ValueError, TypeError):
        return "/" not in pattern and fnmatchcase(host.lower(), pattern.lower())


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(host.strip("[]"))
    return getattr(address, "ipv4_mapped", None) or address
