"""The vision tower of Qwen2.5-VL: pixels of an image to rows that stand for the image in the prompt.

arXiv 2502.13923, section 2.1. The tower is no hot path, so it is plain torch, one image at a time. Nothing serves
images yet: the decoder has one position for each token, and M-RoPE has three.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.models.families.llama import integer

MAX_ASPECT_RATIO = 200
Weights = Callable[[str], Tensor]

EPS = 1e-6  # of every norm of the tower; config.json does not give it
THETA = 10000.0  # of the tower's RoPE; config.json does not give it either


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """Sizes of a tower. A patch is `patch_size` pixels wide and high. `merge_size`^2 patches make one row of output.
    Layers attend within windows of `window_size` pixels, and layers of `full_layers` to the whole image."""

    num_layers: int
    hidden_size: int
    num_heads: int
    channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    window_size: int
    full_layers: tuple[int, ...]

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def window_cells(self) -> int:
        """The side of a window in rows of output."""
        return self.window_size // (self.merge_size * self.patch_size)


def vision_spec(hf: dict[str, Any]) -> VisionSpec:
    """The tower of a config.json. Raises CheckpointError and UnsupportedError."""
    vision = hf.get("vision_config")
    if not isinstance(vision, dict):
        raise CheckpointError("config.json: vision_config is not an object")
    if vision.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"vision_config: hidden_act {vision['hidden_act']!r}; lmkit has silu")
    full = vision.get("fullatt_block_indexes")
    if not isinstance(full, list) or not all(type(x) is int for x in full):
        raise CheckpointError("vision_config: fullatt_block_indexes is not a list of integers")
    spec = VisionSpec(
        num_layers=integer(vision, "depth"),
        hidden_size=integer(vision, "hidden_size"),
        num_heads=integer(vision, "num_heads"),
        channels=integer(vision, "in_channels", integer(vision, "in_chans", 3)),
        patch_size=integer(vision, "patch_size"),
        temporal_patch_size=integer(vision, "temporal_patch_size", 2),
        merge_size=integer(vision, "spatial_merge_size", 2),
        window_size=integer(vision, "window_size"),
        full_layers=tuple(full),
    )
    if spec.hidden_size % (4 * spec.num_heads) or not spec.window_cells:
        raise CheckpointError("vision_config: hidden_size, num_heads, patch_size and window_size do not fit together")
    return spec


def resized(height: int, width: int, spec: VisionSpec, *, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The height and width at which the tower reads an image: multiples of a row's pixels near the image's own shape,
    with `min_pixels` to `max_pixels` pixels in all. Raises UnsupportedError for a strip."""
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise UnsupportedError(f"image of {width} x {height} pixels: over 1 to {MAX_ASPECT_RATIO}")
    unit = spec.patch_size * spec.merge_size
    high, wide = round(height / unit) * unit, round(width / unit) * unit
    if high * wide > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        return max(unit, int(height / shrink / unit) * unit), max(unit, int(width / shrink / unit) * unit)
    if high * wide < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        return math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
    return high, wide


def patches(pixels: Tensor, spec: VisionSpec, *, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Normalized patches `[num_patches, channels * temporal_patch_size * patch_size^2]` float32 of an image
    `[height, width, channels]` uint8 whose sides `resized` gave. The patches of one row of output are neighbours."""
    size, merge = spec.patch_size, spec.merge_size
    high, wide = (side // (size * merge) for side in pixels.shape[:2])
    values = (pixels.float() / 255 - torch.tensor(mean)) / torch.tensor(std)
    cells = values.view(high, merge, size, wide, merge, size, -1).permute(0, 3, 1, 4, 6, 2, 5)
    frames = cells.unsqueeze(5).expand(*[-1] * 5, spec.temporal_patch_size, -1, -1)  # a still image repeats its frame
    return frames.reshape(high * wide * merge * merge, -1)


def tower(rows: Tensor, grid: tuple[int, int], spec: VisionSpec, weight: Weights) -> Tensor:
    """The image's rows `[num_patches / merge_size^2, size of the language model]`, from left to right and downwards.

    `rows` are `patches` of an image of `grid` patches (height, width). `weight` gives the tensor of a name behind
    `visual.`, and its dtype is the one of the computation.
    """
    cells, windows = _windows(grid, spec)
    unit = spec.merge_size**2
    order = (cells[:, None] * unit + torch.arange(unit)).flatten()
    angles = _angles(grid, spec)[order, None]
    kernel = weight("patch_embed.proj.weight").flatten(1)  # a convolution whose stride is its size
    x = F.linear(rows.to(kernel.dtype), kernel)[order]
    for layer in range(spec.num_layers):
        lengths = [len(x)] if layer in spec.full_layers else windows
        prefix = f"blocks.{layer}."
        x = x + _attention(_norm(x, prefix + "norm1", weight), lengths, angles, spec, prefix + "attn.", weight)
        x = x + _mlp(_norm(x, prefix + "norm2", weight), prefix + "mlp.", weight)
    x = _norm(x, "merger.ln_q", weight).view(len(cells), -1)
    merged = _linear(F.gelu(_linear(x, "merger.mlp.0", weight)), "merger.mlp.2", weight)
    return merged[cells.argsort()]


def _windows(grid: tuple[int, int], spec: VisionSpec) -> tuple[Tensor, list[int]]:
    """The rows of output in the order of their windows, and the number of patches in each window."""
    high, wide = (side // spec.merge_size for side in grid)
    y, x = torch.arange(high)[:, None] // spec.window_cells, torch.arange(wide) // spec.window_cells
    window = (y * wide + x).flatten()
    sizes = torch.unique(window, return_counts=True)[1] * spec.merge_size**2
    return window.argsort(stable=True), sizes.tolist()


def _angles(grid: tuple[int, int], spec: VisionSpec) -> Tensor:
    """Angles `[num_patches, head_dim]` in the order of `patches`: a quarter for the height, one for the width, and
    both again."""
    half = spec.head_dim // 2
    inverse = 1.0 / THETA ** (torch.arange(0, half, 2) / half)
    y, x = torch.meshgrid(*(torch.arange(side) for side in grid), indexing="ij")
    merge = spec.merge_size
    places = torch.stack((y, x)).view(2, grid[0] // merge, merge, grid[1] // merge, merge).transpose(2, 3)
    return (places.flatten(1)[..., None] * inverse).permute(1, 0, 2).flatten(1).repeat(1, 2)


def _attention(x: Tensor, lengths: list[int], angles: Tensor, spec: VisionSpec, prefix: str, weight: Weights) -> Tensor:
    """Attention without a mask among the `lengths` of neighbouring rows."""
    qkv = _linear(x, prefix + "qkv", weight).view(len(x), 3, spec.num_heads, spec.head_dim)
    turned = (_turn(qkv[:, 0], angles), _turn(qkv[:, 1], angles), qkv[:, 2])
    q, k, v = (part.transpose(0, 1)[None].split(lengths, 2) for part in turned)
    out = [F.scaled_dot_product_attention(*window) for window in zip(q, k, v, strict=True)]
    return _linear(torch.cat(out, 2)[0].transpose(0, 1).flatten(1), prefix + "proj", weight)


def _turn(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE in float32 on `[num_patches, num_heads, head_dim]`."""
    first, second = x.float().chunk(2, -1)
    return (x.float() * angles.cos() + torch.cat((-second, first), -1) * angles.sin()).to(x.dtype)


def _mlp(x: Tensor, prefix: str, weight: Weights) -> Tensor:
    gated = F.silu(_linear(x, prefix + "gate_proj", weight)) * _linear(x, prefix + "up_proj", weight)
    return _linear(gated, prefix + "down_proj", weight)


def _linear(x: Tensor, name: str, weight: Weights) -> Tensor:
    return F.linear(x, weight(f"{name}.weight"), weight(f"{name}.bias"))


def _norm(x: Tensor, name: str, weight: Weights) -> Tensor:
    """RMS norm in float32."""
    return weight(f"{name}.weight") * F.rms_norm(x.float(), x.shape[-1:], eps=EPS).to(x.dtype)
