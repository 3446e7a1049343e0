"""Blocks between two engines over TCP: who may talk, and what a message looks like.

    server -> client   magic (8), nonce (32)
    client -> server   nonce (32), HMAC-SHA256(key, "client", both nonces, identity, bytes of a block)
    server -> client   HMAC-SHA256(key, "server", the same)
    client -> server   op (1), number of keys (2), keys (32 each), tag (16)
    server -> client   to HAS: the number of these keys that it keeps, from the first on (2), tag
                       to LAST: the number of these keys up to the last one that it keeps (2), tag
                       to GET, of one key: 1 (1), the block, tag; or 0 (1), tag
                       to FOLLOW: frames, until all blocks are there, each with a tag
    a frame            first block (2), number of blocks (2), first byte (4), end (4), these bytes of each block

The blocks of a FOLLOW come in order, as soon as the server has them, and several that a step fills together come piece
by piece. A frame without blocks says that there was nothing for WAIT_SECONDS.

Numbers are little-endian. A tag is BLAKE2b, keyed for this connection, of the sender, the number of the message and its
bytes: nothing can be forged, replayed or moved. Nothing is encrypted. The identity (turbo.kv.blocks.kv_identity) is
part of the handshake, so engines whose KV differs never exchange a byte of it. All sizes are known before a read, and
a deadline holds for all bytes that are read together.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import stat
import struct
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lmkit.errors import ConfigError

MAGIC = b"lmkitkv2"
NONCE_BYTES, PROOF_BYTES, TAG_BYTES = 32, 32, 16
HAS, LAST, GET, FOLLOW = b"H", b"L", b"G", b"F"
MAX_KEYS = 4096  # in one message
HANDSHAKE_SECONDS = 2.0
WAIT_SECONDS = 0.5
MIN_SECRET_BYTES = 16
HEAD = struct.Struct("<cH")
COUNT = struct.Struct("<H")
FRAME = struct.Struct("<HHII")


class Frame(NamedTuple):
    """What a frame holds: bytes `begin` to `end` of some blocks, the first of them `first` of the keys."""

    first: int
    num_blocks: int
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.num_blocks * (self.end - self.begin)


NOTHING = Frame(0, 0, 0, 0)


class Kind(NamedTuple):
    """What both engines must agree on."""

    secret: bytes
    identity: bytes
    block_bytes: int


class WireError(OSError):
    """The other side is slow, gone, or not who it should be."""


def read_secret(path: str | None) -> bytes:
    """The key in a file that only its owner may read. Raises ConfigError."""
    if path is None:
        raise ConfigError("kv_listen and kv_peer need a key that both engines know; name its file: kv_key_file")
    try:
        secret = Path(path).read_bytes().strip()
        mode = os.stat(path).st_mode
    except OSError as error:
        raise ConfigError(f"kv_key_file {path}: cannot be read: {error.strerror}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"kv_key_file {path}: other users may read it; run chmod 600 {path}")
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"kv_key_file {path}: {len(secret)} bytes are too few; openssl rand -hex 32 makes a key")
    return secret


def address_of(text: str, name: str) -> tuple[str, int]:
    """HOST:PORT as host and port; without a host 127.0.0.1. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{name} {text}: write HOST:PORT, such as 127.0.0.1:7400")
    return host.strip("[]") or "127.0.0.1", int(port)


class Link:
    """One side of a connection, for one thread at a time. A method that raises OSError leaves the link useless.

    `seconds` is the time for all bytes of a call.
    """

    def __init__(self, sock: socket.socket, own: bytes, other: bytes) -> None:
        self._socket, self._own, self._other = sock, own, other
        self._session = b""
        self._sent = self._received = 0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def agree(self, kind: Kind, nonces: bytes) -> None:
        """Derive the key of this connection."""
        self._session = hmac.digest(kind.secret, b"session" + nonces, "sha256")

    def send_raw(self, data: bytes | memoryview, seconds: float) -> None:
        self._socket.settimeout(seconds)
        self._socket.sendall(data)

    def receive_raw(self, out: memoryview, seconds: float | None) -> None:
        """Fill `out`. None waits without end for the first byte, and HANDSHAKE_SECONDS for the others."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while out.nbytes:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise WireError("too slow")
            self._socket.settimeout(left)
            count = self._socket.recv_into(out)
            if not count:
                raise WireError("the connection has ended")
            out = out[count:]
            if deadline is None:
                deadline = time.monotonic() + HANDSHAKE_SECONDS

    def take(self, num_bytes: int, seconds: float | None) -> bytes:
        data = bytearray(num_bytes)
        self.receive_raw(memoryview(data), seconds)
        return bytes(data)

    def send(self, seconds: float, *parts: bytes | memoryview) -> None:
        """Send a message and its tag."""
        tag = self._tag(self._own, self._sent, parts)
        self._sent += 1
        for part in (*parts, tag):
            self.send_raw(part, seconds)

    def check(self, seconds: float, *parts: bytes | memoryview) -> None:
        """Receive the tag of a message that has these parts."""
        expected = self._tag(self._other, self._received, parts)
        self._received += 1
        if not hmac.compare_digest(self.take(TAG_BYTES, seconds), expected):
            raise WireError("a message was changed on its way")

    def fetch(self, key: bytes, out: memoryview, seconds: float) -> bool:
        """GET a block. False: the server does not keep it, and the content of `out` is undefined."""
        self.send(seconds, HEAD.pack(GET, 1), key)
        found = self.take(1, seconds)
        data = out if found == b"\1" else out[:0]
        self.receive_raw(data, seconds)
        self.check(seconds, found, data)
        return found == b"\1"

    def frame(self, seconds: float, num_keys: int, block_bytes: int) -> tuple[Frame, memoryview]:
        """The next frame of a FOLLOW of so many keys."""
        head = self.take(FRAME.size, seconds)
        frame = Frame(*FRAME.unpack(head))
        if not (frame.first + frame.num_blocks <= num_keys and frame.begin <= frame.end <= block_bytes):
            raise WireError("a frame of another form")
        data = np.empty(frame.nbytes, np.uint8).data
        self.receive_raw(data, seconds)
        self.check(seconds, head, data)
        return frame, data

    def _tag(self, sender: bytes, number: int, parts: tuple[bytes | memoryview, ...]) -> bytes:
        digest = hashlib.blake2b(sender + number.to_bytes(8, "little"), key=self._session, digest_size=TAG_BYTES)
        for part in parts:
            digest.update(part)
        return digest.digest()

    def close(self) -> None:
        self._socket.close()


def _proof(kind: Kind, who: bytes, nonces: bytes) -> bytes:
    about = who + nonces + kind.identity + kind.block_bytes.to_bytes(8, "little")
    return hmac.digest(kind.secret, about, "sha256")


def connect(address: tuple[str, int], kind: Kind) -> Link:
    """Connect to a server and prove to each other who we are. Raises OSError."""
    sock = socket.create_connection(address, HANDSHAKE_SECONDS)
    link = Link(sock, b"client", b"server")
    try:
        hello = link.take(len(MAGIC) + NONCE_BYTES, HANDSHAKE_SECONDS)
        if hello[: len(MAGIC)] != MAGIC:
            raise WireError("it is no kv_listen of this version")
        own = os.urandom(NONCE_BYTES)
        nonces = hello[len(MAGIC) :] + own
        link.send_raw(own + _proof(kind, b"client", nonces), HANDSHAKE_SECONDS)
        try:
            answer = link.take(PROOF_BYTES, HANDSHAKE_SECONDS)
        except WireError:
            answer = b""
        if not hmac.compare_digest(answer, _proof(kind, b"server", nonces)):
            raise WireError("it has another key, or another checkpoint, kv_dtype, block_size or version of lmkit")
        link.agree(kind, nonces)
    except OSError:
        link.close()
        raise
    return link


def accept(sock: socket.socket, kind: Kind) -> Link:
    """The server's side of `connect`. Raises OSError and leaves the socket open."""
    link = Link(sock, b"server", b"client")
    nonce = os.urandom(NONCE_BYTES)
    link.send_raw(MAGIC + nonce, HANDSHAKE_SECONDS)
    answer = link.take(NONCE_BYTES + PROOF_BYTES, HANDSHAKE_SECONDS)
    nonces = nonce + answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], _proof(kind, b"client", nonces)):
        raise WireError("a client has another key, or another checkpoint, kv_dtype, block_size or version of lmkit")
    link.send_raw(_proof(kind, b"server", nonces), HANDSHAKE_SECONDS)
    link.agree(kind, nonces)
    return link
