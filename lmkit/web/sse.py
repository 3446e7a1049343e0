"""Reading server-sent events, and streams of a JSON object a line."""

from __future__ import annotations

import re

_EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")  # a line's end and an empty line (HTML, 9.2.5)


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


_LINE_END = re.compile(rb"\n")


class WholeEvents:
    """Passes server-sent events on whole: the bytes stay the same, only the cuts between pieces move.

    If a stream breaks off in the middle of an event, that event is dropped and an error event sent instead.
    """

    MAX_HELD = 1 << 20  # bytes of one event; a longer one is passed on in parts

    def __init__(self, *, lines: bool = False) -> None:
        """`lines`: each line is an event."""
        self._end, self.separator = (_LINE_END, b"\n") if lines else (_EVENT_END, b"\n\n")
        self._held = b""
        self.inside = False  # part of an event has been passed on

    def feed(self, data: bytes) -> bytes:
        """Add a piece. Returns the bytes of all events that are whole now."""
        start = max(0, len(self._held) - 3)  # an event's end may have begun in the last piece
        self._held += data
        end = 0
        for match in self._end.finditer(self._held, start):
            end = match.end()
        if end:
            self.inside = False
        elif len(self._held) > self.MAX_HELD:
            self.inside, end = True, len(self._held)
        whole, self._held = self._held[:end], self._held[end:]
        return whole

    def rest(self) -> bytes:
        rest, self._held = self._held, b""
        return rest


def events_of(whole: bytes) -> list[bytes]:
    """The single events of what `WholeEvents.feed` returns."""
    ends = [match.end() for match in _EVENT_END.finditer(whole)]
    starts = [0, *ends]
    return [whole[start:end] for start, end in zip(starts, [*ends, len(whole)], strict=True) if end > start]
