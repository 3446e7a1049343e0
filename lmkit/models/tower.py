"""A checkpoint's vision tower, read for serving. It stays dense: in 16 bits as it is stored, or in float32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.image_config import ImageConfig, added_tokens
from lmkit.formats.video_config import VideoConfig
from lmkit.log import get_logger
from lmkit.models.resolved import ResolvedModel
from lmkit.models.vision import Encoded, Encoding, patches, tower_steps
from lmkit.models.vision_spec import BREAKS, Shapes, VisionSpec
from lmkit.text.images import ImageSettings
from lmkit.text.videos import NO_VIDEOS, VideoSettings

log = get_logger(__name__)


@dataclass(frozen=True)
class Tower:
    """Weights by their names after the tower's prefix. Those in the file's own type are mapped from it."""

    spec: VisionSpec
    weights: dict[str, Tensor]
    settings: ImageSettings
    device: str = "cpu"  # torch's, which has the weights
    videos: VideoSettings | str = NO_VIDEOS

    def encode(self, rows: int, columns: int, pixels: bytes) -> Encoding:
        """The rows of an image of so many cells, or of frames, on the device. See `tower_steps`."""
        spec, settings = self.spec, self.settings
        image = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
        image = image.view(-1, rows * spec.unit, columns * spec.unit, spec.channels)
        found = []
        for tile in image.split(settings.side or image.shape[1], 1):
            grid = tile.shape[1] // spec.patch_size, tile.shape[2] // spec.patch_size
            inputs = patches(tile, spec, mean=settings.mean, std=settings.std).to(self.device)
            found.append((yield from tower_steps(inputs, grid, spec, self.weights.__getitem__)))
        return Encoded(torch.cat(found))


def has_tower(model: ResolvedModel) -> bool:
    """Whether the checkpoint has the weights of a tower. Some were saved without."""
    vision = model.spec.vision
    return vision is not None and any(model.reader.has(vision.prefix + name) for name in _shapes(model, vision))


def tower_bytes(model: ResolvedModel) -> int:
    """Bytes of the tower in memory."""
    if (vision := model.spec.vision) is None or not has_tower(model):
        return 0
    return sum(math.prod(shape) * tower_dtype(model).itemsize for shape in _shapes(model, vision).values())


def load_tower(model: ResolvedModel, max_pixels: int, device: str = "cpu") -> Tower:
    """A tower on torch's `device`. Raises CheckpointError, and UnsupportedError for a way to read images that lmkit has
    not."""
    vision = model.spec.vision
    assert vision is not None
    config, reader, dtype = ImageConfig(model.reader.path, vision.reading), model.reader, tower_dtype(model)
    if vision.merger.marks and (found := added_tokens(reader.path, vision.merger.marks)):
        vision = replace(vision, merger=replace(vision.merger, breaks=found))
    side = vision.reading.side
    weights = {name: x.to(device) for name, x in read_weights(model, vision.prefix, _shapes(model, vision))}
    breaks = vision.merger.breaks
    if breaks:
        weights[BREAKS] = model.source.embed_tokens()[list(breaks)].to(dtype).to(device)
    tokens = (side // vision.unit) ** 2
    if vision.sees_all and min(filter(None, model.spec.windows), default=tokens) < tokens:
        raise UnsupportedError(f"{reader.path}: an image's {tokens} tokens exceed a sliding window")
    if side**2 > max_pixels:
        raise UnsupportedError(f"image_pixels: this tower reads {side} x {side} pixels, and {max_pixels:,} are allowed")
    videos = _videos(reader.path, vision, config, max_pixels)
    settings = ImageSettings(
        token_id=vision.token_id,
        unit=vision.unit,
        side=side,
        edge=config.edge,
        resample=config.resample,
        breaks=breaks,
        sees_all=vision.sees_all,
        min_pixels=min(config.min_pixels, max_pixels),
        max_pixels=max_pixels if config.tiles[1] else min(config.max_pixels, max_pixels),
        tiles=config.tiles,
        mean=config.mean,
        std=config.std,
        frames_id=-1 if isinstance(videos, str) else videos.token_id,
    )
    return Tower(vision, weights, settings, device, videos)


def _videos(folder: Path, vision: VisionSpec, images: ImageConfig, max_pixels: int) -> VideoSettings | str:
    """How videos are read, or why they are refused. Raises CheckpointError."""
    if vision.videos is None:
        return NO_VIDEOS
    try:
        config = VideoConfig(folder, vision.unit, images, grid=vision.videos.grid)
    except UnsupportedError as error:
        log.warning("videos are refused: %s", error)
        return "the server does not read videos as this checkpoint wants them"
    return VideoSettings(
        **vision.videos._asdict(),
        unit=vision.unit,
        min_pixels=min(config.min_pixels, config.max_pixels),
        max_pixels=config.max_pixels,
        max_frame_pixels=max_pixels,
        fps=config.fps,
        min_frames=config.min_frames,
        max_frames=config.max_frames,
        resample=config.resample,
        mean=images.mean,
        std=images.std,
        cap=config.cap,
    )


def read_weights(model: ResolvedModel, prefix: str, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    """The weights of these names, which stand after `prefix` in the file, in `tower_dtype`. Raises CheckpointError for
    one that is missing or of another shape."""
    reader, dtype = model.reader, tower_dtype(model)
    for name, shape in shapes.items():
        full = prefix + name
        if not reader.has(full):
            raise CheckpointError(f"{reader.path}: tensor {full} is missing")
        weight = reader.tensor(full)
        if tuple(weight.shape) != shape or not weight.is_floating_point():
            raise CheckpointError(f"{reader.path}: {full} is {list(weight.shape)}, config.json says {list(shape)}")
        yield name, weight.to(dtype)


def tower_dtype(model: ResolvedModel) -> torch.dtype:
    """Of weights in memory: float16 would overflow."""
    return model.dtype if model.dtype is torch.bfloat16 else torch.float32


def _shapes(model: ResolvedModel, vision: VisionSpec) -> Shapes:
    return vision.shapes(model.spec.hidden_size)
