"""Mutation of files and bodies for fuzzing: bits, bytes, numbers, cuts, repetitions, moved pieces."""

from __future__ import annotations

import re

from hypothesis import strategies as st

NUMBERS = (
    b"-1",
    b"0",
    b"4294967296",
    b"18446744073709551616",
    b"1e999",
    b"9" * 400,
    b"9" * 5000,
    b"null",
    b"[]",
    b"{}",
)
PIECES = (b"\x00", b"\xff", b'"', b"\\ud800", b"[" * 2000, b"{", b"NaN", b"\r\n", b"\xf0\x9f\x99\x82", b"true", b"''")


def mutated(data: bytes, max_changes: int = 4) -> st.SearchStrategy[bytes]:
    """`data` after one to `max_changes` changes."""
    position = st.integers(0, len(data))
    change = st.tuples(
        st.sampled_from(["flip", "set", "insert", "delete", "truncate", "repeat", "move", "number"]),
        position,
        st.one_of(st.integers(1, 16), position),
        st.one_of(st.sampled_from(PIECES), st.sampled_from(NUMBERS), st.binary(min_size=1, max_size=8)),
    )
    return st.lists(change, min_size=1, max_size=max_changes).map(lambda changes: _apply(data, changes))


def _apply(data: bytes, changes: list[tuple[str, int, int, bytes]]) -> bytes:
    for kind, start, size, piece in changes:
        start = min(start, len(data))
        end = min(start + size, len(data))
        match kind:
            case "flip" if start < len(data):
                data = data[:start] + bytes([data[start] ^ (1 << size % 8)]) + data[start + 1 :]
            case "set":
                data = data[:start] + piece + data[start + len(piece) :]
            case "insert":
                data = data[:start] + piece + data[start:]
            case "delete":
                data = data[:start] + data[end:]
            case "truncate":
                data = data[:start]
            case "repeat":
                data = data[:end] + data[start:end][: 1 << 16] + data[end:]
            case "move":
                data = data[:start] + data[end:] + data[start:end]
            case "number" if found := re.compile(rb"\d+").search(data, start):
                data = data[: found.start()] + piece + data[found.end() :]
    return data
