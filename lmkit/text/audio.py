"""Audio of requests: from the bytes of a WAV file to the samples that an encoder hears. No torch here.

PCM of 8, 16, 24 and 32 bits and floats of 32 and 64 bits. Channels are averaged. Another rate is resampled by a
windowed sinc (Kaiser, beta 8.6) of 32 zero crossings on each side: what is beyond the lower of both Nyquist rates is
at least 80 dB down, but for a transition band of 8% of it. A sine below is exact to 1e-4 of its amplitude.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, ClassVar

import msgspec

from lmkit.errors import RequestError
from lmkit.text.images import ReadImage, SentImage
from lmkit.wav import FLOAT, NEITHER, PCM, read_head, refused

if TYPE_CHECKING:
    import numpy as np  # most servers hear nothing, and need no numpy

NO_AUDIO = "this model writes what it hears: send a file to /v1/audio/transcriptions"
DEAF = "this model hears no audio"
RATE = 16000  # samples a second that encoders hear
ZEROS, BETA, KEPT = 32, 8.6, 0.92  # of the resampling filter; KEPT: its cut, as a share of the lower Nyquist rate
PART = 1 << 14  # samples that are resampled at a time


class AudioSettings(msgspec.Struct, frozen=True, kw_only=True, tag="audio"):
    """How an encoder wants audio, and the tokens by which the decoder is told what to write."""

    ends_prompt: ClassVar[bool] = True  # its token may be a prompt's last
    most: ClassVar[int] = 1  # of one request

    seconds: int  # that it hears at a time
    start: int  # the token that begins a text
    end: int  # and the one that ends it
    no_timestamps: int  # the one after it is the first timestamp, of 0 s
    languages: dict[str, int] = {}  # empty: it knows only one
    tasks: dict[str, int] = {}
    previous: int | None = None  # begins the text before an audio
    suppress: tuple[int, ...] = ()  # tokens that are never written
    begin_suppress: tuple[int, ...] = ()  # and such that are not written first
    max_initial: int | None = None  # the largest timestamp, in steps, that may be written first

    def tokens_of(self, audio: SentImage) -> list[int]:
        """The token of the prompt at which the audio stands: its first."""
        return list(audio.ids)

    def check(self, audio: SentImage) -> None:
        """Raise RequestError for more samples than it hears."""
        if len(audio.pixels) % 4 or len(audio.pixels) > 4 * RATE * self.seconds or len(audio.ids) != 1:
            raise RequestError("invalid_request", f"an audio is not one of at most {self.seconds} s", "file")

    def read(self, data: bytes, detail: str) -> ReadImage:
        """Audio does not stand in messages."""
        raise RequestError("unsupported_parameter", "images: this model hears audio alone", "messages")


def heard(samples: np.ndarray, first_token: int) -> ReadImage:
    """Samples float32 of at most AudioSettings.seconds, for a prompt that begins with `first_token`."""
    data = samples.astype("<f4").tobytes()
    return ReadImage(1, 1, hashlib.sha256(b"audio" + data).digest(), data, ids=(first_token,))


def read_wav(data: bytes, max_seconds: float) -> np.ndarray:
    """The samples float32 [n] of a WAV file, of one channel at RATE. Raises RequestError."""
    import numpy as np

    file = read_head(data)
    if file.seconds > max_seconds:
        raise refused(f"it takes {file.seconds:.0f} s, and at most {max_seconds:.0f} s are heard in one request")
    samples = _numbers(file.data, file.kind, file.bits).reshape(-1, file.channels).mean(1)
    if not np.isfinite(samples).all():
        raise refused("it has samples that are no numbers")
    return resampled(samples, file.rate)


def _numbers(body: memoryview, kind: int, bits: int) -> np.ndarray:
    """Samples of all channels in turns, float32 in [-1, 1)."""
    import numpy as np

    if kind == FLOAT and bits in (32, 64):
        with np.errstate(over="ignore", invalid="ignore"):  # the result is checked
            return np.frombuffer(body, f"<f{bits // 8}").astype(np.float32)
    if kind != PCM or bits not in (8, 16, 24, 32):
        raise refused(NEITHER)
    if bits == 8:  # the only one without a sign
        return (np.frombuffer(body, np.uint8).astype(np.float32) - 128) / 128
    if bits == 24:
        wide = np.zeros((len(body) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(body, np.uint8).reshape(-1, 3)
        whole = wide.view("<i4")[:, 0]
    else:
        whole = np.frombuffer(body, f"<i{bits // 8}")
    scaled: np.ndarray = whole.astype(np.float32) / 2 ** (8 * whole.itemsize - 1)
    return scaled


def resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """Samples [n] at `rate` -> float32 [ceil(n * RATE / rate)] at RATE.

    Sample i of the result lies at i * rate / RATE of the given ones. Those with the same fraction have the same filter.
    """
    import numpy as np

    if rate == RATE:
        return samples.astype(np.float32)
    common = math.gcd(rate, RATE)
    up, down = RATE // common, rate // common
    cut = min(1.0, RATE / rate) * KEPT
    half = math.ceil(ZEROS / cut)
    count = -(-len(samples) * up // down)
    padded = np.pad(samples, (half, half + down))
    rows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half)
    found = np.empty(count, np.float32)
    for phase in range(min(up, count)):
        whole, rest = divmod(phase * down, up)
        away = np.arange(1 - half, half + 1) - rest / up
        taps = cut * np.sinc(cut * away) * np.i0(BETA * np.sqrt(np.maximum(1 - (away / half) ** 2, 0))) / np.i0(BETA)
        taps, these = taps / taps.sum(), found[phase::up]
        seen = rows[whole + 1 :: down][: len(these)]
        for start in range(0, len(these), PART):  # numpy copies what it multiplies
            these[start : start + PART] = seen[start : start + PART] @ taps
    return found
