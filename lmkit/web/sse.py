"""Reading server-sent events."""

from __future__ import annotations


class EventData:
    """The data of events, from pieces of a stream that are cut anywhere.

    Lines are split as bytes: str.splitlines would also split at U+2028 inside an answer.
    """

    def __init__(self) -> None:
        self._held, self._lines = b"", list[bytes]()

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that end in this piece."""
        ended = []
        *lines, self._held = (self._held + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._lines.append(line[5:].removeprefix(b" "))
            elif not line and self._lines:
                ended.append(b"\n".join(self._lines))
                self._lines.clear()
        return ended
