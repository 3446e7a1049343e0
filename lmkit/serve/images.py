"""Images that a client's messages name: data: URLs, and by the operator's leave URLs of some hosts and files.

A URL is fetched only from a host of `--image-host`. The connection goes to an address that was looked at: it must be a
public one, unless the operator names the address itself. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from lmkit.config import ServerConfig
from lmkit.errors import RequestError
from lmkit.log import get_logger
from lmkit.text.images import MAX_IMAGES, data_url
from lmkit.text.messages import ImagePart
from lmkit.web.upstream import UnreachableError, Upstream, UpstreamError, addresses_of, client_tls

log = get_logger(__name__)

MAX_BYTES = 20 << 20  # of all images that are fetched or read for one request
SECONDS = 10.0  # for all of them
DEFAULT_PORTS = {"http": 80, "https": 443}
AT_ONCE = 4  # connections of one request
HEADERS = ((b"accept", b"image/*, video/*"), (b"accept-encoding", b"identity"), (b"user-agent", b"lmkit"))


class ImageSources:
    """What the images of one request are read from."""

    def __init__(self, config: ServerConfig) -> None:
        self._hosts, self._folder = config.image_hosts, config.image_folder
        self._fetched: dict[str, bytes] = {}
        self._left = MAX_BYTES

    async def fetch(self, parts: Iterable[ImagePart]) -> None:
        """Fetch the images that have http(s) URLs. `load` finds them. Raises RequestError."""
        sources = [part.source for part in parts]
        wanted = {text: self._checked(text) for text in sources if isinstance(text, str) and _is_remote(text)}
        if len(wanted) > MAX_IMAGES:
            raise _refused(f"{len(wanted)} URLs: at most {MAX_IMAGES} in one request")
        if wanted:
            await self._fetch(wanted)

    def load(self, source: Any) -> bytes:
        """The bytes of an image. Raises RequestError."""
        if not isinstance(source, str):
            raise _refused("expected a URL")
        if source[:5].lower() == "data:":
            return data_url(source)
        if _is_remote(source):
            return self._fetched[source]
        if source[:7].lower() == "file://" and self._folder is not None:
            return self._read(self._folder, source[7:])
        raise _refused("send it as a data: URL" if self._folder is None else "send a data: URL, or file:///PATH")

    def _checked(self, text: str) -> str:
        """The URL written anew from its one reading, which is judged here."""
        import httpx

        try:
            url = httpx.URL(text)
            host, port = url.raw_host.decode(), url.port
        except (httpx.InvalidURL, ValueError):
            raise _refused("it is not a URL") from None
        given = f"{host}:{port or DEFAULT_PORTS[url.scheme]}"
        is_named = given in self._hosts or (port is None and host in self._hosts)
        if not host or url.userinfo or not is_named:
            rule = "this server fetches images of no host" if not self._hosts else "this host is not one to fetch from"
            raise RequestError("permission_denied", f"image: {rule}; send it as a data: URL", "messages")
        authority = f"[{host}]" if ":" in host else host
        return f"{url.scheme}://{authority}{'' if port is None else f':{port}'}{url.raw_path.decode()}"

    async def _fetch(self, wanted: dict[str, str]) -> None:
        client = Upstream(client_tls(), connect_timeout=SECONDS, read_timeout=SECONDS, resolve=_public_addresses)
        slots = asyncio.Semaphore(AT_ONCE)
        gets = [asyncio.ensure_future(self._get(client, slots, url)) for url in wanted.values()]
        try:
            async with asyncio.timeout(SECONDS):
                found = await asyncio.gather(*gets)
        except TimeoutError:
            raise _refused(f"its host did not answer within {SECONDS:.0f} s") from None
        except UpstreamError as error:
            log.info("an image was not fetched: %s", error)
            raise _refused("its host could not be asked") from None
        finally:
            for get in gets:
                get.cancel()
            await client.close()
        self._fetched = dict(zip(wanted, found, strict=True))

    async def _get(self, client: Upstream, slots: asyncio.Semaphore, url: str) -> bytes:
        parts = []
        async with slots:
            with closing(await client.send("GET", url, HEADERS)) as answer:
                if answer.status != 200:
                    raise _refused(f"its host answered {answer.status}; redirects are not followed")
                while part := await answer.piece():
                    self._left -= len(part)
                    if self._left < 0:
                        raise _refused(f"more than {MAX_BYTES >> 20} MiB in one request")
                    parts.append(part)
        return b"".join(parts)

    def _read(self, folder: str, name: str) -> bytes:
        base = Path(folder).resolve()
        try:
            path = Path(os.path.realpath(unquote(name)))  # no error for links in a circle
            if not path.is_relative_to(base) or not path.is_file():
                raise _refused("there is no such file in the server's folder of images")
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                data = file.read(self._left + 1)
        except (OSError, ValueError):
            raise _refused("there is no such file in the server's folder of images") from None
        self._left -= len(data)
        if self._left < 0:
            raise _refused(f"more than {MAX_BYTES >> 20} MiB in one request")
        return data


# Those that end with an IPv4 address: IPv4-compatible, translated (RFC 2765) and NAT64 (RFC 6052). ISATAP: RFC 5214.
WITH_IPV4 = tuple(map(ipaddress.IPv6Network, ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96")))
LOCAL_NAT64 = (ipaddress.IPv6Network("64:ff9b:1::/48"),)  # each network's own (RFC 8215)
ISATAP = 0x5EFE


def is_public(address: str) -> bool:
    """Whether an address is one of the public internet."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.is_site_local or any(found in network for network in LOCAL_NAT64):
            return False
        if inner := _embedded(found):
            return all(map(_is_global, inner))
    return _is_global(found)


def _is_global(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.is_global and not address.is_multicast


def _embedded(address: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """The IPv4 addresses that a gateway may take from an IPv6 address."""
    last = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    found = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if any(address in network for network in WITH_IPV4) or int(address) >> 32 & 0xFDFFFFFF == ISATAP:
        found.append(last)
    return [inner for inner in found if inner is not None]


async def _public_addresses(host: str, port: int) -> list[str]:
    """The addresses of a name, all of them public. What this gives is what is connected to."""
    addresses = await addresses_of(host, port)
    if not all(map(is_public, addresses)):
        raise UnreachableError("not a public address")
    return addresses


def _is_remote(source: str) -> bool:
    return source[:8].lower().startswith(("http://", "https://"))


def _refused(reason: str) -> RequestError:
    return RequestError("invalid_request", f"image: {reason}", "messages")
