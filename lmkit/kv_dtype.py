"""The storage types of a KV cache, as values. Options and files name them; they are parsed where they are
read, and the engine passes the values on.

A new type is one entry here and its kernels. No torch: configurations read this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CodedName = Literal["int8", "fp8", "int4"]
KVName = Literal["float32", "bfloat16", "float16", "int8", "fp8", "int4"]
FLOAT16_BYTES = 2  # parameters of coded rows are float16


@dataclass(frozen=True)
class KVDtype:
    """How the elements of keys or of values are stored; lmkit.kernels.ops describes the layouts.

    A row holds the values of one head of one token. Each `group_size` values of a coded row share `group_params`
    parameters; -1 = all values of the row.
    """

    name: str
    bits: int  # of an element
    coded: bool = False  # rows have parameters
    has_minimum: bool = False  # of a coded row: codes count from its minimum; otherwise the minimum is 0
    needs_calibration: bool = False  # without one, answers suffer
    group_size: int = -1
    group_params: int = 2  # of a coded row: the scale and the minimum

    def __str__(self) -> str:
        return self.name

    @property
    def element(self) -> str:
        """The torch dtype of the data tensor. Codes lie in bytes, two of 4 bits in one."""
        return "uint8" if self.coded else self.name

    def columns(self, dim: int) -> int:
        """Elements of the data tensor for a row of `dim` values."""
        return dim * self.bits // 8 if self.coded else dim

    def values(self, columns: int) -> int:
        """Values of a row with so many elements."""
        return columns * 8 // self.bits if self.coded else columns

    def num_params(self, dim: int) -> int:
        """Parameters of a row of `dim` values, each a float16."""
        groups = 1 if self.group_size == -1 else -(-dim // self.group_size)
        return groups * self.group_params if self.coded else 0

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row of `dim` values, its parameters included."""
        return dim * self.bits // 8 + FLOAT16_BYTES * self.num_params(dim)


FLOAT32, BFLOAT16, FLOAT16 = KVDtype("float32", 32), KVDtype("bfloat16", 16), KVDtype("float16", 16)
INT8 = KVDtype("int8", 8, coded=True, has_minimum=True)
FP8 = KVDtype("fp8", 8, coded=True)
INT4 = KVDtype("int4", 4, coded=True, has_minimum=True, needs_calibration=True)
_DENSE = {dtype.name: dtype for dtype in (FLOAT32, BFLOAT16, FLOAT16)}
KV_DTYPES = {dtype.name: dtype for dtype in (*_DENSE.values(), INT8, FP8, INT4)}


def kv_dtype(name: str) -> KVDtype:
    """The type of this name. Raises KeyError."""
    return KV_DTYPES[name]


def asked_kv_dtype(name: str) -> KVDtype | None:
    """The type that an option asks for; None for "auto", which leaves the choice to the checkpoint. Raises KeyError."""
    return None if name == "auto" else kv_dtype(name)


def dense_kv_dtype(dtype: object) -> KVDtype:
    """The type that stores numbers of a torch dtype unchanged: float32, bfloat16 or float16. Raises KeyError."""
    return _DENSE[str(dtype).removeprefix("torch.")]
