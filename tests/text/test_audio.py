"""WAV files as samples, and other rates resampled."""

from __future__ import annotations

import math
import struct
import wave
from contextlib import suppress
from io import BytesIO

import numpy as np
import pytest

from lmkit.errors import RequestError
from lmkit.text.audio import RATE, read_wav, resampled
from lmkit.wav import FLOAT, PCM


def wav(data: bytes, bits: int, kind: int = PCM, channels: int = 1, rate: int = RATE) -> bytes:
    width = bits // 8 * channels
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * width, width, bits)
    parts = b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(parts)) + b"WAVE" + parts


VALUES = np.array([0.0, 0.5, -0.5, -1.0, 0.25])


@pytest.mark.parametrize(
    ("bits", "kind", "data"),
    [
        (8, PCM, (VALUES * 128 + 128).astype(np.uint8).tobytes()),
        (16, PCM, (VALUES * 2**15).astype("<i2").tobytes()),
        (24, PCM, b"".join(int(x * 2**23).to_bytes(3, "little", signed=True) for x in VALUES)),
        (32, PCM, (VALUES * 2**31).astype("<i4").tobytes()),
        (32, FLOAT, VALUES.astype("<f4").tobytes()),
        (64, FLOAT, VALUES.astype("<f8").tobytes()),
    ],
)
def test_samples_of_every_kind(bits: int, kind: int, data: bytes) -> None:
    assert read_wav(wav(data, bits, kind), 1).tolist() == VALUES.tolist()


def test_what_the_standard_library_writes() -> None:
    """Two channels, whose mean is heard."""
    file = BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(2)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes(np.array([[100, 300], [-200, 0]], "<i2").tobytes())
    assert (read_wav(file.getvalue(), 1) * 2**15).tolist() == [200, -100]


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 48000])
def test_a_tone_keeps_its_form_at_another_rate(rate: int) -> None:
    frequency, seconds = 0.4 * min(rate, RATE), 0.5

    def tone(rate: int) -> np.ndarray:
        return np.sin(2 * math.pi * frequency * np.arange(int(rate * seconds)) / rate)

    found, whole = resampled(tone(rate), rate), tone(RATE)
    assert abs(len(found) - len(whole)) <= 1
    middle = slice(400, len(whole) - 400)  # before and after the file there is silence
    assert np.abs(found[middle] - whole[middle]).max() < 1e-4


def test_a_tone_beyond_the_rate_is_left_out() -> None:
    high = np.sin(2 * math.pi * 9000 * np.arange(24000) / 48000)
    assert np.abs(resampled(high, 48000)[400:-400]).max() < 1e-4


GOOD = wav(bytes(64), 16)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no WAV"), (b"ID3" + bytes(100), "no WAV"), (GOOD[:30], "no WAV"), (GOOD[:44], "no samples"),
        (wav(bytes(64), 16, kind=85), "no WAV"), (wav(bytes(64), 12), "no WAV"), (wav(bytes(64), 16, rate=10), "10 Hz"),
        (wav(bytes(64), 16, channels=0), "0 channels"), (wav(bytes(4 * RATE), 16), "takes 2 s, and at most 1 s"),
        (wav(np.array([np.nan], "<f4").tobytes(), 32, FLOAT), "no numbers"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_heard(data: bytes, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as refused:
        read_wav(data, 1)
    assert refused.value.status == 400


def test_damage_is_refused_and_nothing_else_happens() -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        damaged = bytearray(GOOD)
        for at in rng.integers(0, len(GOOD), 3):
            damaged[at] = rng.integers(256)
        with suppress(RequestError):
            read_wav(bytes(damaged[: rng.integers(len(GOOD) + 1)]), 1)
