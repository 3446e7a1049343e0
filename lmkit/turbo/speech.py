"""What a transcript may go on with: Whisper's rules of timestamps (arXiv 2212.04356), and tokens that it never writes.

The rules and their order are those of transformers' generate. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import numpy as np  # a server that only reads the rules needs none


class SpeechRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timestamps come in pairs and never go back. Text stands between an even number of them."""

    suppress: tuple[int, ...] = ()
    begin_suppress: tuple[int, ...] = ()  # only at the beginning
    only: tuple[int, ...] = ()  # nothing else is written, as the names of languages
    timestamps: bool = False  # whether they are written; the rules below are theirs
    end: int = 0  # the token that ends a text; text tokens are below
    no_timestamps: int = 0  # the first timestamp is the token after it
    max_initial: int | None = None

    def apply(self, row: np.ndarray, known: Sequence[int]) -> None:
        """Change logits float32 [vocab] in place, after the tokens `known` of the transcript."""
        if self.only:
            kept = row[list(self.only)]
            row[:] = -math.inf
            row[list(self.only)] = kept
            return
        row[list(self.suppress)] = -math.inf
        if not known:
            row[list(self.begin_suppress)] = -math.inf
        if self.timestamps:
            self._apply_timestamps(row, known)

    def _apply_timestamps(self, row: np.ndarray, known: Sequence[int]) -> None:
        first = self.no_timestamps + 1
        row[self.no_timestamps] = -math.inf
        after = bool(known) and known[-1] >= first
        closes = len(known) < 2 or known[-2] >= first  # the last one is the second of a pair
        if after and closes:
            row[first:] = -math.inf
        elif after:
            row[: self.end] = -math.inf
        last = next((token for token in reversed(known) if token >= first), None)
        if last is not None:
            row[first : last if after and not closes else last + 1] = -math.inf
        if not known:
            row[:first] = -math.inf
            if self.max_initial is not None:
                row[first + self.max_initial + 1 :] = -math.inf
        import numpy as np

        top = row.max()
        if math.isfinite(top) and np.exp(row[first:] - top).sum() > np.exp(row[:first].max() - top):
            row[:first] = -math.inf  # some timestamp is likelier than any other token
