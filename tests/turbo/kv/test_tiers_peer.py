"""Blocks from another engine: whole and right, or computed. Nobody without the key gets or gives any."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from lmkit.errors import ConfigError
from lmkit.turbo.kv.tiers import peer as peers
from lmkit.turbo.kv.tiers import wire
from lmkit.turbo.kv.tiers.block_server import MAX_GREETING, BlockServer
from lmkit.turbo.kv.tiers.peer import PeerTier
from lmkit.turbo.kv.tiers.store import TierStore
from tests.turbo.kv.tier_helpers import BLOCK, KV_IDENTITY, ArrayBlocks, chain, content, load, save

KIND = wire.Kind(b"k" * 32, KV_IDENTITY, BLOCK)
KEYS = chain(6)


@contextmanager
def served(store: TierStore) -> Iterator[BlockServer]:
    assert store.filling is not None
    find = store.lookup_here, store.last_here
    given = BlockServer(("127.0.0.1", 0), KIND, *find, store.read_here, store.filling.frames)
    yield given
    given.close()


@pytest.fixture
def server() -> Iterator[BlockServer]:
    """Has the first four blocks."""
    blocks = ArrayBlocks(8)
    store = TierStore(blocks, host_bytes=8 * BLOCK, layers=blocks)
    save(store, blocks, KEYS[:4])
    with served(store) as given:
        yield given
    store.close()


def store_at(address: tuple[str, int], kind: wire.Kind = KIND, host: int = 0) -> tuple[TierStore, ArrayBlocks]:
    blocks = ArrayBlocks(8)
    return TierStore(blocks, host_bytes=host * BLOCK, peer=PeerTier(address, kind)), blocks


@pytest.mark.parametrize("host", [0, 8])
def test_the_blocks_of_a_peer_are_found_and_loaded(server: BlockServer, host: int) -> None:
    store, blocks = store_at(server.address, host=host)
    assert store.lookup_here(KEYS) == 0
    assert store.lookup(KEYS) == 4
    assert load(store, blocks, KEYS).hits == {"peer": 4}  # the fifth is a miss
    assert load(store, blocks, KEYS[:4]).hits == {"host" if host else "peer": 4}
    assert store.stats()["loaded_peer"] == (4 if host else 8)
    store.close()


def test_the_last_block_that_a_peer_keeps_is_found_in_one_question(server: BlockServer) -> None:
    store, blocks = store_at(server.address, host=8)
    assert [store.last(keys) for keys in (KEYS, KEYS[4:], [], KEYS[::-1])] == [4, 0, 0, 6]
    mixed = [KEYS[5], KEYS[0], KEYS[4], KEYS[2], KEYS[4]]
    assert (store.last(mixed), store.last_here(mixed)) == (4, 0)
    assert load(store, blocks, KEYS[2:3]).hits == {"peer": 1}, "what is found there is known to be there"
    save(store, blocks, KEYS[4:5])
    assert (store.last(mixed), store.last_here(mixed)) == (5, 5)
    store.close()


def test_connections_that_say_nothing_keep_no_peer_out(server: BlockServer) -> None:
    with ExitStack() as stack:
        for _ in range(3 * MAX_GREETING):
            stack.enter_context(socket.create_connection(server.address))
        store, _ = store_at(server.address)
        assert store.lookup(KEYS) == 4
        store.close()


@pytest.mark.parametrize(
    "kind", [KIND._replace(secret=b"x" * 32), KIND._replace(identity=bytes(32)), KIND._replace(block_bytes=BLOCK + 1)]
)
def test_another_key_or_another_model_gets_nothing(server: BlockServer, kind: wire.Kind) -> None:
    with pytest.raises(OSError, match="another key, or another checkpoint"):
        wire.connect(server.address, kind)
    store, _ = store_at(server.address, kind)
    assert store.lookup(KEYS) == 0
    assert store.stats()["peer_connected"] == 0
    store.close()


def test_a_server_that_does_not_know_the_key_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def impostor() -> None:
            sock, _ = listener.accept()
            sock.sendall(wire.MAGIC + bytes(wire.NONCE_BYTES))
            sock.recv(100)
            sock.sendall(bytes(wire.PROOF_BYTES))

        threading.Thread(target=impostor, daemon=True).start()
        with pytest.raises(OSError, match="another key"):
            wire.connect(listener.getsockname(), KIND)


class Meddler:
    """Passes bytes between an engine and its peer. `stop` silences it, `flip` changes the last byte it passes."""

    def __init__(self, to: tuple[str, int]) -> None:
        self.stop, self.flip = threading.Event(), threading.Event()
        self._to, self._listener = to, socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            other = socket.create_connection(self._to)
            threading.Thread(target=self._pass, args=(sock, other, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(other, sock, True), daemon=True).start()

    def _pass(self, source: socket.socket, to: socket.socket, answers: bool) -> None:
        try:
            while data := bytearray(source.recv(1 << 16)):
                if self.stop.is_set() and answers:
                    continue
                if self.flip.is_set() and answers:
                    data[-1] ^= 1
                to.sendall(data)
        except OSError:
            pass
        to.close()


@pytest.mark.parametrize("how", ["stop", "flip"])
def test_a_silent_peer_and_a_changed_block_are_misses(
    server: BlockServer, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "RETRY_SECONDS", 60.0)
    between = Meddler(server.address)
    store, blocks = store_at(between.address)
    assert store.lookup(KEYS) == 4
    getattr(between, how).set()
    start = time.monotonic()
    assert load(store, blocks, KEYS[:4]).num_blocks == 0  # nothing reached the device: `load` checks it
    assert time.monotonic() - start < 5
    stats = store.stats()
    assert (stats["peer_connected"], stats["failures"]) == (0, 1)
    assert store.lookup(KEYS) == 0
    store.close()


def test_a_peer_that_comes_back_is_asked_again(server: BlockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(peers, "ASK_SECONDS", 20.0)  # a busy machine is not a slow peer
    monkeypatch.setattr(peers, "BLOCK_SECONDS", 20.0)
    between = Meddler(server.address)
    store, blocks = store_at(between.address)
    between.flip.set()
    assert store.lookup(KEYS) == 0
    between.flip.clear()
    end = time.monotonic() + 20
    while not store.stats()["peer_connected"]:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert store.lookup(KEYS) == 4
    assert load(store, blocks, KEYS[:4]).num_blocks == 4
    store.close()


@pytest.mark.parametrize("message", [wire.HEAD.pack(wire.GET, 2), wire.HEAD.pack(wire.HAS, 0), wire.HEAD.pack(b"?", 1)])
def test_a_message_of_another_form_ends_the_connection(server: BlockServer, message: bytes) -> None:
    link = wire.connect(server.address, KIND)
    with suppress(BrokenPipeError):  # the server may close before the tag is sent
        link.send(1.0, message, KEYS[0])
    with pytest.raises(OSError, match=r"ended|reset"):
        link.take(1, 10.0)
    good = wire.connect(server.address, KIND)  # the others are served on
    good.send(1.0, wire.HEAD.pack(wire.GET, 1), KEYS[0])
    data = memoryview(bytearray(BLOCK))
    assert good.take(1, 10.0) == b"\1"
    good.receive_raw(data, 10.0)
    good.check(10.0, b"\1", data)
    assert data == content(KEYS[0]).tobytes()
    good.close()


def test_key_files_and_addresses(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match="cannot be read"):
        wire.read_secret(str(path))
    path.write_text("a" * 32 + "\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        wire.read_secret(str(path))
    path.chmod(0o600)
    assert wire.read_secret(str(path)) == b"a" * 32
    path.write_text("short")
    with pytest.raises(ConfigError, match="too few"):
        wire.read_secret(str(path))
    with pytest.raises(ConfigError, match="need a key"):
        wire.read_secret(None)
    assert wire.address_of(":7400", "kv_peer") == ("127.0.0.1", 7400)
    assert wire.address_of("[::1]:1", "kv_peer") == ("::1", 1)
    for text in ("host", "host:", "host:x", "host:70000"):
        with pytest.raises(ConfigError, match=r"kv_peer .*: write HOST:PORT"):
            wire.address_of(text, "kv_peer")
