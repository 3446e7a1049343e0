"""The scheduler's decisions and their reasons: counted for the metrics, and written to the debug log."""

from __future__ import annotations

import logging
from collections import Counter

from lmkit.log import get_logger
from lmkit.turbo.sequence import Sequence

log = get_logger("lmkit.turbo.scheduling.scheduler")


class DecisionStats:
    """A decision is a string "what: why". There is a fixed number of them."""

    def __init__(self) -> None:
        self.decisions: Counter[str] = Counter()

    def note(self, decision: str, seq: Sequence, figures: str = "") -> None:
        self.decisions[decision] += 1
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "%s: %s; priority key %.2f, %d of %d tokens computed, %d found cached, overtaken %d times%s",
                seq.request_id, decision, seq.priority_key, seq.num_computed, seq.num_tokens, seq.cached_tokens or 0,
                seq.overtaken, f"; {figures}" if figures else "",
            )  # fmt: skip
