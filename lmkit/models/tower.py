"""A checkpoint's vision tower, read for serving. It stays dense: in 16 bits as it is stored, or in float32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.errors import CheckpointError
from lmkit.formats.image_config import ImageConfig
from lmkit.models.resolved import ResolvedModel
from lmkit.models.vision import Steps, patches, tower_steps
from lmkit.models.vision_spec import VisionSpec
from lmkit.text.images import ImageSettings


@dataclass(frozen=True)
class Tower:
    """Weights by their names after `visual.`. Those in the file's own type are mapped from it."""

    spec: VisionSpec
    weights: dict[str, Tensor]
    settings: ImageSettings

    def encode(self, rows: int, columns: int, pixels: bytes) -> Steps:
        """The rows of an image of so many cells. See `tower_steps`."""
        spec, settings = self.spec, self.settings
        image = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
        image = image.view(rows * spec.unit, columns * spec.unit, spec.channels)
        grid = rows * spec.merge_size, columns * spec.merge_size
        inputs = patches(image, spec, mean=settings.mean, std=settings.std)
        return (yield from tower_steps(inputs, grid, spec, self.weights.__getitem__))


def has_tower(model: ResolvedModel) -> bool:
    """Whether the checkpoint has the weights of a tower. Some were saved without."""
    vision = model.spec.vision
    return vision is not None and any(model.reader.has(name) for name, _ in _shapes(model, vision))


def tower_bytes(model: ResolvedModel) -> int:
    """Bytes of the tower in memory."""
    if (vision := model.spec.vision) is None or not has_tower(model):
        return 0
    return sum(math.prod(shape) * _dtype(model).itemsize for _, shape in _shapes(model, vision))


def load_tower(model: ResolvedModel, max_pixels: int) -> Tower:
    """Raises CheckpointError, and UnsupportedError for a way to read images that lmkit has not."""
    vision = model.spec.vision
    assert vision is not None
    config, reader, dtype = ImageConfig(model.reader.path), model.reader, _dtype(model)
    weights = {}
    for name, shape in _shapes(model, vision):
        if not reader.has(name):
            raise CheckpointError(f"{reader.path}: tensor {name} is missing")
        weight = reader.tensor(name)
        if tuple(weight.shape) != shape or not weight.is_floating_point():
            raise CheckpointError(f"{reader.path}: {name} is {list(weight.shape)}, config.json says {list(shape)}")
        weights[name.removeprefix(vision.prefix)] = weight.to(dtype)
    settings = ImageSettings(
        token_id=vision.token_id,
        unit=vision.unit,
        min_pixels=min(config.min_pixels, max_pixels),
        max_pixels=min(config.max_pixels, max_pixels),
        mean=config.mean,
        std=config.std,
    )
    return Tower(vision, weights, settings)


def _dtype(model: ResolvedModel) -> torch.dtype:
    """float16 would overflow."""
    return model.dtype if model.dtype is torch.bfloat16 else torch.float32


def _shapes(model: ResolvedModel, spec: VisionSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of all tensors."""
    prefix, hidden, inner = spec.prefix, spec.hidden_size, spec.inner_size
    wide, (norm, first, second) = hidden * spec.merge_size**2, spec.names.merger
    linears, norms = dict[str, tuple[int, ...]](), dict[str, int]()
    for merger, size in spec.mergers.items():
        linears |= {merger + first: (wide, wide), merger + second: (model.spec.hidden_size, wide)}
        norms[merger + norm] = size
    for layer in range(spec.num_layers):
        block = f"blocks.{layer}."
        linears |= {
            block + "attn.qkv": (3 * hidden, hidden),
            block + "attn.proj": (hidden, hidden),
            **{f"{block}mlp.{name}": (inner, hidden) for name in spec.names.mlp[:-1]},
            f"{block}mlp.{spec.names.mlp[-1]}": (hidden, inner),
        }
        norms |= {block + "norm1": hidden, block + "norm2": hidden}
    patch = spec.channels, spec.temporal_patch_size, spec.patch_size, spec.patch_size
    yield prefix + "patch_embed.proj.weight", (hidden, *patch)
    if spec.patch_bias:
        yield prefix + "patch_embed.proj.bias", (hidden,)
    if spec.positions:
        yield prefix + "pos_embed.weight", (spec.positions**2, hidden)
    for name, size in norms.items():
        for kind in ("weight", "bias") if spec.layer_norm else ("weight",):
            yield f"{prefix}{name}.{kind}", (size,)
    for name, shape in linears.items():
        yield f"{prefix}{name}.weight", shape
        yield f"{prefix}{name}.bias", shape[:1]
