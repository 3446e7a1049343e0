"""What a request says that changes nothing of its answer: hints, annotations, notes of its client.

A field that changes tokens, limits, privacy or money is honoured, or refused by name. Any other field that lmkit lacks
is left out and noted. Where nobody called `begin`, as in Python, no field is a hint. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from lmkit.errors import RequestError

MAX_NAMES = 256  # of one request
MAX_SHOWN = 16
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True)
class Reading:
    """How a request is read. `ignored` has the names of what was left out, in their order; `told` is told each."""

    is_strict: bool
    told: Callable[[str], None] = lambda name: None
    ignored: dict[str, None] = field(default_factory=dict)

    def shown(self) -> str:
        """The names for a header or a log: no character of a client's that is not harmless."""
        names = [_UNSAFE.sub("?", name[:64]) for name in list(self.ignored)[:MAX_SHOWN]]
        return ",".join(names + ["..."] * (len(self.ignored) > MAX_SHOWN))


_READING: ContextVar[Reading | None] = ContextVar("reading", default=None)


def begin(*, is_strict: bool, told: Callable[[str], None] = lambda name: None) -> Reading:
    """Read a request in this context, which is the task of one request. Threads that work for it copy its context."""
    found = Reading(is_strict, told)
    _READING.set(found)
    return found


def ignore(name: str) -> bool:
    """Note a field that is left out. False where it must be refused. Raises RequestError for too many fields."""
    found = _READING.get()
    if found is None or found.is_strict:
        return False
    if len(found.ignored) >= MAX_NAMES:
        raise RequestError("invalid_request", f"more than {MAX_NAMES} fields that this server does not know")
    if (name := name[:64]) not in found.ignored:
        found.ignored[name] = None
        found.told(name)
    return True


def without_foreign(values: list[Any], kinds: Collection[str], what: str, advice: str) -> list[Any]:
    """`values` without those whose type is none of `kinds`: what another server's own tools are, or did.

    Raises ValueError where such a one is no hint.
    """
    kept = []
    for value in values:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind in kinds:
            kept.append(value)
        elif not ignore(f"{what}.{kind}"):
            raise ValueError(f"{what} of type {kind[:64]!r} are not supported: {advice}")
    return kept
