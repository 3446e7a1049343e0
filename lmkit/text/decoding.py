"""tokenizer.json's decoder as stages that process each vocabulary piece once, so text streams in linear time."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from lmkit.errors import UnsupportedError


class Stage(Protocol):
    """One step of a decoder, for one text. Each text needs new stages."""

    def push(self, pieces: list[str]) -> list[str]:
        """The output that is certain after these pieces."""

    def finish(self) -> list[str]:
        """The output that was held back. A character whose last byte is missing is left out."""

    def alone(self, piece: str | bytes) -> str | bytes:
        """The output of one piece inside a text, independent of its neighbours."""


class PerPiece:
    """A decoder that maps pieces one by one.

    The first piece of a text may be mapped differently (Metaspace, Replace).
    """

    def __init__(self, first: Callable[[str], str], rest: Callable[[str], str]) -> None:
        self._map, self._rest = first, rest

    def push(self, pieces: list[str]) -> list[str]:
        out = []
        for piece in pieces:
            out.append(self._map(piece))
            self._map = self._rest
        return out

    def finish(self) -> list[str]:
        return []

    def alone(self, piece: str | bytes) -> str | bytes:
        return self._rest(piece) if isinstance(piece, str) else piece


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: the byte itself if it is visible Latin-1, else the next code point
    from 256.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
BYTE_ALPHABET = _BYTE_OF.keys()
CHARACTER_OF = {byte: character for character, byte in _BYTE_OF.items()}


def _piece_bytes(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in piece])
    except KeyError:  # an added token outside the alphabet is its own text
        return piece.encode()


def _unfinished(data: bytes | bytearray) -> int:
    """How many bytes at the end of `data` begin a character whose last bytes are missing. The rest is UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return len(data) - error.start if error.reason == "unexpected end of data" else 0
    return 0


class ByteLevel:
    """Pieces spell bytes. A character that is split over tokens waits for its last byte."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, pieces: list[str]) -> list[str]:
        return [self._utf8.decode(b"".join(map(_piece_bytes, pieces)))]

    def finish(self) -> list[str]:
        held, _ = self._utf8.getstate()
        self._utf8.reset()
        # Half a surrogate (ED A0) is held like an unfinished character, and no byte can finish it.
        return [] if _unfinished(held) else [held.decode(errors="replace")]

    def alone(self, piece: str | bytes) -> str | bytes:
        return _piece_bytes(piece) if isinstance(piece, str) else piece


_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class ByteFallback:
    """Runs of `<0xNN>` pieces are UTF-8.

    The library shows a run with any bad byte as one U+FFFD per byte, so a run can only be shown when it ends.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, pieces: list[str]) -> list[str]:
        out = []
        for piece in pieces:
            if _BYTE_PIECE.fullmatch(piece):
                self._run.append(int(piece[3:5], 16))
            else:
                out += [*self._text(), piece]
        return out

    def finish(self) -> list[str]:
        if unfinished := _unfinished(self._run):
            del self._run[-unfinished:]
        return self._text()

    def _text(self) -> list[str]:
        """The run, which ends here."""
        run = bytes(self._run)
        self._run.clear()
        try:
            return [run.decode()] if run else []
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)

    def alone(self, piece: str | bytes) -> str | bytes:
        return bytes([int(piece[3:5], 16)]) if isinstance(piece, str) and _BYTE_PIECE.fullmatch(piece) else piece


class StripStart:
    """Strip after Fuse: removes up to `count` leading characters of the whole text."""

    def __init__(self, char: str, count: int) -> None:
        self._char, self._count = char, count

    def push(self, pieces: list[str]) -> list[str]:
        text = "".join(pieces)
        while text and self._count:
            if text[0] != self._char:
                self._count = 0
                break
            text, self._count = text[1:], self._count - 1
        return [text]

    def finish(self) -> list[str]:
        return []

    def alone(self, piece: str | bytes) -> str | bytes:
        return piece


CLEANED = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


def decoder_stages(decoder: Any) -> Callable[[], list[Stage]]:
    """A function that makes new stages for tokenizer.json's decoder.

    Raises UnsupportedError for a decoder without stages.
    """
    if decoder is None:
        return lambda: [PerPiece(lambda piece: piece, lambda piece: " " + piece)]
    spec = json.loads(decoder.__getstate__())
    specs = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    makers: list[Callable[[], Stage]] = []
    fused = False
    for spec in specs:
        match spec:
            case {"type": "ByteLevel"} if len(specs) == 1:
                makers.append(ByteLevel)
            case {"type": "ByteFallback"} if not fused:
                makers.append(ByteFallback)
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
                replace = _replacer(old, new)
                makers.append(partial(PerPiece, replace, replace))
            case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": str(scheme)} if not fused:
                rest = _replacer(mark, " ")
                first = rest if scheme == "never" else _replacer(mark, "")
                makers.append(partial(PerPiece, first, rest))
            case {"type": "WordPiece", "prefix": str(prefix), "cleanup": bool(cleanup)} if not fused:
                clean: Callable[[str], str] = _cleaned if cleanup else str
                makers.append(partial(PerPiece, clean, partial(_word_piece, prefix, clean)))
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": str(char), "start": int(count), "stop": 0} if fused:
                makers.append(partial(StripStart, char, count))
            case _:
                raise UnsupportedError(f"tokenizer.json: decoder {json.dumps(spec)} is not one lmkit can stream")
    return lambda: [make() for make in makers]


def _replacer(old: str, new: str) -> Callable[[str], str]:
    return lambda piece: piece.replace(old, new)


def _word_piece(prefix: str, clean: Callable[[str], str], piece: str) -> str:
    """A piece that is not the first: words begin with a space, and the prefix marks pieces that begin none."""
    return clean(piece.removeprefix(prefix) if piece.startswith(prefix) else " " + piece)


def _cleaned(piece: str) -> str:
    """Without the spaces that a tokenizer of words puts around punctuation, as the library's WordPiece removes them."""
    for old, new in CLEANED:
        piece = piece.replace(old, new)
    return piece
