"""What the proxy keeps of an answer so that another node can go on with it. See web.resume."""

from __future__ import annotations

import re
import secrets
import time

from lmkit.web.budget import Share
from lmkit.web.resume import MAX_JOURNAL_BYTES, STREAM_HEADER, Identity
from lmkit.web.sse import WholeEvents

_NOTE = re.compile(rb"^: lmkit ([^\n]+)\n\n", re.MULTILINE)  # an event's own lines never begin with a colon
_KEEP_ALIVE = b": keep-alive\n\n"


class Journal:
    """One call's. It knows nothing until `begin`: only lmkit's nodes that trust the proxy write notes."""

    def __init__(self, share: Share) -> None:
        """`share` pays for what is kept. If it has no room, the stream cannot go on elsewhere."""
        self._share = share
        self._identity = Identity(secrets.token_hex(16), int(time.time()))
        self._events = WholeEvents()
        self._entries = bytearray()  # with a comma after each
        self._held = b""  # events whose note has not come
        self.num_notes = 0
        self.is_open = False  # the stream can go on elsewhere
        self.is_complete = False  # the client has all of the answer
        self._noted = False  # the node writes notes

    @property
    def key(self) -> str:
        """What lmkit's nodes make the answer's id of."""
        return self._identity.key

    def header(self) -> tuple[bytes, bytes]:
        """For the next node."""
        return STREAM_HEADER, str(self._identity._replace(num_bytes=len(self.known()))).encode()

    def known(self) -> bytes:
        """What stands before the body for the next node."""
        return b"[" + self._entries[:-1] + b"]" if self._identity.fingerprint else b""

    def begin(self, fingerprint: bytes | None) -> bool:
        """A node answers with this header. False: it does not go on with the stream that the client has."""
        fits = fingerprint is not None and self._identity.fingerprint in ("", fingerprint.decode("latin-1"))
        if fits and fingerprint is not None:
            self._identity = self._identity._replace(fingerprint=fingerprint.decode("latin-1"))
            self._events, self._held, self.is_open = WholeEvents(), b"", True
            self._noted = True
        return fits

    @property
    def has_begun(self) -> bool:
        """A node has begun the answer in a way that another one can go on with."""
        return bool(self._identity.fingerprint)

    def forget(self) -> None:
        """The next node begins the answer again: the client has nothing of it."""
        self._identity = self._identity._replace(fingerprint="")
        self._events, self._held, self._noted = WholeEvents(), b"", False
        self._close()

    def feed(self, data: bytes) -> bytes:
        """Add a piece of the answer. Returns the events that the client may have."""
        if not self._noted:
            return data
        whole = self._events.feed(data)
        if whole == _KEEP_ALIVE and not self._held:
            return whole
        self._held += whole
        ready, end = b"", 0
        for note in _NOTE.finditer(self._held):
            ready += self._held[end : note.start()]
            end = note.end()
            self._note(note[1])
            if not self._noted:
                return ready + self.rest(end)
        self._held = self._held[end:]
        return ready

    def rest(self, start: int = 0) -> bytes:
        """What is held, such as the node's own error event."""
        held, self._held = self._held[start:], b""
        return held + self._events.rest()

    def _note(self, entry: bytes) -> None:
        self.is_complete = entry == b"end"
        self._noted = entry not in (b"end", b"error")
        if not self.is_open:
            return
        fits = len(self._entries) + len(entry) + 1 < MAX_JOURNAL_BYTES
        if not self._noted or not fits or not self.reserve(len(entry) + 1):
            self._close()
        else:
            self._entries += entry + b","
            self.num_notes += 1

    def _close(self) -> None:
        self.is_open = False
        self._share.add(-len(self._entries))
        self._entries.clear()

    def reserve(self, num_bytes: int) -> bool:
        """Pay for bytes that are kept until the call ends. False: there is no room."""
        return self._share.try_add(num_bytes)
