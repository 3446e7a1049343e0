"""From the tokens of a window to segments with times, and to where the next window begins.

The rules are those of OpenAI's whisper and of transformers: a pair of timestamps ends a segment, and what stands after
the last pair is heard again from there on (arXiv 2212.04356, 4.5).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

STEP = 0.02  # seconds from a timestamp to the next, and of a state of the encoder


class Segment(NamedTuple):
    """Text between two times, in seconds from the beginning of the audio."""

    start: float
    end: float
    token_ids: list[int]  # timestamps among them
    seek: float  # where its window begins
    text: str = ""
    logprob: float = 0.0  # mean of the tokens of its window

    @property
    def compression(self) -> float:
        """How well the text can be compressed: one that repeats itself has a high number."""
        data = self.text.encode()
        return len(data) / len(zlib.compress(data)) if data else 0.0


def cut(token_ids: Sequence[int], first: int, seek: float, length: float) -> tuple[list[Segment], float]:
    """The segments of a window's tokens, without the one that ends the text, and the seconds to the next window.
    `first`: the token of 0 s. The window of `length` seconds begins at `seek`."""
    ids = list(token_ids)
    stamps = [token >= first for token in ids]
    ends = [i + 1 for i in range(len(ids) - 1) if stamps[i] and stamps[i + 1]]
    ends_alone = stamps[-2:] == [False, True]  # nothing is said after the last timestamp

    def seconds(token: int) -> float:
        return seek + (token - first) * STEP

    if not ends:
        last = next((token for token in reversed(ids) if token >= first), first)
        end = seconds(last) if last != first else seek + length
        return [Segment(seek, end, ids, seek)], length
    advance = length
    if ends_alone:
        ends.append(len(ids))
    else:
        advance = (ids[ends[-1] - 1] - first) * STEP
    parts = [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [Segment(seconds(part[0]), seconds(part[-1]), part, seek) for part in parts], advance
