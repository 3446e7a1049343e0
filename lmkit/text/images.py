"""Images of messages: from the bytes of a file to pixels of the size that a vision tower wants. No torch here."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import msgspec

from lmkit.errors import RequestError
from lmkit.extras import EXTRAS, install
from lmkit.text.sandbox import Sandbox

TEXT_ONLY = "this model reads text alone"
MAX_IMAGES = 64  # of one request
LOW_DETAIL = 512 * 512  # the most pixels of an image whose `detail` is low
CPU_SECONDS = 20.0  # of one image
MEMORY = 1 << 30  # of the process that reads images, in bytes beyond what it has when it starts
_DATA_URL = re.compile(r"data:[\w.+/-]{0,127}(;[\w=.+-]{1,127})*;base64,", re.ASCII | re.IGNORECASE)


class ImageSettings(msgspec.Struct, frozen=True, kw_only=True, tag="tower"):
    """How a vision tower wants images. Mean and deviation are by color."""

    ends_prompt: ClassVar[bool] = False  # whether the token of an image may be a prompt's last

    token_id: int  # stands for each cell of an image in a prompt
    unit: int  # side of a cell in pixels
    min_pixels: int  # of one image
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    most: int = MAX_IMAGES  # of one request
    side: int = 0  # pixels of both sides of every image; 0 = images keep their shapes
    edge: int = 0  # pixels of the longer side at most, if images are not made larger
    tiles: tuple[int, int] = (0, 0)  # squares of `side` that an image is cut into, at least and at most
    resample: int = 3  # Pillow's number of a filter
    breaks: tuple[int, ...] = ()  # tokens that end a row of cells, and the last row
    sees_all: bool = False  # tokens of an image see each other, so that a step computes all of them
    frames_id: int = -1  # stands for each cell of frames of a video; -1 = the tower reads none

    @property
    def marks(self) -> tuple[int, ...]:
        """The tokens that stand for an image in a prompt, before it has the image's tokens."""
        return (self.token_id,) if self.frames_id < 0 else (self.token_id, self.frames_id)

    def mark_of(self, image: SentImage) -> int:
        """The one of `marks` that stands for an image."""
        return self.token_id if image.frames == 1 else self.frames_id

    def tokens_of(self, image: SentImage) -> list[int]:
        """The tokens of an image in a prompt."""
        found = ([self.mark_of(image)] * image.columns + [*self.breaks[:1]]) * image.rows
        found[len(found) - len(self.breaks[1:]) :] = self.breaks[1:]
        return found

    def read(self, data: bytes, detail: str) -> ReadImage:
        """See `read_image`."""
        return read_image(data, self, detail)

    def check(self, image: SentImage) -> None:
        """Raise RequestError if an image has other pixels than its size says."""
        if len(image.pixels) != 3 * image.frames * image.rows * image.columns * self.unit**2:
            raise RequestError("invalid_request", "an image has other pixels than its size says", "messages")


class SentImage(Protocol):
    """An image on its way to the engine. What the fields are, ReadImage says."""

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...

    @property
    def pixels(self) -> bytes: ...

    @property
    def ids(self) -> tuple[int, ...]: ...

    @property
    def frames(self) -> int: ...


class Expands(Protocol):
    """How images stand in prompts."""

    @property
    def marks(self) -> tuple[int, ...]: ...

    def mark_of(self, image: SentImage) -> int: ...

    def tokens_of(self, image: SentImage) -> list[int]: ...


class ReadImage(NamedTuple):
    """An image of whole cells, or frames of a video that a tower reads together; or, of a processor of transformers,
    one row of tokens."""

    rows: int
    columns: int
    digest: bytes  # sha256 of the pixels and of how they are normalized
    # RGB, uint8 [frames, rows * unit, columns * unit, 3]; of a processor: what it gives, see processed_images
    pixels: bytes
    breaks: int = 0  # tokens after each row of cells
    ids: tuple[int, ...] = ()  # of a processor: the tokens
    frames: int = 1
    time: int = 0  # place in time of its cells after that of its first token's others; see runners.images.grid
    goes_on: bool = False  # the next image begins at the same places: they are frames of one video

    @property
    def num_tokens(self) -> int:
        return self.rows * (self.columns + self.breaks)


class Resizing(NamedTuple):
    """How an image is resized, see ImageSettings."""

    unit: int
    min_pixels: int
    max_pixels: int
    side: int = 0
    edge: int = 0
    resample: int = 3
    tiles: tuple[int, int] = (0, 0)


SHARED = Sandbox("image_process.py", CPU_SECONDS, MEMORY)


def read_image(data: bytes, settings: ImageSettings, detail: str = "auto", *, sandbox: Sandbox = SHARED) -> ReadImage:
    """Decode an image in a process of its own and resize it. Raises RequestError for one that cannot be used."""
    s = settings
    how = Resizing(s.unit, s.min_pixels, s.max_pixels, s.side, s.edge, s.resample, s.tiles)
    return cut_up(*decoded(data, how, detail, sandbox=sandbox), settings)


def decoded(data: bytes, how: Resizing, detail: str, *, sandbox: Sandbox = SHARED) -> tuple[int, int, bytes]:
    """(height, width, RGB) of an image. Raises RequestError."""
    if EXTRAS["images"].missing():
        raise RequestError("unsupported_parameter", f"images need Pillow: {install('images')}", "messages")
    most = max(min(how.max_pixels, LOW_DETAIL), how.min_pixels) if detail == "low" else how.max_pixels
    encoded = base64.b64encode(data).decode()
    kind, value = sandbox.ask(encoded, how.unit, how.min_pixels, most, *how[3:])
    if kind != "image":
        reason = value or "reading it takes too much time or memory"
        raise RequestError("invalid_request", f"image: {reason}", "messages")
    return int(value[0]), int(value[1]), base64.b64decode(value[2])


def cut_up(height: int, width: int, pixels: bytes, settings: ImageSettings) -> ReadImage:
    """An image of this size, which is one of whole cells, with its digest."""
    rows, columns = height // settings.unit, width // settings.unit
    digest = hashlib.sha256(f"{height} {width} {settings.unit} {settings.mean} {settings.std} ".encode() + pixels)
    return ReadImage(rows, columns, digest.digest(), pixels, len(settings.breaks[:1]))


def data_url(url: str) -> bytes:
    """The bytes of a data: URL. Raises RequestError."""
    head = _DATA_URL.match(url[:512])
    if head is None:
        raise RequestError("invalid_request", "image: write a data: URL as data:image/png;base64,...", "messages")
    try:
        return base64.b64decode("".join(url[head.end() :].split()), validate=True)  # some encoders break lines
    except binascii.Error:
        raise RequestError("invalid_request", "image: the data: URL is not valid base64", "messages") from None


def expanded(ids: Sequence[int], images: Sequence[ReadImage], settings: Expands) -> tuple[list[int], list[int]]:
    """A prompt in which the tokens of each image stand in place of its mark, and where each image begins.

    Raises RequestError if the prompt has other marks than the images.
    """
    marks = settings.marks
    written = [token for token in ids if token in marks]
    if written != list(map(settings.mark_of, images)):
        number = f"{len(images)} images and {len(written)} marks of images"
        message = f"the prompt has {number}; a text must not write the mark"
        raise RequestError("invalid_request", message, "messages")
    found: list[int] = []
    starts: list[int] = []
    for token in ids:
        if token in marks:
            starts.append(len(found))
            found += settings.tokens_of(images[len(starts) - 1])
        else:
            found.append(token)
    return found, starts
