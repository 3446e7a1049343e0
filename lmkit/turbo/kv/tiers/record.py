"""The format of a stored block: a header of 64 bytes, then its KV.

    offset  bytes
         0      8  magic "lmkit-kv"
         8      4  version, 1
        12      4  0
        16      8  bytes of the KV after the header
        24     32  the key
        56      4  0
        60      4  CRC-32 of bytes 0 .. 60 and the KV

Numbers are little-endian. A block in memory keeps only the checksum: the header follows from its key and size. The
checksum is zlib's CRC-32, the fastest check of the standard library that lets other threads run meanwhile. It finds
torn and decayed blocks. It does not stop forged blocks: for that, only this user may write to the folder.
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
    """The checksum of a block and the header that it gets."""
    return zlib.crc32(data, zlib.crc32(_fields(key, memoryview(data).nbytes)))


def header(key: bytes, num_bytes: int, crc: int) -> bytes:
    return _fields(key, num_bytes) + _CHECKSUM.pack(crc)


def _fields(key: bytes, num_bytes: int) -> bytes:
    return _FIELDS.pack(MAGIC, VERSION, 0, num_bytes, key, 0)
