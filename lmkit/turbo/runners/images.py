"""Images on their way into steps: rows that a tower has encoded, and the places of tokens for M-RoPE."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmkit.layers.batch import BatchInputs, Together
from lmkit.models.spec import ModelSpec
from lmkit.turbo.changes import DropImage, ImageChange, KeepImage
from lmkit.turbo.request import ImageInput
from lmkit.turbo.runners.upload import upload


class EncodedImages:
    """Rows by digest. Those in use stay; of the others the most recently used ones stay, up to `max_bytes`.

    `by_place`: tokens of images turn by their places in the image. `whole`: they see each other.
    """

    def __init__(self, max_bytes: int, *, by_place: bool = True, whole: bool = False) -> None:
        self._max_bytes, self.by_place, self.whole = max_bytes, by_place, whole
        self.tell: Callable[[ImageChange], None] | None = None  # says changes to other processes, if there are any
        self._rows: dict[bytes, Tensor] = {}  # the most recently used ones last
        self._places: dict[bytes, np.ndarray] = {}  # of images that say those of their tokens
        self._users: dict[bytes, int] = {}
        self.num_bytes = 0

    @classmethod
    def of(cls, max_bytes: int, spec: ModelSpec) -> EncodedImages:
        """An empty one for a model."""
        return cls(max_bytes, by_place=spec.turns_by_place, whole=spec.images_whole)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._rows

    @property
    def bytes_in_use(self) -> int:
        return sum(self._rows[digest].nbytes for digest in self._users)

    @property
    def has_room(self) -> bool:
        """Whether images in use leave room for others."""
        return self.bytes_in_use < self._max_bytes

    def keep(self, digest: bytes, rows: Tensor, places: Tensor | None = None) -> None:
        """Add an image's rows, and the places of its tokens if they are no grid's. They stay until the next image comes
        or another one is left, however large they are."""
        self._evict(rows.nbytes)
        self._rows[digest] = rows
        if places is not None:
            self._places[digest] = places.numpy()
        self.num_bytes += rows.nbytes
        if self.tell is not None:
            data = rows.cpu().contiguous().view(torch.uint8).numpy().tobytes()
            placed = b"" if places is None else places.numpy().tobytes()
            self.tell(KeepImage(digest, data, str(rows.dtype).removeprefix("torch."), len(rows), placed))

    def change(self, change: ImageChange, device: torch.device) -> None:
        """Carry out what another process has told: only that one chooses what stays."""
        if isinstance(change, DropImage):
            self._rows.pop(change.digest, None)
            self._places.pop(change.digest, None)
            return
        rows = torch.frombuffer(bytearray(change.rows), dtype=getattr(torch, change.dtype))
        self._rows[change.digest] = rows.view(change.num_tokens, -1).to(device)
        if change.places:
            self._places[change.digest] = np.frombuffer(change.places, np.int32).reshape(3, -1)

    def use(self, digest: bytes) -> Tensor:
        """The rows, which stay until as many calls of `leave`."""
        rows = self._rows.pop(digest)
        self._rows[digest] = rows
        self._users[digest] = self._users.get(digest, 0) + 1
        return rows

    def leave(self, digest: bytes) -> None:
        self._users[digest] -= 1
        if not self._users[digest]:
            del self._users[digest]
            self._evict()

    def rows(self, digest: bytes) -> Tensor:
        return self._rows[digest]

    def places(self, image: ImageInput) -> np.ndarray:
        """int32 [3, tokens + 1]: see `grid`."""
        if (own := self._places.get(image.digest)) is not None:
            return own
        if self.by_place:
            return grid(image.rows, image.columns, image.time, goes_on=image.goes_on)
        return np.tile(np.arange(image.num_tokens + 1, dtype=np.int32), (3, 1))

    def _evict(self, more: int = 0) -> None:
        """Make room for `more` bytes."""
        for digest in [digest for digest in self._rows if digest not in self._users]:
            if self.num_bytes + more <= self._max_bytes:
                return
            self.num_bytes -= self._rows.pop(digest).nbytes
            self._places.pop(digest, None)
            if self.tell is not None:
                self.tell(DropImage(digest))


@dataclass(frozen=True)
class PlacedImages:
    """The images of a sequence in a slot."""

    places: np.ndarray  # int32 [3, prompt tokens]
    shift: int  # what is added to the position of a token after the prompt
    rows: tuple[tuple[int, Tensor], ...]  # position of an image's first token, and rows [tokens, hidden]
    whole: bool = False  # whether tokens of an image see each other

    @classmethod
    def of(cls, images: Iterable[ImageInput], num_prompt_tokens: int, encoded: EncodedImages) -> PlacedImages:
        images = tuple(images)
        rows = tuple((image.start, encoded.rows(image.digest)) for image in images)
        return cls(*places(images, num_prompt_tokens, encoded), rows, encoded.whole)


def grid(rows: int, columns: int, time: int = 0, *, goes_on: bool = False) -> np.ndarray:
    """Places in time, height and width int32 [3, rows * columns + 1] of an image's tokens, counted from the first one's
    in height, as M-RoPE has them; the last is that of the token after them, which goes on after the largest place in
    height or width. Of frames of a video that has more the next ones begin where these did: `goes_on`."""
    found = np.full((3, rows * columns + 1), 0 if goes_on else max(rows, columns), np.int32)
    found[0, :-1] = time
    found[1:, :-1] = np.repeat(np.arange(rows), columns), np.tile(np.arange(columns), rows)
    return found


def places(images: Iterable[ImageInput], num_tokens: int, encoded: EncodedImages) -> tuple[np.ndarray, int]:
    """(places int32 [3, num_tokens], shift) of a prompt."""
    found = np.tile(np.arange(num_tokens, dtype=np.int32), (3, 1))
    shift = 0
    for image in images:
        own = encoded.places(image)
        found[:, image.start : image.end] = image.start + shift + own[:, :-1]
        shift += int(own[0, -1]) - image.num_tokens
        found[:, image.end :] = np.arange(image.end, num_tokens, dtype=np.int32) + shift
    return found, shift


class Span(NamedTuple):
    """Tokens of a step that are side by side in a sequence's prompt."""

    slot: int
    start: int  # position in the prompt
    row: int  # in the step
    length: int


def on_device(inputs: BatchInputs, staged: BatchInputs) -> BatchInputs:
    """`staged` with what images changed in `inputs`. Their rows lie on the device already."""
    if inputs.places is None or inputs.image_rows is None:
        return staged
    device = staged.token_ids.device
    return replace(
        staged,
        places=upload(inputs.places.numpy(), device),
        image_rows=upload(inputs.image_rows.numpy(), device),
        image_values=inputs.image_values,
        together=inputs.together,
    )


def with_images(inputs: BatchInputs, spans: Iterable[Span], slots: Mapping[int, PlacedImages]) -> BatchInputs:
    """The step's inputs with what images change. Overwrites positions; a step without tokens of images keeps its shape.

    The bits of a token of text do not depend on images beside it: its three places are its position.
    """
    positions = inputs.positions.numpy()
    parts = [(b, span, slots[span.slot]) for b, span in enumerate(spans) if span.slot in slots]
    rows: list[np.ndarray] = []
    values: list[Tensor] = []
    together: list[Together] = []
    for b, span, placed in parts:
        end = span.start + min(span.length, max(placed.places.shape[1] - span.start, 0))
        positions[span.row : span.row + end - span.start] = placed.places[0, span.start : end]
        for first, of_image in placed.rows:
            start, stop = max(span.start, first), min(end, first + len(of_image))
            if start < stop:
                of_step = range(start + span.row - span.start, stop + span.row - span.start)
                together += [Together(b, of_step, start)] if placed.whole else []
                rows.append(np.array(of_step))
                values.append(of_image[start - first : stop - first])
    if not rows:
        return inputs
    found = np.tile(positions, (3, 1))
    for _, span, placed in parts:
        end = span.start + min(span.length, max(placed.places.shape[1] - span.start, 0))
        found[:, span.row : span.row + end - span.start] = placed.places[:, span.start : end]
    return replace(
        inputs,
        places=torch.from_numpy(found),
        image_rows=torch.from_numpy(np.concatenate(rows)),
        image_values=torch.cat(values).float(),
        together=tuple(together),
    )
