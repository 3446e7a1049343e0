"""The storage types of a KV cache, as values. Options and files name them; they are parsed where they are
read, and the engine passes the values on.

A new type is one entry here and its kernels. No torch: configurations read this.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

CodedName = Literal["int8", "fp8", "int4", "int3", "int2"]
KVName = Literal["float32", "bfloat16", "float16", "int8", "fp8", "int4", "int3", "int2"]
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
    levels: tuple[int, ...] = ()  # what codes stand for, around their centre; (): themselves, from a stored minimum
    units: tuple[float, ...] = ()  # of levels: candidates, in standard deviations of a row; the best one is taken
    unit: int = 1  # rows are whole units of so many values
    needs_calibration: bool = False  # without one, answers suffer
    group_size: int = -1
    group_params: int = 2  # of a coded row: the scale and the minimum; with levels the scale alone

    def __str__(self) -> str:
        return self.name

    @property
    def needs_of_rows(self) -> str:
        number = "an even head_dim" if self.unit == 2 else f"a head_dim that is a multiple of {self.unit}"
        return f"{self} needs {number}"

    @property
    def largest(self) -> int:
        """The largest number that a code stands for; the smallest is 0."""
        return self.levels[-1] if self.levels else (1 << self.bits) - 1

    @property
    def has_short_codes(self) -> bool:
        """Whether keys meet queries of 8 bits (ops.paged_attention)."""
        return self.has_minimum and self.bits <= 4

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
INT4 = KVDtype("int4", 4, coded=True, has_minimum=True, needs_calibration=True, unit=2)
# The levels of Lloyd and Max for normal numbers (Max, "Quantizing for minimum distortion", 1960), as small integers.
# Their squared error is 0.0349 (free levels 0.0345, even ones 0.0374), and of two bits 0.1175 (0.1175, 0.1188).
# The unit that suits a row best has 8 % less of it than the same unit for all.
_AROUND = (0.8, 0.9, 1.0, 1.1, 1.2)
_LEVELS = KVDtype("", 0, coded=True, has_minimum=True, needs_calibration=True, group_params=1, unit=32)
INT3 = replace(
    _LEVELS, name="int3", bits=3, levels=(0, 3, 5, 7, 9, 11, 13, 16), units=tuple(0.2675 * f for f in _AROUND)
)
INT2 = replace(_LEVELS, name="int2", bits=2, levels=(0, 7, 13, 20), units=tuple(0.151 * f for f in _AROUND))
_DENSE = {dtype.name: dtype for dtype in (FLOAT32, BFLOAT16, FLOAT16)}
KV_DTYPES = {dtype.name: dtype for dtype in (*_DENSE.values(), INT8, FP8, INT4, INT3, INT2)}


def kv_dtype(name: str) -> KVDtype:
    """The type of this name. Raises KeyError."""
    return KV_DTYPES[name]


def asked_kv_dtype(name: str) -> KVDtype | None:
    """The type that an option asks for; None for "auto", which leaves the choice to the checkpoint. Raises KeyError."""
    return None if name == "auto" else kv_dtype(name)


def dense_kv_dtype(dtype: object) -> KVDtype:
    """The type that stores numbers of a torch dtype unchanged: float32, bfloat16 or float16. Raises KeyError."""
    return _DENSE[str(dtype).removeprefix("torch.")]
