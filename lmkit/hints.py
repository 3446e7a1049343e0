"""What a request says that changes nothing of its answer: hints, annotations, notes of its client.

A field that changes tokens, limits, privacy or money is honoured, or refused by name. Any other field that lmkit lacks
is left out and noted. Where nobody called `begin`, as in Python, no field is a hint. No torch here.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass, field

from lmkit.errors import RequestError

MAX_NAMES = 256  # of one request
MAX_SHOWN = 16
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True)
class Reading:
    """How a request is read. `ignored` has the names of what was left out, in their order."""

    is_strict: bool
    ignored: dict[str, None] = field(default_factory=dict)

    def shown(self) -> str:
        """The names for a header or a log: no character of a client's that is not harmless."""
        names = [_UNSAFE.sub("?", name[:64]) for name in list(self.ignored)[:MAX_SHOWN]]
        return ",".join(names + ["..."] * (len(self.ignored) > MAX_SHOWN))


_READING: ContextVar[Reading | None] = ContextVar("reading", default=None)


def begin(*, is_strict: bool) -> Reading:
    """Read a request in this context, which is the task of one request. Threads that work for it copy its context."""
    found = Reading(is_strict)
    _READING.set(found)
    return found


def ignore(name: str) -> bool:
    """Note a field that is left out. False where it must be refused. Raises RequestError for too many fields."""
    found = _READING.get()
    if found is None or found.is_strict:
        return False
    if len(found.ignored) >= MAX_NAMES:
        raise RequestError("invalid_request", f"more than {MAX_NAMES} fields that this server does not know")
    found.ignored[name[:64]] = None
    return True
