"""Gives the blocks of this engine's host memory and disk to engines that know the key (kv_listen). See wire.py."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from lmkit.errors import ConfigError
from lmkit.log import get_logger
from lmkit.turbo.kv.tiers import wire
from lmkit.turbo.kv.tiers.failures import Failures
from lmkit.turbo.kv.tiers.keys import KEY_BYTES

log = get_logger(__name__)

MAX_CONNECTIONS = 64  # of peers that have shown the key
MAX_GREETING = 32  # of those that have not yet; one more ends the oldest of them, so that silent ones keep nobody out
SEND_SECONDS = 5.0  # for a client that does not read

Lookup = Callable[[Sequence[bytes]], int]  # how many of the keys are kept, from the first on; or up to the last kept
Read = Callable[[bytes], memoryview | None]  # a block's bytes
Follow = Callable[[Sequence[bytes]], Iterable[tuple[wire.Frame, bytes | memoryview]]]  # see Filling.frames


class BlockServer:
    """Listens at `address` (port 0 takes a free one). A thread for each connection calls the functions.

    Raises ConfigError if it cannot listen there.
    """

    def __init__(
        self, address: tuple[str, int], kind: wire.Kind, lookup: Lookup, last: Lookup, read: Read, follow: Follow
    ) -> None:
        self._kind, self._read, self._follow = kind, read, follow
        self._counts = {wire.HAS: lookup, wire.LAST: last}
        self._failures = Failures()
        self._open: set[socket.socket] = set()
        self._greeting: dict[socket.socket, None] = {}  # the oldest first
        try:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            self._listener = socket.create_server(address, family=family, backlog=MAX_CONNECTIONS)
        except OSError as error:
            raise ConfigError(f"kv_listen: cannot listen at {address[0]}:{address[1]}: {error.strerror}") from None
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        log.info("KV blocks for peers at %s:%d", *self.address)
        threading.Thread(target=self._accept, name="kv-listen", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            if len(self._greeting) >= MAX_GREETING and (oldest := next(iter(self._greeting), None)) is not None:
                self._greeting.pop(oldest, None)
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # ends its thread
            self._greeting[sock] = None
            threading.Thread(target=self._serve, args=(sock,), name="kv-give", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            link = wire.accept(sock, self._kind)
            if len(self._open) >= MAX_CONNECTIONS:
                return
            self._open.add(sock)
            self._greeting.pop(sock, None)
            while True:
                self._answer(link)
        except OSError as error:
            if isinstance(error, wire.WireError) and "ended" not in str(error):
                self._failures.note("giving KV to a peer", error)
        finally:
            self._open.discard(sock)
            self._greeting.pop(sock, None)
            sock.close()

    def _answer(self, link: wire.Link) -> None:
        head = link.take(wire.HEAD.size, None)
        op, count = wire.HEAD.unpack(head)
        if not 1 <= count <= (1 if op == wire.GET else wire.MAX_KEYS):
            raise wire.WireError(f"a message of {count} keys")
        names = link.take(count * KEY_BYTES, wire.HANDSHAKE_SECONDS)
        link.check(wire.HANDSHAKE_SECONDS, head, names)
        keys = [names[i : i + KEY_BYTES] for i in range(0, len(names), KEY_BYTES)]
        if op == wire.GET:
            data = self._read(names)
            link.send(SEND_SECONDS, b"\0" if data is None else b"\1", b"" if data is None else data)
        elif (count_of := self._counts.get(op)) is not None:
            link.send(SEND_SECONDS, wire.COUNT.pack(count_of(keys)))
        elif op == wire.FOLLOW:
            for frame, pieces in self._follow(keys):
                link.send(SEND_SECONDS, wire.FRAME.pack(*frame), pieces)
        else:
            raise wire.WireError("an unknown message")

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._listener.close()
        for sock in (*self._open, *self._greeting):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
