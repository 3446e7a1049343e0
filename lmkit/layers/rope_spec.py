"""Rotary embedding as data. No torch: a model's specification holds one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding. `kind`: default, linear, dynamic, yarn, llama3, longrope, proportional, or none: no head is
    turned. Other fields are named as in config.json.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    rotary_dim: int = 0  # elements of a head that are rotated, the first ones
    interleaved: bool = False  # a checkpoint has the elements of a pair side by side, not half the rotary part apart
    sections: tuple[int, ...] = ()  # M-RoPE: so many pairs turn by a token's place in time, height and width
    mixed_sections: bool = False  # the sections' pairs stand in turns, not one section after the other
    partial_rotary_factor: float = 1.0  # proportional: the share of the pairs that turn, by the angles of whole heads
    # yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None  # of longrope, too
    truncate: bool = True
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # longrope: what frequencies are divided by, up to original_max_position and above
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def places(self) -> list[int]:
        """M-RoPE: 0, 1 or 2 for each pair that turns by the place in time, height or width."""
        if not self.mixed_sections:
            return [which for which, size in enumerate(self.sections) for _ in range(size)]
        ends = [3 * size for size in self.sections]
        return [pair % 3 if pair < ends[pair % 3] else 0 for pair in range(sum(self.sections))]

    @property
    def by_length(self) -> bool:
        """Whether the angles depend on the length of the prompt."""
        return self.kind in ("dynamic", "longrope")
