"""Videos of messages: frames that are read two and two, each pair like an image.

A chat template writes one mark for a video. The prompt has a piece of text for each pair of frames in its place:

    <|vision_start|><|video_pad|><|vision_end|>
    <0.2 seconds><|vision_start|><|video_pad|><|vision_end|><0.8 seconds><|vision_start|><|video_pad|><|vision_end|>

Qwen2-VL and Qwen2.5-VL put nothing between pairs, which have places in time instead.

Tokens of the text before it may join with what is put there, so this is done to the text and not to its tokens. After
that a pair of frames is an image whose mark is another token: it has rows of the tower, places and a digest like one.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from lmkit.errors import RequestError
from lmkit.extras import EXTRAS, install
from lmkit.text.images import LOW_DETAIL, ReadImage
from lmkit.text.sandbox import Sandbox

CPU_SECONDS = 60.0  # of one video
MAX_VIDEOS = 4  # of one request
MEMORY = 2 << 30  # of the process that reads videos, in bytes beyond what it has when it starts
FRAMES = 2  # that are read together
NO_VIDEOS = "this model reads text and images alone"
SHARED = Sandbox("video_process.py", CPU_SECONDS, MEMORY)


class VideoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a vision tower wants videos."""

    token_id: int  # stands for each cell of a pair of frames in a prompt
    mark: str  # what chat templates write for a video
    pair: str  # what a prompt has for a pair of frames, a format of its seconds
    unit: int  # side of a cell in pixels
    min_pixels: int  # of all frames together
    max_pixels: int
    max_frame_pixels: int  # of one frame
    fps: float  # frames of a second that are read
    min_frames: int
    max_frames: int
    resample: int  # Pillow's number of a filter
    mean: tuple[float, float, float]  # by color
    std: tuple[float, float, float]
    cap: int = 0  # pixels of a frame, unless `min_pixels` needs more; 0 = as `max_pixels` has it
    grid: bool = False  # see vision_spec.Timed; the bounds of pixels are those of each frame
    places: float = 0.0

    def read(self, data: bytes, detail: str, fps: float) -> ReadVideo:
        """Decode a video in a process of its own. Raises RequestError for one that cannot be used."""
        if EXTRAS["images"].missing():
            raise RequestError("unsupported_parameter", f"videos need Pillow: {install('images')}", "messages")
        each = min(self.max_frame_pixels, LOW_DETAIL) if detail == "low" else self.max_frame_pixels
        kind, value = SHARED.ask(
            base64.b64encode(data).decode(), self.unit, self.min_pixels, self.max_pixels, each, self.cap,
            fps or self.fps, self.min_frames, self.max_frames, self.resample, self.grid,
        )  # fmt: skip
        if kind != "video":
            reason = value or "reading it takes too much time or memory"
            raise RequestError("invalid_request", f"video: {reason}", "messages")
        height, width, seconds, rate, encoded = value
        return self.cut_up(height, width, seconds, base64.b64decode(encoded), rate)

    def cut_up(self, height: int, width: int, seconds: Sequence[float], pixels: bytes, rate: float = 1.0) -> ReadVideo:
        """A video of an even number of frames, RGB of this size, which is one of whole cells. `rate`: frames a second
        that were read."""
        size = FRAMES * 3 * height * width
        rows, columns = height // self.unit, width // self.unit
        times = self._times(range(0, len(pixels), size), rate)
        pairs = []
        for i, time in enumerate(times):
            shown, goes_on = pixels[i * size : (i + 1) * size], self.grid and i + 1 < len(times)
            how = f"{FRAMES} frames {height} {width} {self.unit} {self.mean} {self.std} {time} {goes_on} "
            digest = hashlib.sha256(how.encode() + shown).digest()
            pairs.append(ReadImage(rows, columns, digest, shown, frames=FRAMES, time=time, goes_on=goes_on))
        shown_at = (sum(seconds[i : i + FRAMES]) / FRAMES for i in range(0, len(seconds), FRAMES))
        return ReadVideo(tuple(pairs), tuple(shown_at))

    def _times(self, pairs: range, rate: float) -> list[int]:
        """The place in time of each pair. Computed in float32, as the models were trained."""
        if not self.grid:
            return [0] * len(pairs)
        step = _float32(self.places * _float32(FRAMES / rate)) if self.places else 1.0
        return [int(_float32(i * step)) for i in range(len(pairs))]

    def text(self, video: ReadVideo) -> str:
        """What a prompt has in the place of the video's mark."""
        return "".join(map(self.pair.format, video.seconds))


class ReadVideo(NamedTuple):
    """Pairs of frames, and the time in seconds at which each is shown."""

    pairs: tuple[ReadImage, ...]
    seconds: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        """Those of its cells."""
        return sum(pair.num_tokens for pair in self.pairs)


def _float32(x: float) -> float:
    found: float = struct.unpack("f", struct.pack("f", x))[0]
    return found


def with_videos(text: str, videos: Sequence[ReadVideo], settings: VideoSettings) -> str:
    """A rendered conversation with its videos. Raises RequestError if it has another number of marks."""
    if not videos:
        return text
    first, *others = text.split(settings.mark)
    if len(others) != len(videos):
        number = f"{len(videos)} videos and {len(others)} marks of videos"
        message = f"the prompt has {number}; a text must not write the mark"
        raise RequestError("invalid_request", message, "messages")
    return first + "".join(settings.text(video) + rest for video, rest in zip(videos, others, strict=True))


def pictures(shown: Iterable[ReadImage | ReadVideo]) -> list[ReadImage]:
    """Images, and the pairs of frames of videos, in their order."""
    return [image for each in shown for image in (each.pairs if isinstance(each, ReadVideo) else (each,))]
