"""Reads videos in a `Sandbox`: a stranger's bytes to some frames of the size that a vision tower wants.

MP4, MOV, WebM and Matroska are read by PyAV, under the format that their first bytes name: no other reader of FFmpeg
sees them, above all none that opens further files. GIF, WebP and PNG with several frames are read by Pillow. Frames are
decoded one after another, and those that are not wanted are dropped, so the memory is that of the result.
"""

from __future__ import annotations

import base64
import io
import math
import struct
import zlib
from collections.abc import Iterator
from typing import Any

FORMATS = ("GIF", "WEBP", "PNG")
MAX_SOURCE_PIXELS = 16_000_000  # of a frame before it is resized
MAX_SOURCE_FRAMES = 1 << 20
MAX_BYTES = 75 << 20  # of the result
MAX_ASPECT_RATIO = 200


class _RefusedError(Exception):
    """Why a video cannot be used, in words for a stranger."""


def sampled(total: int, fps: float, wanted: float, least: int, most: int) -> list[int]:
    """Numbers of the frames that are read of `total` with `fps` a second: `wanted` a second, evenly spread.

    They ascend, each once: there are never more than frames, so a step is 1, or longer by more than its rounding."""
    count = min(max(int(total / fps * wanted), least), most, total)
    step = (total - 1) / max(count - 1, 1)
    return [round(i * step) for i in range(count)]  # halves to the even number, as numpy does


def sampled_in_pairs(total: int, fps: float, wanted: float, least: int, most: int) -> list[int]:
    """The same as Qwen2-VL has it: an even number, unless there is one frame, and the first of equal parts."""
    most = min(most, total) // 2 * 2
    count = max(int(min(max(total / fps * wanted, least), most)) // 2 * 2, 1)
    return [i * total // count for i in range(count)]


def resized(
    frames: int, height: int, width: int, unit: int, min_pixels: int, max_pixels: int, *, each: bool = False
) -> tuple[int, int]:
    """The height and width of all frames: multiples of `unit`, with `min_pixels` to `max_pixels` pixels in all frames
    together, which are read two and two, or in `each`."""
    if not each and (height < unit or width < unit):
        grow = max(unit / height, unit / width)
        height, width = int(height * grow), int(width * grow)
    high, wide = round(height / unit) * unit, round(width / unit) * unit
    frames, pairs = (1, 1) if each else (frames, round(frames / 2) * 2)
    if pairs * high * wide > max_pixels:
        shrink = math.sqrt(frames * height * width / max_pixels)
        return max(unit, int(height / shrink / unit) * unit), max(unit, int(width / shrink / unit) * unit)
    if pairs * high * wide < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        return math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
    return high, wide


def answer(
    encoded: str, unit: int, min_pixels: int, max_pixels: int, max_frame: int, cap: int, fps: float, least: int,
    most: int, resample: int, grid: bool = False,
) -> tuple[str, Any]:  # fmt: skip
    """The reply to a request with the bytes of a file in base64. `max_frame`: pixels of a frame at most. `cap`: the
    same if the least pixels of all frames do not need more; 0 = none. `fps`, `least` and `most` say how many frames
    are read. `resample` is Pillow's number of a filter. `grid`: as Qwen2-VL has it, where `min_pixels` and `max_pixels`
    are those of each frame, and `cap` of all together.

    ("video", [height, width, seconds of each frame, frames read a second, RGB bytes of all frames in base64])
    ("refused", why the video cannot be used)
    """
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # each frame's size is looked at first
    data = base64.b64decode(encoded)
    try:
        total, rate = _length(data)
        if not 0 < total <= MAX_SOURCE_FRAMES or not 0 < rate < 1e4:
            raise _RefusedError(_UNREADABLE)
        wanted = (sampled_in_pairs if grid else sampled)(total, rate, fps, least, most)
        size: tuple[int, int] | None = None
        found: list[bytes] = []
        for number, frame in enumerate(_frames(data)):
            if number != wanted[len(found)]:
                continue
            if size is None:
                frames = max(len(wanted), 2)
                limits = (_of_each if grid else _of_all)(frames, min_pixels, max_pixels, max_frame, cap)
                size = _size(frame, frames, unit, limits, each=grid)
            small = frame.convert("RGB").resize((size[1], size[0]), Image.Resampling(resample))
            found.append(small.tobytes())
            if len(found) == len(wanted):
                break
    except MemoryError:
        raise
    except _RefusedError as error:
        return "refused", str(error)
    except _ERRORS:  # their texts are not for strangers
        return "refused", _UNREADABLE
    if size is None or len(found) != len(wanted):
        return "refused", "it ends before its last frame"
    seconds, read = [number / rate for number in wanted], len(wanted) / total * rate
    if len(found) % 2:  # frames are read two and two
        found.append(found[-1])
        seconds.append(seconds[-1])
    return "video", [*size, seconds, read, base64.b64encode(b"".join(found)).decode()]


def _of_all(frames: int, min_pixels: int, max_pixels: int, max_frame: int, cap: int) -> tuple[int, int]:
    """The least and the most pixels of all frames together."""
    if cap:
        max_pixels = max(min(cap, max_pixels // frames), int(min_pixels * 1.05)) * frames
    most = min(max_pixels, max_frame * frames, MAX_BYTES // 3)
    return min(min_pixels, most), most


def _of_each(frames: int, min_pixels: int, max_pixels: int, max_frame: int, cap: int) -> tuple[int, int]:
    """The least and the most pixels of each frame."""
    if cap:
        max_pixels = max(min(max_pixels, cap // frames), int(min_pixels * 1.05))
    most = min(max_pixels, max_frame, MAX_BYTES // 3 // frames)
    return min(min_pixels, most), most


def _size(frame: Any, frames: int, unit: int, limits: tuple[int, int], *, each: bool) -> tuple[int, int]:
    """The size of all frames, from the first one's, with pixels in these limits. Raises _RefusedError."""
    if max(frame.size) > MAX_ASPECT_RATIO * min(frame.size):
        sides = f"{frame.width} x {frame.height} pixels"
        raise _RefusedError(f"{sides}: one side is over {MAX_ASPECT_RATIO} times the other")
    return resized(frames, frame.height, frame.width, unit, *limits, each=each)


def _container(data: bytes) -> str:
    """FFmpeg's name of the format; an empty text for what Pillow reads."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide"):
        return "mp4"
    return "matroska" if data[:4] == b"\x1aE\xdf\xa3" else ""


def _length(data: bytes) -> tuple[int, float]:
    """The number of frames, as packets or frames tell it and not a header, and frames of a second."""
    from PIL import Image

    if not (kind := _container(data)):
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            total, milliseconds = getattr(image, "n_frames", 1), 0.0
            if total < 2:
                raise _RefusedError("it has a single frame; send it as an image")
            for number in range(min(total, MAX_SOURCE_FRAMES)):
                image.seek(number)
                milliseconds += image.info.get("duration", 0) or 100
            return total, 1000 * total / milliseconds
    with _opened(data, kind) as container:
        (stream, *_) = container.streams.video
        if stream.codec_context.width * stream.codec_context.height > MAX_SOURCE_PIXELS:
            raise _RefusedError(f"a frame has over {MAX_SOURCE_PIXELS:,} pixels")
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        return sum(packet.size > 0 for packet in container.demux(stream)), rate


def _frames(data: bytes) -> Iterator[Any]:
    """The frames, as images of Pillow that stand upright."""
    from PIL import Image, ImageSequence

    if not (kind := _container(data)):
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MAX_SOURCE_PIXELS:
                raise _RefusedError(f"a frame has over {MAX_SOURCE_PIXELS:,} pixels")
            yield from ImageSequence.Iterator(image)
        return
    with _opened(data, kind) as container:
        for frame in container.decode(video=0):
            if frame.width * frame.height > MAX_SOURCE_PIXELS:
                raise _RefusedError(f"a frame has over {MAX_SOURCE_PIXELS:,} pixels")
            image, turn = frame.to_image(), getattr(frame, "rotation", 0)
            yield image.rotate(turn, expand=True) if turn else image


def _opened(data: bytes, kind: str) -> Any:
    try:
        import av
    except ImportError:
        raise _RefusedError("this server reads GIF, WebP and PNG alone; others need lmkit[video]") from None
    av.logging.set_level(av.logging.PANIC)
    return av.open(io.BytesIO(data), format=kind)


_ERRORS = (
    OSError, ValueError, SyntaxError, ArithmeticError, LookupError, TypeError, EOFError, AttributeError, RuntimeError,
    struct.error, zlib.error,
)  # fmt: skip
_UNREADABLE = "it is no video that can be read; the formats are MP4, MOV, WebM, Matroska, GIF, WebP and PNG"
