"""Which layers of a model stay in memory, and which are read in every step. No torch.

    layer      0      1      2      3      4      5           in memory for four layers
    place      own    room   own    room   own    room        streamed layers take turns in one room

A layer is read in parts, its linears. When a part is computed, the same part of the next streamed layer is read into
its place. A layer that is one part shares the room with the layer before it: the room then holds two layers. Layers
that stay lie evenly between the others, so that the disk has time while they are computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from lmkit.errors import ConfigError

Parts = tuple[int, ...]  # bytes of each part of a layer, in the order in which they are computed


class Turn(NamedTuple):
    """A part that is read, and its place in the room, in bytes."""

    layer: int
    part: int
    start: int
    end: int

    def overlaps(self, other: Turn) -> bool:
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True)
class StreamPlan:
    """Where layers are. `fixed` are the bytes of all other weights, which stay in memory."""

    layers: tuple[Parts, ...]
    fixed: int
    streamed: tuple[int, ...] = ()  # layers, ascending

    @property
    def room(self) -> int:
        """Bytes of the memory in which streamed layers take turns."""
        return max((_room(self.layers[layer]) for layer in self.streamed), default=0)

    @property
    def memory(self) -> int:
        """Bytes of all weights in memory at a time."""
        streamed = sum(sum(self.layers[layer]) for layer in self.streamed)
        return self.fixed + sum(map(sum, self.layers)) - streamed + self.room

    @cached_property
    def turns(self) -> list[Turn]:
        """The parts that are read, in the order in which they are computed."""
        turns, end, room = list[Turn](), 0, self.room
        for layer in self.streamed:
            last = room - sum(self.layers[layer])  # layers differ in size: two in a row lie at both ends of the room
            end = last if 0 < end <= last else 0
            for part, size in enumerate(self.layers[layer]):
                turns.append(Turn(layer, part, end, end + size))
                end += size
        return turns

    @cached_property
    def behind(self) -> list[int]:
        """For each turn, how many turns before it its place was last in use. 0: no other turn uses it, and the part
        is read once.
        """
        return [self._behind(turn) for turn in range(len(self.turns))]

    def _behind(self, turn: int) -> int:
        own = self.turns[turn]
        for back in range(1, len(self.turns)):
            if self.turns[turn - back].overlaps(own):  # before the first turn comes the last one of the step before
                return back
        return 0

    @property
    def step_bytes(self) -> int:
        """Bytes that a step reads."""
        return sum(turn.end - turn.start for turn, back in zip(self.turns, self.behind, strict=True) if back)


@dataclass(frozen=True)
class Forecast:
    """What to expect of a plan, before anything is loaded."""

    plan: StreamPlan
    bandwidth: float  # of the disk, bytes a second
    token_seconds: float  # to compute each token of a step

    @property
    def read_seconds(self) -> float:
        """Seconds in which a step's layers are read."""
        return self.plan.step_bytes / self.bandwidth

    @property
    def hiding(self) -> int:
        """Tokens of a step whose computing takes as long as reading."""
        return math.ceil(self.read_seconds / self.token_seconds)

    def rate(self, batch_size: int) -> float:
        """Tokens a second of so many sequences, at most."""
        return batch_size / max(self.read_seconds, batch_size * self.token_seconds)

    def expected(self, batch_size: int) -> dict[str, Any]:
        """The facts for that batch. null where nothing is read."""
        plan = self.plan
        return {
            "streamed_layers": len(plan.streamed),
            "resident_bytes": plan.memory,
            "step_bytes": plan.step_bytes,
            "disk_bytes_per_second": int(self.bandwidth),
            "computed_tokens_per_second": round(1 / self.token_seconds, 4),
            "batch_size": batch_size,
            "tokens_per_second": round(self.rate(1), 4) if plan.streamed else None,
            "batch_tokens_per_second": round(self.rate(batch_size), 4) if plan.streamed else None,
        }

    def lines(self, batch_size: int) -> list[str]:
        """The same in lines of at most 55 characters."""
        plan, seconds = self.plan, self.read_seconds
        if not plan.streamed:
            return ["weights: all of them stay in memory"]
        return [
            f"weights: {len(plan.streamed)} of {len(plan.layers)} layers from the disk",
            f"disk: {plan.step_bytes / 1e9:.2f} GB a step at {self.bandwidth / 1e9:.2f} GB/s, {seconds:.2f} s",
            f"computing: {1 / self.token_seconds:.3g} tokens/s, {self.hiding} while the disk reads",
            f"at most {self.rate(1):.3g} tokens/s, {self.rate(batch_size):.3g} for {batch_size} sequences",
        ]


@dataclass(frozen=True)
class Streaming:
    """The user's wish: at most `memory` bytes for weights. The packed weights lie below `folder`, None = as usual.

    `step_tokens` are the tokens of the largest step: so many rows of embeddings count as weights in memory.
    """

    memory: int
    folder: Path | None = None
    step_tokens: int = 512


def plan_stream(layers: Sequence[Parts], fixed: int, budget: int) -> StreamPlan:
    """Keep as many layers as `budget` bytes hold. Raises ConfigError if not even the room for streamed layers fits."""
    plan = StreamPlan(tuple(layers), fixed)
    for num_streamed in range(2, len(layers) + 1):
        if plan.memory <= budget:
            break
        plan = StreamPlan(plan.layers, fixed, evenly(num_streamed, len(layers)))
    if plan.memory > budget:
        raise ConfigError(
            f"weights_memory {_mib(budget)} is too little for this model: embeddings, head and norms take "
            f"{_mib(fixed)}, and the layers {_mib(plan.memory - fixed)} at least; set {-(-plan.memory >> 20)}M or more"
        )
    return plan


def _room(parts: Parts) -> int:
    """Bytes in which a layer is read while the one before it is computed."""
    return sum(parts) * (2 if len(parts) == 1 else 1)


def evenly(taken: int, count: int) -> tuple[int, ...]:
    """As many as `taken` of the numbers below `count`, at equal distances."""
    return tuple(n for n in range(count) if (n + 1) * taken // count > n * taken // count)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
