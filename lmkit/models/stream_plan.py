"""Which layers of a model stay in memory, and which are read in every step. No torch.

    layer      0      1       2      3       4      5         in memory for five layers
    place      own    slot 0  own    slot 1  own    slot 0    streamed layers take turns in two slots

While a layer is computed in one slot, the next one is read into the other. Layers that stay lie evenly between the
others, so that the disk has time while they are computed. A slot that only one layer uses is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.errors import ConfigError

SLOTS = 2


@dataclass(frozen=True)
class StreamPlan:
    """Where layers are. `fixed` are the bytes of all other weights, which stay in memory."""

    layer_bytes: tuple[int, ...]
    fixed: int
    streamed: tuple[int, ...] = ()  # layers, ascending; the n-th takes slot n % SLOTS

    @property
    def slots(self) -> list[int]:
        """Bytes of each slot."""
        parts = (self.streamed[slot::SLOTS] for slot in range(SLOTS))
        return [max((self.layer_bytes[layer] for layer in part), default=0) for part in parts]

    @property
    def memory(self) -> int:
        """Bytes of all weights in memory at a time."""
        streamed = sum(self.layer_bytes[layer] for layer in self.streamed)
        return self.fixed + sum(self.layer_bytes) - streamed + sum(self.slots)

    @property
    def step_bytes(self) -> int:
        """Bytes that a step reads."""
        parts = (self.streamed[slot::SLOTS] for slot in range(SLOTS))
        return sum(self.layer_bytes[layer] for part in parts if len(part) > 1 for layer in part)

    def expected(self, bandwidth: float, max_batch_size: int) -> dict[str, Any]:
        """What to expect of a disk of that bandwidth, in bytes a second. null where nothing is read."""
        seconds = self.step_bytes / bandwidth
        return {
            "streamed_layers": len(self.streamed),
            "resident_bytes": self.memory,
            "step_bytes": self.step_bytes,
            "disk_bytes_per_second": int(bandwidth),
            "tokens_per_second": round(1 / seconds, 4) if seconds else None,
            "batch_tokens_per_second": round(max_batch_size / seconds, 4) if seconds else None,
        }

    def lines(self, bandwidth: float, max_batch_size: int) -> list[str]:
        """What to expect of a disk of that bandwidth, in bytes a second, in lines of at most 55 characters."""
        if not self.streamed:
            return ["weights: all of them stay in memory"]
        seconds = self.step_bytes / bandwidth
        return [
            f"weights: {len(self.streamed)} of {len(self.layer_bytes)} layers from the disk",
            f"disk: {self.step_bytes / 1e9:.2f} GB a step at {bandwidth / 1e9:.2f} GB/s, {seconds:.2f} s",
            f"at most {1 / seconds:.3g} tokens/s, {max_batch_size / seconds:.3g} for {max_batch_size} sequences",
        ]


Planned = Callable[[StreamPlan, float], None]


@dataclass(frozen=True)
class Streaming:
    """The user's wish: at most `memory` bytes for weights. The packed weights lie below `folder`, None = as usual.

    `planned` gets the plan, and the measured bandwidth of the disk in bytes a second, before weights are read.
    """

    memory: int
    folder: Path | None = None
    planned: Planned = lambda plan, bandwidth: None


def plan_stream(layer_bytes: Sequence[int], fixed: int, budget: int) -> StreamPlan:
    """Keep as many layers as `budget` bytes hold. Raises ConfigError if not even two streamed layers fit."""
    count, sizes = len(layer_bytes), tuple(layer_bytes)
    plan = StreamPlan(sizes, fixed)
    for num_streamed in range(SLOTS + 1, count + 1):
        if plan.memory <= budget:
            break
        plan = StreamPlan(sizes, fixed, evenly(num_streamed, count))
    if plan.memory > budget:
        raise ConfigError(
            f"weights_memory {_mib(budget)} is too little for this model: embeddings, head and norms take "
            f"{_mib(fixed)}, and the layers {_mib(plan.memory - fixed)} at least; set {-(-plan.memory >> 20)}M or more"
        )
    return plan


def evenly(taken: int, count: int) -> tuple[int, ...]:
    """As many as `taken` of the numbers below `count`, at equal distances."""
    return tuple(n for n in range(count) if (n + 1) * taken // count > n * taken // count)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
