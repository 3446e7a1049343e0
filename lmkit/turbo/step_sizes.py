"""How many tokens the engine's steps compute, counted for a histogram."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from lmkit.turbo.plan import StepPlan
from lmkit.turbo.request import StepOutput

BOUNDS = tuple(1 << power for power in range(15))  # of the classes of sizes; one more has the larger ones


class StepSizes:
    """Counts steps by their tokens: those of prompts that are computed, and the new ones."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.num_tokens = 0

    def note(self, plan: StepPlan, outputs: Iterable[StepOutput]) -> None:
        """Take in a step. One whose results nobody wants any more has no tokens, and does not count."""
        size = sum(chunk.num_tokens for chunk in plan.chunks if chunk.num_tokens > chunk.num_sampled)
        size += sum(len(output.token_ids) for output in outputs)
        if size:
            self.counts[bisect_left(BOUNDS, size)] += 1
            self.num_tokens += size

    def figures(self) -> dict[str, Any]:
        """The fields of EngineStats."""
        return {"step_sizes": self.counts[:] if self.num_tokens else [], "step_tokens": self.num_tokens}
