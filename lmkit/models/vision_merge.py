"""From the patches of a vision tower to rows of the language model: what computes each kind of Merger."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from lmkit.models.vision_spec import BREAKS, Folded, Joined, Merger, Pooled, Shuffled, VisionSpec

Weights = Callable[[str], Tensor]


def linear(x: Tensor, name: str, spec: VisionSpec, weight: Weights, bias: bool | None = None) -> Tensor:
    """A linear of a layer. `bias`: whether it has one, if not as the tower says."""
    return _linear(x, name, weight, bias=spec.bias if bias is None else bias)


def norm(x: Tensor, name: str, spec: VisionSpec, weight: Weights) -> Tensor:
    """RMS norm or LayerNorm in float32."""
    if spec.layer_norm:
        return _layer_norm(x, name, weight, spec.eps)
    return _rms_norm(x, weight(f"{name}.weight"), spec.eps)


def _joined(spec: VisionSpec, weight: Weights, tap: int | None, patches: Tensor) -> Tensor:
    merger = spec.merger
    assert isinstance(merger, Joined)
    prefix, size = list(merger.mergers(spec).items())[0 if tap is None else tap + 1]
    of_norm, first, second = (prefix + name for name in merger.names)
    wide = norm(patches.view(-1, size), of_norm, spec, weight).view(-1, spec.hidden_size * spec.merge_size**2)
    return _linear(F.gelu(_linear(wide, first, weight)), second, weight)


def _pooled(spec: VisionSpec, weight: Weights, tap: int | None, patches: Tensor) -> Tensor:
    merger = spec.merger
    assert isinstance(merger, Pooled)
    mean = patches.view(-1, spec.merge_size**2, spec.hidden_size).mean(1).float()
    normed = F.rms_norm(mean, mean.shape[-1:], eps=spec.eps) * (1 + weight(f"{merger.norm}.weight").float())
    return normed.to(patches.dtype) @ weight(merger.matrix)


def _folded(spec: VisionSpec, weight: Weights, tap: int | None, patches: Tensor) -> Tensor:
    merger = spec.merger
    assert isinstance(merger, Folded)
    prefix, bias = merger.prefix, merger.bias
    normed = _rms_norm(patches, weight(f"{prefix}norm.weight"), merger.eps)
    by_channel = normed.view(-1, spec.merge_size**2, spec.hidden_size).transpose(1, 2).flatten(1)
    x = _linear(by_channel, f"{prefix}patch_merger.merging_layer", weight, bias=False)
    x = F.gelu(_linear(x, f"{prefix}linear_1", weight, bias=bias))
    return _linear(x, f"{prefix}linear_2", weight, bias=bias)


def _shuffled(spec: VisionSpec, weight: Weights, tap: int | None, patches: Tensor) -> Tensor:
    merger = spec.merger
    assert isinstance(merger, Shuffled)
    wide = patches.view(-1, spec.hidden_size * spec.merge_size**2)
    x = _layer_norm(wide, f"{merger.prefix}layer_norm", weight, merger.eps)
    return _linear(F.gelu(_linear(x, f"{merger.prefix}linear_1", weight)), f"{merger.prefix}linear_2", weight)


def with_breaks(spec: VisionSpec, weight: Weights, found: Tensor, grid: tuple[int, int]) -> Tensor:
    """The rows of all tokens of an image from those of its cells: with the embeddings of tokens that end rows."""
    if not spec.merger.breaks:
        return found
    cells = grid[1] // spec.merge_size
    middle, end = weight(BREAKS).to(found.dtype).split(1)
    *rows, last = found.split(cells)
    return torch.cat([x for row in rows for x in (row, middle)] + [last, end])


# merge(spec, weight, tap, patches): the rows of output of these patches, of the tapped layer `tap` if it is not None.
MERGERS: dict[type[Merger], Callable[[VisionSpec, Weights, int | None, Tensor], Tensor]] = {
    Joined: _joined,
    Pooled: _pooled,
    Folded: _folded,
    Shuffled: _shuffled,
}


def _linear(x: Tensor, name: str, weight: Weights, *, bias: bool = True) -> Tensor:
    return F.linear(x, weight(f"{name}.weight"), weight(f"{name}.bias") if bias else None)


def _layer_norm(x: Tensor, name: str, weight: Weights, eps: float) -> Tensor:
    factor, bias = (weight(f"{name}.{kind}").float() for kind in ("weight", "bias"))
    return F.layer_norm(x.float(), x.shape[-1:], factor, bias, eps).to(x.dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)
