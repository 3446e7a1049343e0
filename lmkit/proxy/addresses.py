"""Which hosts may be nodes. A proxy reaches more than its clients do, so a node's address must not be just anything."""

from __future__ import annotations

import ipaddress
import re

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# Services of clouds that hand credentials to whoever asks from inside.
_METADATA_NAMES = frozenset({"metadata", "metadata.google.internal", "metadata.goog", "instance-data"})
_METADATA = frozenset(map(ipaddress.ip_address, (
    "169.254.169.254", "169.254.170.2", "169.254.170.23", "100.100.100.200", "192.0.0.192", "fd00:ec2::254",
    "fd00:ec2::23", "fd20:ce::254",
)))  # fmt: skip
_NUMBER = re.compile(r"(?i)[0-9]+|0x[0-9a-f]*")  # resolvers read 0x7f.1, 0177.1 and 2130706433 as addresses
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")  # an IPv4 address behind NAT64


def refusal(host: str, *, registered: bool = False) -> str:
    """Why the host cannot be a node, or an empty text. `registered`: it came over HTTP, not from the configuration."""
    host = host.strip("[]").rstrip(".").lower()
    if host in _METADATA_NAMES:
        return "is a metadata service"
    try:
        address = _meant(ipaddress.ip_address(host))
    except ValueError:
        last = host.rpartition(".")[2]
        return "is a number; write the address as a.b.c.d" if _NUMBER.fullmatch(last) else ""
    if address in _METADATA:
        return "is a metadata service"
    if address.is_unspecified or address.is_multicast or (address.version == 4 and address.packed[0] in (0, 255)):
        return "is not an address to connect to; name the node's own host"
    if registered and address.is_link_local:
        return "is a link-local address, which only the configuration may name"
    return ""


def _meant(address: Address) -> Address:
    """The IPv4 address inside an IPv6 one, if it only stands for that."""
    if isinstance(address, ipaddress.IPv6Address):
        if inner := address.ipv4_mapped or address.sixtofour:
            return inner
        if address in _TRANSLATED:
            return ipaddress.IPv4Address(address.packed[12:])
    return address
