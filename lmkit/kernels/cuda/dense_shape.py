"""The tiles of csrc/dense.cu by the number of tokens. They do not change a result."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

MAX_STAGES = 6


class DenseShape(NamedTuple):
    """A block of threads; the names are those of csrc/dense.cu."""

    token_tiles: int  # N_TILES, of a warp
    rows: int  # tiles of outputs of a warp
    warps_n: int
    warps_m: int
    step: int
    stages: int = 2

    @property
    def defines(self) -> dict[str, int]:
        names = "N_TILES", "ROWS", "WARPS_N", "WARPS_M", "STEP", "STAGES"
        return dict(zip(names, self, strict=True))

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_m

    @property
    def tokens(self) -> int:
        """Of a block."""
        return 8 * self.token_tiles * self.warps_m

    @property
    def outputs(self) -> int:
        """Of a block."""
        return 16 * self.rows * self.warps_n

    @property
    def stage_bytes(self) -> int:
        return (self.outputs + self.tokens) * 16 * (self.step // 8 | 1)

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes


# Few tokens: many small blocks, each with long rows under way. Many: tiles whose operands are read often.
SHAPES = (
    DenseShape(1, 1, 2, 1, 128), DenseShape(2, 1, 2, 1, 128), DenseShape(4, 1, 2, 1, 128), DenseShape(8, 1, 4, 1, 64),
    DenseShape(8, 2, 4, 2, 64),
)  # fmt: skip


@cache
def dense_shape(tokens: int, limit: int) -> DenseShape:
    """The shape for so many tokens on a GPU whose blocks have `limit` bytes of shared memory: room for two blocks."""
    shape = next((shape for shape in SHAPES if shape.tokens >= tokens), SHAPES[-1])
    return shape._replace(stages=max(2, min(MAX_STAGES, limit // (2 * shape.stage_bytes))))
