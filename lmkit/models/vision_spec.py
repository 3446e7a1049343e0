"""A vision tower as data. No torch: a model's specification holds one, and `lmkit inspect` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Names(NamedTuple):
    """Names of a tower's tensors: linears of a layer's MLP, and the merger's norm and linears."""

    mlp: tuple[str, ...]  # gate, up and down, or without a gate
    merger: tuple[str, str, str]


GATED = Names(("gate_proj", "up_proj", "down_proj"), ("ln_q", "mlp.0", "mlp.2"))


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
    window_size: int = 0  # 0 = the whole image, in all layers
    full_layers: tuple[int, ...] = ()
    activation: str = "silu"  # silu: of a gated MLP; gelu_tanh or quick_gelu: of one without a gate
    layer_norm: bool = False  # norms are LayerNorms
    patch_bias: bool = False
    positions: int = 0  # side of the square grid of learned positions, which is stretched over the image; 0 = none
    tapped: tuple[int, ...] = ()  # DeepStack: layers whose outputs are merged, too, for the first layers of the model
    names: Names = GATED
    prefix: str = "visual."  # of the names in a checkpoint
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
        """The side of a window in rows of output; 0 = the whole image."""
        return self.window_size // self.unit

    @property
    def mergers(self) -> dict[str, int]:
        """The width that the norm of each merger has, by the prefix of its names. That of a tapped layer normalizes
        the patches of a row together."""
        wide = self.hidden_size * self.merge_size**2
        return {"merger.": self.hidden_size} | {f"deepstack_merger_list.{i}.": wide for i in range(len(self.tapped))}
