"""The proxy's client of its nodes. A node's name can come to mean a metadata service later, so its addresses are judged
whenever they are asked for."""

from __future__ import annotations

from lmkit.log import get_logger
from lmkit.proxy.addresses import refusal
from lmkit.proxy.config import ProxyConfig
from lmkit.web.upstream import UnreachableError, Upstream, addresses_of, client_tls

log = get_logger(__name__)


def node_client(config: ProxyConfig) -> Upstream:
    """The connections to all nodes. Needs a running event loop."""
    return Upstream(
        client_tls(),
        connect_timeout=config.connect_timeout,
        read_timeout=config.read_timeout,
        resolve=node_addresses,
    )


async def node_addresses(host: str, port: int) -> list[str]:
    """The addresses of a name, all of which may be nodes. Raises UnreachableError and OSError."""
    addresses = await addresses_of(host, port)
    if refused := [reason for address in addresses if (reason := refusal(address, registered=True))]:
        log.warning("%s %s", host, refused[0])
        raise UnreachableError("an address that may not be a node")
    return addresses
