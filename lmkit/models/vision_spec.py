"""A vision tower as data. No torch: a model's specification holds one, and `lmkit inspect` reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """Sizes of a tower. A patch is `patch_size` pixels wide and high. `merge_size`^2 patches make one row of output.
    Layers attend within windows of `window_size` pixels, and layers of `full_layers` to the whole image."""

    num_layers: int
    hidden_size: int
    inner_size: int  # of the MLP
    num_heads: int
    channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    window_size: int
    full_layers: tuple[int, ...]
    token_id: int = -1  # the token that stands for each row of output in a prompt; -1 = config.json names none

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def unit(self) -> int:
        """The side in pixels of the square that one row of output stands for."""
        return self.merge_size * self.patch_size

    @property
    def window_cells(self) -> int:
        """The side of a window in rows of output."""
        return self.window_size // self.unit
