"""The storage types of a KV cache. A new type is one entry here and its kernels. No torch: configurations read this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CodedName = Literal["int8", "fp8", "int4"]
KVName = Literal["float32", "bfloat16", "float16", "int8", "fp8", "int4"]
PARAM_BYTES = 4  # of a coded row: its scale and its minimum, both float16


@dataclass(frozen=True)
class KVDtype:
    """How the elements of keys or of values are stored; lmkit.kernels.ops describes the layouts."""

    name: str
    bits: int  # of an element
    coded: bool = False  # rows have a scale
    has_minimum: bool = False  # of a coded row: codes count from its minimum; otherwise the minimum is 0

    def __str__(self) -> str:
        return self.name

    def columns(self, dim: int) -> int:
        """Elements of the data tensor for a row of `dim` values: two 4-bit values share a byte."""
        return dim * self.bits // 8 if self.coded else dim

    def row_bytes(self, dim: int) -> int:
        """Bytes of one head's row of one token, its parameters included."""
        return dim * self.bits // 8 + (PARAM_BYTES if self.coded else 0)


FLOAT32, BFLOAT16, FLOAT16 = KVDtype("float32", 32), KVDtype("bfloat16", 16), KVDtype("float16", 16)
INT8 = KVDtype("int8", 8, coded=True, has_minimum=True)
FP8 = KVDtype("fp8", 8, coded=True)
INT4 = KVDtype("int4", 4, coded=True, has_minimum=True)
KV_DTYPES = {dtype.name: dtype for dtype in (FLOAT32, BFLOAT16, FLOAT16, INT8, FP8, INT4)}


def kv_dtype(name: str) -> KVDtype:
    """The type of this name. Raises KeyError."""
    return KV_DTYPES[name]
