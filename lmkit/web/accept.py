"""Accepting connections: within the limit of open files, and fairly between addresses.

A connection gets a parser only with its first byte; until then it costs a socket. If there is no room for one more, the
oldest idle connection of the address that has most is closed; one whose request has not arrived whole counts as idle.
If none is idle, a few more are taken, which may only ask for /health, and then the others wait in the kernel's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import resource
import socket
from collections.abc import Callable, Mapping
from typing import Any

from lmkit.log import get_logger
from lmkit.web import connection
from lmkit.web.connection import Connection

MAX_OPEN_FILES = 1 << 16
MAX_CONNECTIONS = 1 << 13
SPARE_FILES = 128  # for the engine, logs, uploads and so on
RESERVE = 32  # connections beyond the limit, for /health
BATCH = 32  # accepted in one round of the event loop
CHECK_SECONDS = 0.2
PAUSE_SECONDS = 0.1  # after the system had no file for a connection
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

MakeConnection = Callable[[Callable[[], None], bool], Connection]

log = get_logger(__name__)


def raise_file_limit() -> int:
    """Raise the soft limit of open files as far as it makes sense. Returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def most_connections(files_each: int) -> int:
    """How many connections fit into the limit of open files, if each needs so many."""
    room = raise_file_limit() - len(os.listdir("/proc/self/fd")) - SPARE_FILES - RESERVE
    return max(RESERVE, min(MAX_CONNECTIONS, room // files_each))


class Acceptor:
    """Accepts on one listening socket until it is closed. uvicorn takes it for an asyncio.Server."""

    def __init__(
        self,
        listener: socket.socket,
        make: MakeConnection,
        *,
        limit: int,
        limit_each: int | None = None,
        tls: Mapping[str, Any],
    ) -> None:
        """`limit_each` is for one address; None = `limit`. `tls`: arguments of `loop.connect_accepted_socket`."""
        self._listener, self._make, self._tls = listener, make, tls
        self._limit, self._limit_each = limit, limit_each
        self._addresses: dict[str, _Address] = {}
        self._num_clients = 0
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._listen()
        self._loop.call_later(CHECK_SECONDS, self._check)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listener)
            for client in [client for address in self._addresses.values() for client in address.silent]:
                client.drop()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener)
        self._loop.call_later(PAUSE_SECONDS, self._listen)

    def _accept(self) -> None:
        for _ in range(BATCH):
            if self._num_clients >= self._limit + RESERVE and not self._close_idle():
                self._pause()
                return
            try:
                sock, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_FILES:
                    raise
                log.warning("no connection can be accepted: %s", error.strerror)
                self._close_idle()
                self._pause()
                return
            sock.setblocking(False)
            self._add(sock, _network(peer[0]))

    def _add(self, sock: socket.socket, name: str) -> None:
        has_room = self._num_clients < self._limit or self._close_idle()
        address = self._addresses.setdefault(name, _Address())
        if self._limit_each and address.num_clients >= self._limit_each and not address.close_idle():
            sock.close()
            return
        address = self._addresses.setdefault(name, address)  # the one that was closed may have been its only one
        client = _Client(sock, self, name, has_room=has_room)
        address.silent[client] = None
        address.num_clients += 1
        self._num_clients += 1
        self._loop.add_reader(sock, self._first_byte, client)

    def _first_byte(self, client: _Client) -> None:
        """The client has sent something, or has left."""
        self._loop.remove_reader(client.sock)
        address = self._addresses[client.name]
        del address.silent[client]
        address.open[client] = None
        task = self._loop.create_task(self._connect(client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, client: _Client) -> None:
        client.connection = self._make(lambda: self.forget(client), client.has_room)
        try:
            await self._loop.connect_accepted_socket(lambda: client.connection, client.sock, **self._tls)
        except (OSError, TimeoutError):  # the client left, or does not speak TLS
            client.sock.close()
            self.forget(client)

    def _close_idle(self) -> bool:
        """Close an idle connection. False if there is none."""
        by_number = sorted(self._addresses.values(), key=lambda address: address.num_clients, reverse=True)
        return any(address.close_idle() for address in by_number)

    def forget(self, client: _Client) -> None:
        """Its connection has ended."""
        address = self._addresses.get(client.name)
        if address is None or not (client in address.silent or client in address.open):
            return
        address.silent.pop(client, None)
        address.open.pop(client, None)
        address.num_clients -= 1
        self._num_clients -= 1
        if not address.num_clients:
            del self._addresses[client.name]

    def _check(self) -> None:
        now = self._loop.time()
        for address in list(self._addresses.values()):
            while (client := next(iter(address.silent), None)) and now - client.since > connection.KEEP_ALIVE_SECONDS:
                client.drop()
            for client in list(address.open):
                if client.is_connected:
                    client.connection.check(now)
        if not self._is_closed or self._addresses:
            self._loop.call_later(CHECK_SECONDS, self._check)


class _Client:
    """An accepted socket. `connection` is there once its first byte is."""

    connection: Connection

    def __init__(self, sock: socket.socket, acceptor: Acceptor, name: str, *, has_room: bool) -> None:
        self.sock, self.name, self.has_room = sock, name, has_room
        self._acceptor = acceptor
        self.since = asyncio.get_running_loop().time()

    @property
    def is_connected(self) -> bool:
        return hasattr(self, "connection") and self.connection.transport is not None

    def drop(self) -> None:
        """End the connection. It must be silent or idle."""
        self._acceptor.forget(self)
        if self.is_connected:
            self.connection.drop()
        else:
            asyncio.get_running_loop().remove_reader(self.sock)
            self.sock.close()


class _Address:
    """The connections of one address, oldest first: those that sent nothing yet, and the others."""

    def __init__(self) -> None:
        self.silent: dict[_Client, None] = {}
        self.open: dict[_Client, None] = {}
        self.num_clients = 0

    def close_idle(self) -> bool:
        """Close the oldest idle connection. False if there is none."""
        idle = (client for client in self.open if client.is_connected and client.connection.is_idle)
        victim = next(iter(self.silent), None) or next(idle, None)
        if victim is not None:
            victim.drop()
        return victim is not None


def _network(host: str) -> str:
    """The address, or the network of one IPv6 subscriber."""
    with contextlib.suppress(ValueError):
        if (address := ipaddress.ip_address(host.partition("%")[0])).version == 6:
            return str(ipaddress.ip_network((address, 64), strict=False))
    return host
