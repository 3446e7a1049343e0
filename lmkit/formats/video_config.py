"""How a vision tower wants videos: `video_preprocessor_config.json`, as transformers writes it. No torch here.

    {"size": {"shortest_edge": 131072, "longest_edge": 786432}, "fps": 2, "min_frames": 4, "max_frames": 768, ...}

`size` is pixels of all frames together, and with Qwen2-VL of each. transformers 5 may write the same as
`video_processor` of `processor_config.json`. What is absent is as transformers has it for Qwen3-VL. Qwen2-VL's files
may say not to choose frames: then all of a file are meant, and the programs of its makers choose two a second, as is
done here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.image_config import DONE, RESAMPLES, ImageConfig, check_done, colors, said, sensible

FILE = "video_preprocessor_config.json"
MIN_CELLS, MAX_CELLS = 128, 768
WANTED: dict[str, Any] = DONE | {"do_sample_frames": True, "num_frames": None, "max_duration": None}
CAPPED_CELLS = 768  # of a frame, if frames have a cap
CONTEXT, FRAMES = 128000, 2  # of Qwen2-VL's cap: nine tenths of the cells are for all pairs of frames


class VideoConfig:
    """The numbers of a file, or transformers' own without one. Raises CheckpointError or UnsupportedError."""

    def __init__(self, folder: Path, unit: int, images: ImageConfig, *, grid: bool = False) -> None:
        """`images` says how images of the same tower, whose cells are `unit` pixels wide, are read. `grid`: see
        vision_spec.Timed."""
        path, given = said(folder, FILE, "video_processor")
        check_done(path, given | ({"do_sample_frames": True} if grid else {}), WANTED)
        for name, value in (("image_mean", images.mean), ("image_std", images.std)):
            if colors(path, name, given.get(name) or value) != value:
                raise UnsupportedError(f"{path}: {name} is another than that of images")
        size = given.get("size") or {}
        if not isinstance(size, dict):
            raise CheckpointError(f"{path}: size is not an object")
        cell = 28**2 if grid else 32**2
        least, most = MIN_CELLS * cell, MAX_CELLS * cell
        self.min_pixels = sensible(path, "shortest_edge", given.get("min_pixels") or size.get("shortest_edge") or least)
        self.max_pixels = sensible(path, "longest_edge", given.get("max_pixels") or size.get("longest_edge") or most)
        self.min_frames = sensible(path, "min_frames", given.get("min_frames") or 4)
        self.max_frames = sensible(path, "max_frames", given.get("max_frames") or 768)
        fps = given.get("fps") or 2
        if type(fps) not in (int, float) or not 0 < fps < 1e3:
            raise CheckpointError(f"{path}: fps = {fps!r} is not a sensible number")
        self.fps = float(fps)
        self.resample = given.get("resample") or RESAMPLES[-1]
        if self.resample not in RESAMPLES:
            raise UnsupportedError(f"{path}: resample {self.resample!r} is not supported")
        cells = sensible(path, "max_video_tokens", given.get("max_video_tokens") or (CONTEXT if grid else CAPPED_CELLS))
        cap = int(cells * unit**2 * 0.9) * FRAMES if grid else cells * unit**2
        self.cap = cap if given.get("cap_pixels_per_frame") else 0
