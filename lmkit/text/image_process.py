"""Reads images in a `Sandbox`: a stranger's bytes to pixels of the size that a vision tower wants.

The formats are named and an image's size is looked at before its pixels are decoded. The process's limits of time and
memory hold for what a decoder does all the same.
"""

from __future__ import annotations

import base64
import io
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_SOURCE_PIXELS = 50_000_000  # of an image before it is resized
MAX_ASPECT_RATIO = 200


def resized(
    height: int, width: int, unit: int, min_pixels: int, max_pixels: int, side: int = 0, edge: int = 0
) -> tuple[int, int]:
    """The height and width at which a tower reads an image: multiples of `unit` near the image's own shape, with
    `min_pixels` to `max_pixels` pixels in all. `side`: both, of a tower that reads one size. `edge`: the longest side
    of a tower that makes no image larger."""
    if side:
        return side, side
    if edge:
        return _within(height, width, unit, edge, max_pixels)
    high, wide = round(height / unit) * unit, round(width / unit) * unit
    if high * wide > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        return max(unit, int(height / shrink / unit) * unit), max(unit, int(width / shrink / unit) * unit)
    if high * wide < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        return math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
    return high, wide


def _within(height: int, width: int, unit: int, edge: int, max_pixels: int) -> tuple[int, int]:
    if (ratio := max(height / edge, width / edge)) > 1:
        height, width = int(height / ratio), int(width / ratio)
    high, wide = -(-max(height, 1) // unit) * unit, -(-max(width, 1) // unit) * unit
    if high * wide > max_pixels:
        shrink = math.sqrt(high * wide / max_pixels)
        return max(unit, int(high / shrink / unit) * unit), max(unit, int(wide / shrink / unit) * unit)
    return high, wide


def canvas(height: int, width: int, side: int, least: int, most: int) -> tuple[int, int]:
    """(rows, columns) of squares of `side` whose shape is next to an image's. Of equal shapes the largest counts, up to
    twice the image's area."""
    counts = range(1, most + 1)
    shapes = [(high, wide) for wide in counts for high in counts if least <= high * wide <= most]
    best, found = math.inf, (1, 1)
    for high, wide in sorted(shapes, key=math.prod):
        far = abs(width / height - wide / high)
        if far < best or (far == best and height * width > 0.5 * side * side * high * wide):
            best, found = far, (high, wide)
    return found


def _tiles(image: Any, side: int, least: int, most: int, resample: Any) -> list[Any]:
    """The squares of an image from left to right and downwards, and the whole image as one if there are several."""
    high, wide = canvas(image.height, image.width, side, least, most)
    large = image.resize((wide * side, high * side), resample)
    corners = [(x * side, y * side) for y in range(high) for x in range(wide)]
    found = [large.crop((x, y, x + side, y + side)) for x, y in corners]
    return found if len(found) == 1 else [*found, image.resize((side, side), resample)]


def opaque(image: Any) -> Any:
    """An image as RGB: on white where it is transparent, as transformers has it. The upper 8 of 16 bits of gray are
    taken, where Pillow alone would make all but the darkest values white."""
    from PIL import Image

    if image.mode.startswith("I"):
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    layer = image if image.mode == "RGBA" else image.convert("RGBA")  # a copy may be of 200 MB
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def strip(height: int, width: int) -> str:
    """Why an image of this size is refused for its shape, or an empty text."""
    if max(height, width) <= MAX_ASPECT_RATIO * min(height, width):
        return ""
    return f"{width} x {height} pixels: one side is over {MAX_ASPECT_RATIO} times the other"


def answer(
    encoded: str,
    unit: int,
    min_pixels: int,
    max_pixels: int,
    side: int = 0,
    edge: int = 0,
    resample: int = 3,
    tiles: Sequence[int] = (0, 0),
) -> tuple[str, Any]:
    """The reply to a request with the bytes of a file in base64. `resample` is Pillow's number of a filter.

    ("image", [height, width, RGB bytes in base64]): resized; with `tiles`, its squares below each other
    ("refused", why the image cannot be used)
    """
    from PIL import Image, ImageOps

    Image.MAX_IMAGE_PIXELS = None  # the line below looks first
    try:
        with Image.open(io.BytesIO(base64.b64decode(encoded)), formats=FORMATS) as image:
            if image.width * image.height > MAX_SOURCE_PIXELS:
                return "refused", f"{image.width} x {image.height} pixels: at most {MAX_SOURCE_PIXELS:,} in all"
            if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # a JPEG with a preview
                return "refused", "it has several frames; send a single one"
            ImageOps.exif_transpose(image, in_place=True)
            upright = opaque(image)
        if reason := strip(upright.height, upright.width):
            return "refused", reason
        if tiles[1]:  # and one for the whole
            most = min(tiles[1], max(max_pixels // side**2 - 1, 1))
            squares = _tiles(upright, side, min(tiles[0], most), most, Image.Resampling(resample))
            pixels = b"".join(square.tobytes() for square in squares)
            return "image", [side * len(squares), side, base64.b64encode(pixels).decode()]
        height, width = resized(upright.height, upright.width, unit, min_pixels, max_pixels, side, edge)
        small = upright.resize((width, height), Image.Resampling(resample))
    except MemoryError:
        raise
    except _ERRORS:  # their texts are not for strangers
        return "refused", _UNREADABLE
    return "image", [height, width, base64.b64encode(small.tobytes()).decode()]


_ERRORS = (
    OSError, ValueError, SyntaxError, ArithmeticError, LookupError, TypeError, EOFError, AttributeError, RuntimeError,
    struct.error, zlib.error,
)  # fmt: skip
_UNREADABLE = f"it is no image that can be read; the formats are {', '.join(FORMATS)}"
