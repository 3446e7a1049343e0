"""Connections to nodes by name."""

from __future__ import annotations

import socket
import ssl
from typing import Any

import pytest

from lmkit.proxy.upstream import UnreachableError, Upstream
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
async def test_t20_a_name_that_comes_to_mean_a_metadata_service_is_not_connected_to(
    addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = Upstream(ssl.create_default_context(), connect_timeout=5, read_timeout=5)
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
