"""How a vision tower wants images: `preprocessor_config.json`, as transformers writes it. No torch here.

    {"size": {"shortest_edge": 3136, "longest_edge": 12845056}, "image_mean": [...], "image_std": [...], "resample": 3}

Older files have `min_pixels` and `max_pixels`. What is absent is as transformers has it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.jsonfile import read_json

FILE = "preprocessor_config.json"
MAX_BYTES = 1 << 20
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# What lmkit does. A file that asks for something else is refused.
DONE: dict[str, Any] = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True,
                        "resample": 3, "rescale_factor": 1 / 255}  # fmt: skip


class ImageConfig:
    """The numbers of a file, or transformers' own without one. Raises CheckpointError or UnsupportedError."""

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        given = read_json(path, MAX_BYTES) if path.exists() else {}
        for name, value in DONE.items():
            if given.get(name, value) not in (None, value):
                raise UnsupportedError(f"{path}: {name} = {given[name]!r} is not supported; lmkit has {value!r}")
        self._path, size = path, given.get("size") or {}
        if not isinstance(size, dict):
            raise CheckpointError(f"{path}: size is not an object")
        low, high = size.get("shortest_edge"), size.get("longest_edge")
        self.min_pixels = self._pixels("min_pixels", given.get("min_pixels") or low or MIN_PIXELS)
        self.max_pixels = self._pixels("max_pixels", given.get("max_pixels") or high or MAX_PIXELS)
        self.mean = self._colors("image_mean", given.get("image_mean") or MEAN)
        self.std = self._colors("image_std", given.get("image_std") or STD)
        if not all(self.std) or self.min_pixels > self.max_pixels:
            raise CheckpointError(f"{path}: image_std has a zero, or min_pixels are more than max_pixels")

    def _pixels(self, name: str, value: Any) -> int:
        if type(value) is not int or not 0 < value < 1 << 31:
            raise CheckpointError(f"{self._path}: {name} = {value!r} is not a sensible integer")
        return value

    def _colors(self, name: str, value: Any) -> tuple[float, float, float]:
        numbers = list(value) if isinstance(value, list | tuple) else []
        if len(numbers) != 3 or not all(type(x) in (int, float) and abs(x) < 1e3 for x in numbers):
            raise CheckpointError(f"{self._path}: {name} is not a list of three numbers")
        return float(numbers[0]), float(numbers[1]), float(numbers[2])
