"""Embeddings on the wire: numbers, or bytes in vLLM's types and byte orders. No torch here."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from lmkit.turbo.transport.vectors import Vectors

DType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "little", "big"]
_ORDERS = {"native": "=", "little": "<", "big": ">"}


class Minifloat(NamedTuple):
    """A type of one byte. Its finite values have the codes 0 to `last`, and 128 more if they are negative."""

    mantissa: int  # bits
    bias: int  # of the exponent
    last: int


_MINIFLOATS = {"fp8_e4m3": Minifloat(3, 7, 0x7E), "fp8_e5m2": Minifloat(2, 15, 0x7B)}  # as in OCP's OFP8


def encoded(vectors: Vectors, dtype: DType = "float32", endianness: Endianness = "little") -> Iterator[bytes]:
    """The bytes of each vector. Values are rounded to the nearest, ties to even; those beyond the range become its end.

    `vectors` are float32 [texts, size].
    """
    values = _rounded(vectors, dtype)
    for row in values.astype(values.dtype.newbyteorder(_ORDERS[endianness])):
        yield row.tobytes()


def entries(vectors: Vectors, encoding: str, dtype: DType, endianness: Endianness) -> Iterator[dict[str, Any]]:
    """OpenAI's entries, with lists of numbers or in base64."""
    shown: Iterator[Any] = (vector.tolist() for vector in vectors)
    if encoding == "base64":
        shown = (base64.b64encode(data).decode() for data in encoded(vectors, dtype, endianness))
    for index, embedding in enumerate(shown):
        yield {"object": "embedding", "index": index, "embedding": embedding}


def positions(vectors: Vectors, dtype: DType, endianness: Endianness) -> list[dict[str, Any]]:
    """Where each vector stands in the bytes of all, as vLLM's `metadata` has it."""
    num_texts, size = vectors.shape
    each = size * _rounded(vectors[:0], dtype).itemsize
    about = {"embed_dtype": dtype, "endianness": endianness, "shape": [size]}
    return [{"index": i, "start": i * each, "end": (i + 1) * each} | about for i in range(num_texts)]


def _rounded(vectors: Vectors, dtype: DType) -> np.ndarray[Any, Any]:
    """The values in `dtype`, those of types that numpy lacks as unsigned integers with the same bits."""
    import numpy as np

    if dtype == "float32":
        return vectors
    if dtype == "float16":
        most = np.finfo(np.float16).max
        return vectors.clip(-most, most).astype(np.float16)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(vectors).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    middles = _middles(_MINIFLOATS[dtype])
    sizes = np.abs(vectors)
    lower, upper = (np.searchsorted(middles, sizes, side=side) for side in ("left", "right"))  # they differ at a middle
    codes = np.where(lower % 2, upper, lower).astype(np.uint8)
    return codes | np.signbit(vectors).astype(np.uint8) << 7


@cache
def _middles(kind: Minifloat) -> np.ndarray[Any, Any]:
    """float32: the numbers between neighbouring values of the type, from 0 on."""
    import numpy as np

    codes = np.arange(kind.last + 1)
    exponents, fractions = codes >> kind.mantissa, codes % (1 << kind.mantissa)
    whole = np.where(exponents > 0, 1 << kind.mantissa, 0) + fractions
    values = np.ldexp(whole.astype(float), np.maximum(exponents, 1) - kind.bias - kind.mantissa)
    middles: np.ndarray[Any, Any] = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    return middles
