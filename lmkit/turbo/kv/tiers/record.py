"""What a stored block looks like: a header of 64 bytes, then its KV.

    offset  bytes
         0      8  magic "lmkit-kv"
         8      4  version, 1
        12      4  0
        16      8  bytes of the KV behind the header
        24     32  the key
        56      4  0
        60      4  CRC-32 of bytes 0 .. 60 and the KV

Numbers are little-endian. A block in memory keeps the checksum alone: the header follows from its key and size.
CRC-32 (zlib's) because it is the fastest check of the standard library that lets other threads run meanwhile. It finds
what was torn or has decayed; a folder only we may write to keeps out what is meant to deceive.
"""

from __future__ import annotations

import struct
import zlib

from lmkit.turbo.kv.tiers.keys import KEY_BYTES

Data = bytes | bytearray | memoryview

MAGIC, VERSION = b"lmkit-kv", 1
HEADER_BYTES = 64
_FIELDS = struct.Struct(f"<8sIIQ{KEY_BYTES}sI")  # all but the checksum
_CHECKSUM = struct.Struct("<I")


def checksum(key: bytes, data: Data) -> int:
    """Of a block and the header it gets."""
    return zlib.crc32(data, zlib.crc32(_fields(key, memoryview(data).nbytes)))


def header(key: bytes, num_bytes: int, crc: int) -> bytes:
    return _fields(key, num_bytes) + _CHECKSUM.pack(crc)


def _fields(key: bytes, num_bytes: int) -> bytes:
    return _FIELDS.pack(MAGIC, VERSION, 0, num_bytes, key, 0)
