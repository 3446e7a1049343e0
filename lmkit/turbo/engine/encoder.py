"""Encodes the images of requests before the scheduler gets the requests.

Requests wait here in the order in which they came. The tower works in small parts between steps, in the thread of the
steps: beside decoding sequences it takes about as long as a step. Encoded images stay in memory for later requests, see
EncodedImages.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace

from lmkit.errors import RequestError
from lmkit.log import get_logger
from lmkit.models.vision import Encodes, Encoding
from lmkit.text.audio import NO_AUDIO, AudioSettings
from lmkit.text.images import MAX_IMAGES
from lmkit.text.processed_images import AnySettings
from lmkit.turbo.request import ImageInput, Request, StepOutput
from lmkit.turbo.runners.images import EncodedImages
from lmkit.turbo.scheduling.limits import SchedulerLimits, check_request

log = get_logger(__name__)

ALONE_SECONDS = 0.1  # of work between two looks for new requests, if nothing else is to be done
MAX_NUMBERS = 1 << 17  # images whose numbers are remembered
LATE_STEPS = 4  # calls of `advance` after which no step under way names an image of a request that ended before


@dataclass(eq=False)
class _Pending:
    request: Request
    deadline: float
    held: list[bytes] = field(default_factory=list)  # images that are encoded and held for it


class ImageNumbers:
    """A number for each digest. One that was forgotten gets a new number, so that the cache never confuses images."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}  # the most recently used ones last
        self._last = 0

    def of(self, digest: bytes) -> int:
        number = self._numbers.pop(digest, 0)
        if not number:
            self._last = number = self._last + 1
            if len(self._numbers) >= MAX_NUMBERS:
                del self._numbers[next(iter(self._numbers))]
        self._numbers[digest] = number
        return number


class Encoder:
    """`admit` gives a request to the scheduler. `call` carries out work in the thread of the steps and waits."""

    def __init__(
        self,
        tower: Encodes,
        limits: SchedulerLimits,
        encoded: EncodedImages,
        admit: Callable[[Request], None],
        call: Callable[[Callable[[], Any]], Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tower, self._limits, self._encoded = tower, limits, encoded
        self._admit, self._call, self._clock = admit, call, clock
        self._numbers = ImageNumbers()
        self._pending: deque[_Pending] = deque()
        self._steps: Encoding | None = None  # of the first pending request's next image
        self._outputs: list[StepOutput] = []
        self._held: dict[str, list[bytes]] = {}  # by request id, of requests that the scheduler has
        self._leaving: deque[list[bytes]] = deque([[]])
        self.counts = {"encoded": 0, "reused": 0}

    @property
    def hears(self) -> bool:
        """Whether every request needs an audio."""
        return isinstance(self._tower.settings, AudioSettings)

    def __len__(self) -> int:
        return len(self._pending)

    def has_work(self) -> bool:
        return bool(self._pending or self._outputs)

    def add(self, request: Request) -> None:
        """Raises RequestError if the request can never run, or if too many wait."""
        check_request(request, self._limits)
        check_images(request, self._tower.settings)
        if len(self._pending) >= self._limits.max_queue:
            raise RequestError("queue_full", f"{len(self._pending)} requests wait already, the limit: try again later")
        timeout = self._limits.request_timeout if request.timeout is None else request.timeout
        pending = _Pending(request, math.inf if timeout is None else self._clock() + timeout)
        if all(image.digest in self._encoded for image in request.images):
            for image in request.images:
                self._hold(pending, image)
            self._hand_over(pending)
        else:
            self._pending.append(pending)

    def abort(self, request_id: str) -> None:
        self._end(lambda pending: pending.request.request_id == request_id, finish_reason="abort")

    def advance(self, seconds: float) -> list[StepOutput]:
        """Encode for about so long, at least a part of an image. Returns the ends of requests that get no further."""
        self._leaving.append([])
        if len(self._leaving) > LATE_STEPS:
            for digest in self._leaving.popleft():
                self._encoded.leave(digest)
        now = self._clock()
        self._end(lambda pending: pending.deadline <= now, finish_reason="error", error="its time was up",
                  error_code="deadline_exceeded")  # fmt: skip
        if self._pending:
            try:
                self._call(lambda: self._encode(seconds))
            except (RuntimeError, MemoryError):
                log.exception("an image could not be encoded; its request ends with an error")
                first = self._pending[0]
                self._end(lambda pending: pending is first, finish_reason="error", error="the image was not encoded")
        while self._pending and len(self._pending[0].held) == len(self._pending[0].request.images):
            self._hand_over(self._pending.popleft())
        outputs, self._outputs = self._outputs, []
        return outputs

    def ended(self, outputs: Sequence[StepOutput]) -> None:
        """Let go of the images of requests that these outputs end."""
        for output in outputs:
            if output.finish_reason is not None and (held := self._held.pop(output.request_id, None)):
                self._leaving[-1].extend(held)

    @torch.inference_mode()
    def _encode(self, seconds: float) -> None:
        """Encode images of the first pending request. It waits while images in use take all of the memory for them."""
        first, until = self._pending[0], self._clock() + seconds
        while len(first.held) < len(first.request.images):
            image = first.request.images[len(first.held)]
            if image.digest in self._encoded:
                self._hold(first, image)
                continue
            if self._steps is None:
                if not self._encoded.has_room and self._held:
                    return
                self._steps = self._tower.encode(image.rows, image.columns, image.pixels)
            try:
                next(self._steps)
            except StopIteration as end:
                self._steps = None
                self._encoded.keep(image.digest, *end.value)
                self.counts["encoded"] += 1
                self.counts["reused"] -= 1  # `_hold` counts it
                self._hold(first, image)
            if self._clock() >= until:
                return

    def _hold(self, pending: _Pending, image: ImageInput) -> None:
        self._encoded.use(image.digest)
        pending.held.append(image.digest)
        self.counts["reused"] += 1

    def _hand_over(self, pending: _Pending) -> None:
        """To the scheduler, which needs no pixels."""
        request = pending.request
        images = tuple(
            replace(image, pixels=b"", ids=(), number=self._numbers.of(image.digest)) for image in request.images
        )
        timeout = None if pending.deadline == math.inf else max(pending.deadline - self._clock(), 1e-3)
        try:
            self._admit(replace(request, images=images, timeout=timeout))
            self._held[request.request_id] = pending.held
        except RequestError as error:
            self._leaving[-1].extend(pending.held)
            self._outputs.append(_last(request, finish_reason="error", error=error.message, error_code=error.code))

    def _end(self, which: Callable[[_Pending], bool], **fields: Any) -> None:
        ended = [pending for pending in self._pending if which(pending)]
        for pending in ended:
            if pending is self._pending[0]:
                self._steps = None
            self._pending.remove(pending)
            self._leaving[-1].extend(pending.held)
            self._outputs.append(_last(pending.request, **fields))


def _last(request: Request, **fields: Any) -> StepOutput:
    return StepOutput(request_id=request.request_id, token_ids=[], **fields)


def check_images(request: Request, settings: AnySettings | AudioSettings) -> None:
    """Raise RequestError unless each image has its tokens, and pixels of its size."""
    most = min(settings.most, MAX_IMAGES)
    if sum(image.frames == 1 for image in request.images) > most:
        raise RequestError("invalid_request", f"at most {most} images in one request", "messages")
    if request.pooling is not None:
        raise RequestError("unsupported_parameter", "embeddings are of text; leave images out", "messages")
    if isinstance(settings, AudioSettings) and not request.images:
        raise RequestError("unsupported_parameter", NO_AUDIO, "model")
    end = 0
    for image in request.images:
        tokens = request.prompt_ids[image.start : image.end]
        last = len(request.prompt_ids) - (not settings.ends_prompt)
        fits = image.start >= end and image.rows > 0 < image.columns and image.end <= last
        if not fits or tokens != settings.tokens_of(image):
            raise RequestError("invalid_request", "an image does not stand at its tokens of the prompt", "messages")
        settings.check(image)
        end = image.end
