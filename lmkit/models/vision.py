"""Vision towers: pixels of an image to rows that stand for the image in the prompt.

arXiv 2409.12191 (Qwen2-VL), 2502.13923 (Qwen2.5-VL), 2511.21631 (Qwen3-VL), 2303.15343 (SigLIP), 2410.07073 (Pixtral),
2312.14238 (InternVL).
The tower is plain torch, one image at a time: a batch of images could change the last bits of each. It works in small
parts, between which the caller may do something else.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from lmkit.models.vision_merge import MERGERS, Weights, linear, norm, with_breaks
from lmkit.models.vision_spec import VisionSpec
from lmkit.text.audio import AudioSettings
from lmkit.text.processed_images import AnySettings
from lmkit.text.videos import VideoSettings

PART = 256  # patches that are computed at a time
Steps = Generator[None, None, Tensor]  # stops after each part of the work, and returns its result
THETA = 10000.0  # of the tower's RoPE; config.json does not give it


class Encoded(NamedTuple):
    """An image's rows [tokens, ..], and places int32 [3, tokens + 1] of its tokens and of the one after them, counted
    from its first. None: they follow from the model and the image's grid, see runners.images."""

    rows: Tensor
    places: Tensor | None = None


Encoding = Generator[None, None, Encoded]  # such steps of a whole image


class Encodes(Protocol):
    """What encodes images."""

    @property
    def settings(self) -> AnySettings | AudioSettings: ...

    @property
    def videos(self) -> VideoSettings | str:
        """How it wants videos, or why it takes none."""

    def encode(self, rows: int, columns: int, pixels: bytes) -> Encoding:
        """The work for an image, whose fields are those of ReadImage."""


def patches(pixels: Tensor, spec: VisionSpec, *, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Normalized patches `[num_patches, channels * temporal_patch_size * patch_size^2]` float32 of an image, or of the
    frames of such a patch, `[1 or frames, height, width, channels]` uint8. The sides are multiples of `spec.unit`. The
    patches of a row of output are neighbours."""
    size, merge = spec.patch_size, spec.merge_size
    high, wide = (side // (size * merge) for side in pixels.shape[1:3])
    values = (pixels.float() / 255 - torch.tensor(mean)) / torch.tensor(std)
    cells = values.view(len(pixels), high, merge, size, wide, merge, size, -1).permute(1, 4, 2, 5, 7, 0, 3, 6)
    frames = cells.expand(*[-1] * 5, max(spec.temporal_patch_size, 1), -1, -1)  # a still image repeats
    return frames.reshape(high * wide * merge * merge, -1)


def tower(rows: Tensor, grid: tuple[int, int], spec: VisionSpec, weight: Weights) -> Tensor:
    """`tower_steps` at once."""
    steps = tower_steps(rows, grid, spec, weight)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Tensor = end.value
            return found


def tower_steps(rows: Tensor, grid: tuple[int, int], spec: VisionSpec, weight: Weights) -> Steps:
    """The image's rows `[num_patches / merge_size^2, size of the language model]`, from left to right and downwards.
    After a row stand its parts of the tapped layers, by ascending layer, of the same size each. If tokens of their own
    end the rows of cells, their embeddings are rows, too.

    `rows` are `patches` of an image of `grid` patches (height, width). `weight` gives the tensor of a name after the
    tower's prefix, and its dtype is the one of the computation, its device that of `rows`. The bits of the result do
    not depend on the caller.
    """
    names, merge = spec.names, MERGERS[type(spec.merger)]
    cells, windows = _windows(grid, spec)
    unit = spec.merge_size**2
    order = (cells[:, None] * unit + torch.arange(unit)).flatten()
    angles = None if spec.axes is None else _angles(grid, spec, spec.axes)[order, None].to(rows.device)
    kernel = weight(f"{names.patch}.weight").flatten(1)  # a convolution whose stride is its size
    bias = weight(f"{names.patch}.bias") if spec.patch_bias else None
    x = yield from in_parts(lambda part: F.linear(part.to(kernel.dtype), kernel, bias), rows[order])
    if names.first:
        of_first, table = weight(names.positions)[0].tensor_split([1])
        x = torch.cat([x + _positions(grid, spec, table)[order], weight(names.first)[0] + of_first])
        windows = [len(x)]
    elif spec.positions:
        x = x + _positions(grid, spec, weight(f"{names.positions}.weight"))[order]
    if spec.first_norm:
        x = norm(x, spec.first_norm, spec, weight)
    merged = []
    for layer in range(spec.num_layers):
        x = yield from _layer(x, [len(x)] if layer in spec.full_layers else windows, angles, spec, layer, weight)
        if layer in spec.tapped:
            tap = partial(merge, spec, weight, spec.tapped.index(layer))
            merged.append((yield from in_parts(tap, x, unit)))
    if names.first:
        x = x[:-1]
    if spec.last_norm:
        x = norm(x, spec.last_norm, spec, weight)
    found = yield from in_parts(partial(merge, spec, weight, None), x, unit)
    return with_breaks(spec, weight, torch.cat([found, *merged], -1)[cells.argsort()], grid)


def _layer(
    x: Tensor, lengths: list[int], angles: Tensor | None, spec: VisionSpec, layer: int, weight: Weights
) -> Steps:
    """Attention without a mask among the `lengths` of neighbouring rows, and an MLP."""
    names = spec.names
    prefix = names.layer.format(layer)

    def inputs(part: Tensor) -> Tensor:
        normed = norm(part, prefix + names.norms[0], spec, weight)
        bias = spec.attention_bias
        return torch.cat([linear(normed, prefix + name, spec, weight, bias) for name in names.attention], -1)

    qkv = (yield from in_parts(inputs, x)).view(len(x), 3, spec.num_heads, spec.head_dim)
    q, k, v = (part.transpose(0, 1) for part in (_turn(qkv[:, 0], angles), _turn(qkv[:, 1], angles), qkv[:, 2]))
    attended = x.new_empty(len(x), spec.hidden_size)
    num_rows = 0
    for end, length in zip(accumulate(lengths), lengths, strict=True):
        keys = slice(end - length, end)
        for start in range(end - length, end, PART):
            some = slice(start, min(start + PART, end))
            found = F.scaled_dot_product_attention(q[None, :, some], k[None, :, keys], v[None, :, keys])[0]
            attended[some] = found.transpose(0, 1).flatten(1)
            num_rows += len(attended[some])
            if num_rows >= PART:
                num_rows = 0
                yield

    scales: list[Tensor | float] = [weight(prefix + name) for name in names.scales] or [1.0, 1.0]

    def outputs(part: Tensor, attended: Tensor) -> Tensor:
        part = part + linear(attended, prefix + names.attention_out, spec, weight) * scales[0]
        return part + _mlp(norm(part, prefix + names.norms[1], spec, weight), prefix, spec, weight) * scales[1]

    return (yield from in_parts(lambda both: outputs(*both.split(spec.hidden_size, -1)), torch.cat((x, attended), -1)))


def in_parts(work: Callable[[Tensor], Tensor], rows: Tensor, unit: int = 1) -> Steps:
    """`work` of all rows, a multiple of `unit` of them at a time."""
    done = []
    for part in rows.split(max(PART // unit, 1) * unit):
        done.append(work(part))
        yield
    return torch.cat(done)


def _windows(grid: tuple[int, int], spec: VisionSpec) -> tuple[Tensor, list[int]]:
    """The rows of output in the order of their windows, and the number of patches in each window."""
    high, wide = (side // spec.merge_size for side in grid)
    size = spec.window_cells or max(high, wide)
    y, x = torch.arange(high)[:, None] // size, torch.arange(wide) // size
    window = (y * wide + x).flatten()
    sizes = torch.unique(window, return_counts=True)[1] * spec.merge_size**2
    return window.argsort(stable=True), sizes.tolist()


def _angles(grid: tuple[int, int], spec: VisionSpec, axes: tuple[float, float]) -> Tensor:
    """Angles `[num_patches, head_dim]` in the order of `patches`: a quarter for the height, one for the width, and
    both again."""
    half = spec.head_dim // 2
    inverse = torch.stack([1.0 / THETA ** ((torch.arange(0, half, 2) + shift) / half) for shift in axes])
    return (_places(grid, spec)[..., None] * inverse[:, None]).permute(1, 0, 2).flatten(1).repeat(1, 2)


def _places(grid: tuple[int, int], spec: VisionSpec) -> Tensor:
    """Row and column of each patch, `[2, num_patches]`, in the order of `patches`."""
    y, x = torch.meshgrid(*(torch.arange(side) for side in grid), indexing="ij")
    merge = spec.merge_size
    return torch.stack((y, x)).view(2, grid[0] // merge, merge, grid[1] // merge, merge).transpose(2, 3).flatten(1)


def _positions(grid: tuple[int, int], spec: VisionSpec, table: Tensor) -> Tensor:
    """Learned positions `[num_patches, hidden]` in the order of `patches`. The table's corners are the image's, and
    between its places they are interpolated."""
    last, sides = spec.positions - 1, torch.tensor(grid)[:, None]
    at = _places(grid, spec) * (last / (sides - 1).clamp(min=1))
    low = at.long().clamp(max=last)
    share, high = at - low, (low + 1).clamp(max=last)
    found = torch.zeros(1, device=table.device)
    for y, of_y in ((low[0], 1 - share[0]), (high[0], share[0])):
        for x, of_x in ((low[1], 1 - share[1]), (high[1], share[1])):
            found = found + table[y * spec.positions + x].float() * (of_y * of_x)[:, None].to(table.device)
    return found.to(table.dtype)


def _turn(x: Tensor, angles: Tensor | None) -> Tensor:
    """RoPE in float32 on `[num_patches, num_heads, head_dim]`."""
    if angles is None:
        return x
    first, second = x.float().chunk(2, -1)
    return (x.float() * angles.cos() + torch.cat((-second, first), -1) * angles.sin()).to(x.dtype)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def _mlp(x: Tensor, prefix: str, spec: VisionSpec, weight: Weights) -> Tensor:
    first, *others, last = (prefix + name for name in spec.names.mlp)
    inner = ACTIVATIONS[spec.activation](linear(x, first, spec, weight))
    for other in others:
        inner = inner * linear(x, other, spec, weight)
    return linear(inner, last, spec, weight)
