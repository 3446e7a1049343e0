"""How a vision tower wants images: `preprocessor_config.json`, as transformers writes it. No torch here.

    {"size": {"shortest_edge": 3136, "longest_edge": 12845056}, "image_mean": [...], "image_std": [...], "resample": 3}

Older files have `min_pixels` and `max_pixels`, and towers that read one size have `height` and `width`. transformers 5
may write the same as `image_processor` of `processor_config.json`. What is absent is as transformers has it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.jsonfile import read_json

FILE, WHOLE = "preprocessor_config.json", "processor_config.json"
TOKENIZER = "tokenizer.json"
MAX_BYTES, MAX_TOKENIZER_BYTES = 1 << 20, 64 << 20
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
# What lmkit does. A file that asks for something else is refused.
DONE: dict[str, Any] = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True,
                        "rescale_factor": 1 / 255, "do_pan_and_scan": False, "do_center_crop": False}  # fmt: skip
RESAMPLES = 2, 3
MAX_TILES = 64


Colors = tuple[float, float, float]


class ImageConfig:
    """The numbers of a file, or transformers' own without one: (mean, std, resample, side, edge, tiles) of the kind of
    tower. Raises CheckpointError or UnsupportedError."""

    def __init__(self, folder: Path, default: tuple[Colors, Colors, int, int, int, tuple[int, int]]) -> None:
        path, given = said(folder, FILE, "image_processor")
        mean, std, resample, side, edge, tiles = default
        check_done(path, given, DONE)
        size = given.get("size") or {}
        if not isinstance(size, dict):
            raise CheckpointError(f"{path}: size is not an object")
        low, high = size.get("shortest_edge"), size.get("longest_edge")
        self.edge = sensible(path, "longest_edge", high or edge) if edge else 0
        low, high = (None, None) if edge else (low, high)
        self.min_pixels = sensible(path, "min_pixels", given.get("min_pixels") or low or (1 if edge else MIN_PIXELS))
        self.max_pixels = sensible(path, "max_pixels", given.get("max_pixels") or high or MAX_PIXELS)
        self.mean = colors(path, "image_mean", given.get("image_mean") or mean)
        self.std = colors(path, "image_std", given.get("image_std") or std)
        of_tiles = zip(("min_patches", "max_patches"), tiles, strict=True)
        least, most = (sensible(path, name, given.get(name) or usual) if usual else 0 for name, usual in of_tiles)
        self.tiles = least, most
        self.resample = given.get("resample") or resample
        sides = {size.get(name, side) for name in ("height", "width")} if side else {side}
        if self.resample not in RESAMPLES or sides != {side}:
            raise UnsupportedError(f"{path}: resample {self.resample!r} or size {size!r:.100} is not supported")
        if least > most or most > MAX_TILES:
            raise CheckpointError(f"{path}: {least} to {most} patches of an image are not 1 to {MAX_TILES}")
        if not all(self.std) or self.min_pixels > self.max_pixels:
            raise CheckpointError(f"{path}: image_std has a zero, or min_pixels are more than max_pixels")


def check_done(path: Path, given: dict[str, Any], done: dict[str, Any]) -> None:
    """Raises UnsupportedError if a file asks for something else than what is done."""
    for name, value in done.items():
        if given.get(name, value) not in (None, value):
            raise UnsupportedError(f"{path}: {name} = {given[name]!r} is not supported; lmkit has {value!r}")


def sensible(path: Path, name: str, value: Any) -> int:
    """A number that a file has: an integer above 0. Raises CheckpointError."""
    if type(value) is not int or not 0 < value < 1 << 31:
        raise CheckpointError(f"{path}: {name} = {value!r} is not a sensible integer")
    return value


def colors(path: Path, name: str, value: Any) -> Colors:
    """A number for each of three colors. Raises CheckpointError."""
    numbers = list(value) if isinstance(value, list | tuple) else []
    if len(numbers) != 3 or not all(type(x) in (int, float) and abs(x) < 1e3 for x in numbers):
        raise CheckpointError(f"{path}: {name} is not a list of three numbers")
    return float(numbers[0]), float(numbers[1]), float(numbers[2])


def said(folder: Path, file: str, key: str) -> tuple[Path, dict[str, Any]]:
    """The file that says how something is read, and what it says: `file`, or what stands under `key` for all kinds."""
    path, whole = folder / file, folder / WHOLE
    if path.exists() or not whole.exists():
        return path, read_json(path, MAX_BYTES) if path.exists() else {}
    given = read_json(whole, MAX_BYTES).get(key) or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"{whole}: {key} is not an object")
    return whole, given


def added_tokens(folder: Path, names: tuple[str, ...]) -> tuple[int, ...]:
    """The ids of these tokens in tokenizer.json; none without such a file, or if it knows nothing of them. Raises
    CheckpointError if one is missing."""
    path = folder / TOKENIZER
    if not path.exists():
        return ()
    added = read_json(path, MAX_TOKENIZER_BYTES).get("added_tokens")
    known = {x["content"]: x["id"] for x in added or () if isinstance(x, dict) and {"content", "id"} <= x.keys()}
    if not known.keys() & set(names):
        return ()
    if missing := [name for name in names if type(known.get(name)) is not int]:
        raise CheckpointError(f"{path}: {missing[0]} is none of the added tokens")
    return tuple(known[name] for name in names)
