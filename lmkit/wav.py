"""The head of a WAV file: a server reads what follows, and a proxy how long it takes to be heard."""

from __future__ import annotations

import struct
from typing import NamedTuple

from lmkit.errors import RequestError

RATES = 8000, 384_000
MAX_CHANNELS = 8
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
NEITHER = "it is no WAV file of PCM or float samples"


class Wav(NamedTuple):
    """`data` holds whole samples of all channels in turns."""

    kind: int
    channels: int
    rate: int
    bits: int  # of a sample
    data: memoryview

    @property
    def seconds(self) -> float:
        return len(self.data) // (self.bits // 8 * self.channels) / self.rate


def read_head(file: bytes) -> Wav:
    """Raises RequestError for what is no WAV file, or cannot be heard."""
    try:
        form, data = _parts(file)
        kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", form)
        if kind == EXTENSIBLE:
            kind = struct.unpack_from("<H", form, 24)[0]
    except (struct.error, LookupError):
        raise refused(NEITHER) from None
    if not (1 <= channels <= MAX_CHANNELS and RATES[0] <= rate <= RATES[1]):
        raise refused(f"{channels} channels at {rate} Hz; at most {MAX_CHANNELS}, at {RATES[0]} to {RATES[1]} Hz")
    width = bits // 8 * channels
    if not width or not len(data) // width:
        raise refused("it has no samples")
    return Wav(kind, channels, rate, bits, data[: len(data) // width * width])


def _parts(file: bytes) -> tuple[bytes, memoryview]:
    """The chunks `fmt ` and `data`. A data chunk that says more than there is, as a stream's, ends with the file."""
    if file[:4] != b"RIFF" or file[8:12] != b"WAVE":
        raise LookupError
    found = dict[bytes, memoryview]()
    at, view = 12, memoryview(file)
    while at + 8 <= len(file) and b"data" not in found:
        name, size = struct.unpack_from("<4sI", file, at)
        found[name] = view[at + 8 : at + 8 + size]
        at += 8 + size + size % 2
    return bytes(found[b"fmt "]), found[b"data"]


def refused(reason: str) -> RequestError:
    """The error of a file that cannot be used."""
    return RequestError("invalid_request", f"file: {reason}", "file")
