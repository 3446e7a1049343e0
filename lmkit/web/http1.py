"""Reading an HTTP/1.1 answer: its head, and its body without the framing. Pure, and strict (RFC 9112).

Whatever servers read in different ways is refused: a line that ends with LF alone or goes on in the next, a length that
is no number, and a coding that is not `chunked`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_HEAD_BYTES = 128 << 10
MAX_LINE_BYTES = 4 << 10  # of a chunk's length, or of one trailer
MAX_TRAILERS = 64
_STATUS = re.compile(rb"HTTP/1\.([01]) ([0-9]{3})(?: [^\r\n\0]*)?")
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):([^\r\n\0]*)")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n\0]*)?")

Headers = tuple[tuple[bytes, bytes], ...]


class MalformedError(ValueError):
    """It is no HTTP that every reader reads in one way. The text does not quote it."""


class Head(NamedTuple):
    """The names of `headers` are as the server spells them, those of `fields` in lower case."""

    minor: int  # of HTTP/1.
    status: int
    headers: Headers
    fields: dict[bytes, bytes]

    @property
    def is_last(self) -> bool:
        """Whether the server closes the connection after the answer."""
        return self.minor == 0 or b"close" in self.fields.get(b"connection", b"").lower()


def read_head(data: bytes) -> Head:
    """The head without its empty line. Raises MalformedError."""
    first, *lines = data.split(b"\r\n")
    status = _STATUS.fullmatch(first)
    if status is None:
        raise MalformedError("its first line is not HTTP")
    headers = []
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise MalformedError("a malformed header")
        headers.append((field[1], field[2].strip(b" \t")))
    fields = {name.lower(): value for name, value in headers}
    if len(fields) < len(headers):
        for name in (b"content-length", b"transfer-encoding"):
            if len({value for other, value in headers if other.lower() == name}) > 1:
                raise MalformedError(f"two of {name.decode()}")
    return Head(int(status[1]), int(status[2]), tuple(headers), fields)


class Body:
    """The body of one answer. `feed` it what arrives."""

    def __init__(self, head: Head, method: str) -> None:
        """Raises MalformedError for a framing that is not known."""
        coding, length = head.fields.get(b"transfer-encoding"), head.fields.get(b"content-length")
        self._is_chunked = coding is not None
        if coding is not None and coding.lower() != b"chunked":
            raise MalformedError("a transfer-encoding that is not chunked")
        if length is not None and not (length.isdigit() and len(length) < 16):
            raise MalformedError("a content-length that is no number")
        has_none = method == "HEAD" or head.status in (204, 304)
        self._left = 0 if has_none or self._is_chunked else int(length or 0)  # bytes to come, of a chunk or in all
        self.ends_with_connection = not has_none and not self._is_chunked and length is None
        self.is_whole = has_none or not (self._is_chunked or self._left or self.ends_with_connection)
        self.is_overrun = False  # bytes came after the end
        self._held, self._num_trailers = b"", -1
        self._is_behind_chunk = False

    def feed(self, data: bytes) -> list[bytes]:
        """Parts of the body. Raises MalformedError for a framing that is broken."""
        if self.is_whole:
            self.is_overrun |= bool(data)
            return []
        if self._is_chunked:
            return self._chunks(data)
        if self.ends_with_connection:
            return [data]
        piece = data[: self._left]
        self._left -= len(piece)
        self.is_whole = not self._left
        self.is_overrun = len(piece) < len(data)
        return [piece]

    def _chunks(self, data: bytes) -> list[bytes]:
        if self._held:
            data = self._held + data
        at, pieces = 0, list[bytes]()
        while at < len(data) and not self.is_whole:
            if self._left:
                pieces.append(data[at : at + self._left])
                at += len(pieces[-1])
                self._left -= len(pieces[-1])
                self._is_behind_chunk = not self._left
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                break
            self._line(data[at:end])
            at = end + 2
        self._held = data[at:]
        if len(self._held) > MAX_LINE_BYTES and not self.is_whole:
            raise MalformedError("a chunk's length that does not end")
        self.is_overrun = self.is_whole and bool(self._held)
        return pieces

    def _line(self, line: bytes) -> None:
        if self._is_behind_chunk:
            if line:
                raise MalformedError("a chunk that is longer than its length")
            self._is_behind_chunk = False
        elif self._num_trailers >= 0:
            self._num_trailers += 1
            self.is_whole = not line
            if self._num_trailers > MAX_TRAILERS or (line and not _FIELD.fullmatch(line)):
                raise MalformedError("malformed trailers")
        elif chunk := _CHUNK.fullmatch(line):
            self._left = int(chunk[1], 16)
            if not self._left:
                self._num_trailers = 0
        else:
            raise MalformedError("a chunk without a length")
