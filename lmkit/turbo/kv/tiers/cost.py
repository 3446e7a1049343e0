"""The expected time of loads: measured, with assumptions before the first measurement.

A job of blocks takes   latency + sum over tiers of blocks * seconds per block.

All blocks of a model have one size, so one number per tier covers both opening a file and moving its bytes. Averages
are exponential, in blocks: a page cache that went cold shows after a few blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

PRIOR_LATENCY = 300e-6  # a thread wakes up, results are collected
# Seconds for a block and bytes per second: on the low side.
PRIORS = {"host": (10e-6, 1.5e9), "disk": (150e-6, 0.4e9), "peer": (500e-6, 0.1e9)}
HALF_LIFE = 16  # blocks after which an observation counts half


class LoadCost:
    """Seconds per block of every tier, and seconds to start a job."""

    def __init__(self, block_bytes: int) -> None:
        self.latency = PRIOR_LATENCY
        self.per_block = {tier: fixed + block_bytes / speed for tier, (fixed, speed) in PRIORS.items()}

    def seconds(self, blocks: Mapping[str, int]) -> float:
        """Seconds of one job with `blocks` of each tier, from its turn on."""
        return self.latency + sum(count * self.per_block[tier] for tier, count in blocks.items())

    def observe(self, tier: str, num_blocks: int, seconds: float) -> None:
        """Learn that `num_blocks` blocks of a tier were loaded in `seconds`."""
        if num_blocks > 0:
            weight = 1 - 0.5 ** (num_blocks / HALF_LIFE)
            self.per_block[tier] += weight * (seconds / num_blocks - self.per_block[tier])

    def observe_latency(self, seconds: float) -> None:
        """Learn the time from the submission of a job with none before it until its first block was begun."""
        self.latency += 0.2 * (seconds - self.latency)
