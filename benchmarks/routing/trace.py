"""Conversations of several turns, from a seed. A turn's prompt is a system prompt and all turns before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from lmkit.proxy.prefixes import BYTES_PER_TOKEN, MAX_BYTES, Cut, cuts

_ENDS = [cut.end for cut in cuts([bytes(MAX_BYTES)])]
_CUTS_EACH = 1 << 12  # more than a prompt has


@dataclass(frozen=True)
class Ask:
    """One request of a conversation."""

    conversation: int
    group: int  # its system prompt
    group_tokens: int
    tokens: int  # of the whole prompt
    output: int

    def cuts(self) -> list[Cut]:
        """What `lmkit.proxy.prefixes.cuts` would give: the digests of the group first, then those of its own."""
        found, end = [], self.tokens * BYTES_PER_TOKEN
        for i, at in enumerate(_ENDS):
            if at > end:
                break
            owner = 2 * self.group if at <= self.group_tokens * BYTES_PER_TOKEN else 2 * self.conversation + 1
            found.append(Cut(owner * _CUTS_EACH + i, at))
        return found


@dataclass(frozen=True)
class Shape:
    """What a trace looks like. All sizes are means, in tokens; times are in seconds."""

    requests: int
    rate: float  # conversations a second
    turns: float = 5.0
    groups: int = 50
    system: int = 800
    user: int = 150
    output: int = 200
    think: float = 8.0


class Conversation:
    """Its turns, one after the other."""

    def __init__(self, number: int, group: int, shape: Shape, rng: Random) -> None:
        self._number, self._group, self._shape, self._rng = number, group, shape, rng
        self._group_tokens = shape.system // 4 + Random(group).randrange(2 * shape.system - shape.system // 2)
        self._tokens = self._group_tokens
        self.left = 1 + min(40, int(rng.expovariate(1 / max(shape.turns - 1, 0.01))))

    def next(self) -> Ask:
        self.left -= 1
        self._tokens += self._size(self._shape.user)
        ask = Ask(self._number, self._group, self._group_tokens, self._tokens, self._size(self._shape.output))
        self._tokens += ask.output
        return ask

    def pause(self) -> float:
        return self._rng.expovariate(1 / self._shape.think)

    def _size(self, mean: int) -> int:
        """Log-normal, as lengths of prompts and answers are."""
        return max(4, int(self._rng.lognormvariate(0, 0.8) * mean * 0.73))


def conversations(shape: Shape, rng: Random) -> Iterator[tuple[float, Conversation]]:
    """(when it begins, the conversation). A few system prompts are used by most of them."""
    now, weights = 0.0, [1 / (i + 1) for i in range(shape.groups)]
    groups = rng.choices(range(shape.groups), weights, k=shape.requests)
    for number, group in enumerate(groups):
        now += rng.expovariate(shape.rate)
        yield now, Conversation(number, group, shape, Random(rng.random()))
