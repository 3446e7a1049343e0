"""Connections to nodes by name, and why there is none."""

from __future__ import annotations

import socket
import ssl
from typing import Any

import pytest

from lmkit.proxy.config import ProxyConfig
from lmkit.proxy.node_client import node_client
from lmkit.web.upstream import UnreachableError, Upstream
from tests.proxy.fakes import FakeNode, nodes

pytestmark = pytest.mark.anyio


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let each name mean these addresses."""

    def found(host: str, port: int, *args: Any, **options: Any) -> list[Any]:
        kinds = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
        return [
            (kind, socket.SOCK_STREAM, 6, "", (address, port, 0, 0) if kind is socket.AF_INET6 else (address, port))
            for kind, address in zip(kinds, addresses, strict=True)
        ]

    monkeypatch.setattr(socket, "getaddrinfo", found)


@pytest.mark.parametrize(
    "addresses",
    [("169.254.169.254",), ("fd00:ec2::254",), ("127.0.0.1", "169.254.169.254"), ("::ffff:100.100.100.200",),
     ("169.254.7.7",), ("fe80::1",), ("0.0.0.0",)],
)  # fmt: skip
async def test_a_name_that_comes_to_mean_a_metadata_service_is_not_connected_to(
    addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = node_client(ProxyConfig())
    try:
        async with nodes(FakeNode()) as (node,):
            resolve_to(monkeypatch, "127.0.0.1")
            answer = await upstream.send("GET", f"http://first.example:{node.port}/health", [])
            assert answer.status == 200
            answer.close()
            resolve_to(monkeypatch, *addresses)
            with pytest.raises(UnreachableError):
                await upstream.send("GET", f"http://second.example:{node.port}/health", [])
    finally:
        await upstream.close()


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a" * 70 + ".example"])
async def test_a_name_without_an_address_is_no_connection(name: str) -> None:
    upstream = Upstream(ssl.create_default_context(), connect_timeout=5, read_timeout=5)
    with pytest.raises(UnreachableError):
        await upstream.send("GET", f"http://{name}:8000/health", [])
    await upstream.close()


async def test_the_next_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = Upstream(ssl.create_default_context(), connect_timeout=5, read_timeout=5)
    async with nodes(FakeNode()) as (node,):
        resolve_to(monkeypatch, "127.0.0.9", "127.0.0.1")
        for _ in range(2):
            answer = await upstream.send("GET", f"http://first.example:{node.port}/health", [])
            assert answer.status == 200
            answer.close()
        assert node.connections == 1
        await upstream.close()


async def test_a_certificate_that_nobody_vouches_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise ssl.SSLCertVerificationError(1, "certificate verify failed")

    upstream = Upstream(ssl.create_default_context(), connect_timeout=5, read_timeout=5)
    monkeypatch.setattr(upstream, "_open", refuse)
    with pytest.raises(UnreachableError, match="SSLCertVerificationError"):
        await upstream.send("GET", "https://127.0.0.1:8000/health", [])
