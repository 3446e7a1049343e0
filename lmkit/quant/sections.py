"""The sections of a recipe besides its steps: the grid of the weights, the KV cache, the calibration text."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Literal

from msgspec import Meta

from lmkit.codes import FLOAT8, Integers
from lmkit.config import PositiveInt, StrictStruct
from lmkit.formats.nvfp4 import NVFP4
from lmkit.kv_dtype import FP8, INT4, INT8, KVDtype
from lmkit.models.rounding import GROUPS
from lmkit.qtensor import QuantScheme

KVBits = Literal[16, 8, 4]
Switch = Literal["auto"] | bool
# group_size by name -> (rows, group_size) of a QuantScheme. A group_size that is an integer lies within one row.
WIDE_GROUPS = {"channel": (1, -1), -1: (1, -1), "tensor": (-1, -1), "block": (128, 128)}


class SchemeRecipe(StrictStruct, frozen=True):
    """The grid of the weights.

    `group_size` inputs of an output row share a scale and, unless the grid is symmetric, a zero. "channel" (also
    written -1) is the whole row. Type float is symmetric. Of 8 bits (float8 e4m3) it has one scale for the row, the
    whole tensor, or a block of 128 rows and 128 inputs; of 4 bits it is NVFP4, in groups of 16.

    With `smaller_groups`, linears whose inputs are not whole groups get groups of 64 or 32 (quant.groups).
    """

    bits: Literal[2, 3, 4, 8] = 4
    type: Literal["int", "float"] = "int"
    group_size: Literal[-1, 16, 32, 64, 128, "channel", "tensor", "block"] = 128
    symmetric: bool | None = None  # by default false for int
    smaller_groups: bool = True

    def __post_init__(self) -> None:
        if self.type == "int" and self.group_size in ("tensor", "block"):
            raise ValueError(f"group_size {self.group_size} is for type float; int has 32, 64, 128 or channel")
        if self.type == "int" and self.group_size == 16:
            raise ValueError("group_size 16 is for type float of 4 bits; int has 32, 64, 128 or channel")
        if self.type == "float" and self.bits == 4 and self.group_size == 16:
            return
        if self.type == "float" and self.group_size not in WIDE_GROUPS:
            raise ValueError(f"group_size {self.group_size} is for type int; float has channel, tensor or block")
        if self.type == "float" and self.bits != 8:
            raise ValueError("type float has `bits: 8`, or 4 with group_size 16; compressed-tensors has other integers")
        if self.type == "float" and self.symmetric is False:
            raise ValueError("type float is symmetric")

    def scheme(self) -> QuantScheme:
        if self.type == "float" and self.bits == NVFP4.bits:
            return NVFP4
        rows, size = (1, self.group_size) if isinstance(self.group_size, int) else WIDE_GROUPS[self.group_size]
        codes = FLOAT8 if self.type == "float" else Integers(self.bits, bool(self.symmetric))
        return QuantScheme(codes, size, rows)

    @property
    def schemes(self) -> tuple[QuantScheme, ...]:
        """The grid, and the same in the smaller groups that a linear may get."""
        whole, sizes = self.scheme(), GROUPS if self.smaller_groups and self.group_size not in WIDE_GROUPS else ()
        return whole, *(replace(whole, group_size=size) for size in sizes if size < whole.group_size)


SWITCHES = ("key_mean", "hadamard", "balance", "first_token", "value_hadamard")


class KVLayerRecipe(StrictStruct, frozen=True):
    """Bits of one layer that differ from the rest."""

    k_bits: KVBits | None = None
    v_bits: KVBits | None = None


class KVRecipe(StrictStruct, frozen=True):
    """Storage of the KV cache.

    `bits`: 16 = as the model computes, auto = 4 or 8 for each layer's keys and values. The switches change keys and
    values before they are quantized (quant.kv.fit); auto = where it helps. `balance` takes the place of `smooth` and
    `hadamard`.
    """

    bits: KVBits | Literal["auto"] = 16
    average_bits: Annotated[float, Meta(ge=4, le=8)] = 5.0  # upper limit for bits auto
    type: Literal["int", "fp8"] = "int"  # of 8-bit storage
    smooth: bool = True  # SmoothAttention with a searched exponent
    key_mean: Switch = "auto"  # leave the mean before RoPE out of the cache
    hadamard: Switch = "auto"  # rotate keys by the Walsh-Hadamard matrix
    balance: Switch = "auto"  # multiply keys and queries by calibrated matrices; auto = INT4 keys
    first_token: Switch = "auto"  # leave the mean key and value of position 0 out of the cache; auto = INT4
    value_hadamard: Switch = "auto"  # rotate values in the weights around them; auto = INT4 values
    scheme: Literal["online", "static8"] = "online"  # static8: one scale for all tokens, in the checkpoint
    layers: dict[Annotated[int, Meta(ge=0)], KVLayerRecipe] = {}

    @property
    def switches(self) -> dict[str, Switch]:
        """What changes keys and values online, by name."""
        return {name: getattr(self, name) for name in SWITCHES}

    def bits_of(self, layer: int) -> tuple[int | str, int | str]:
        """Bits of a layer's keys and values."""
        own = self.layers.get(layer, KVLayerRecipe())
        return own.k_bits or self.bits, own.v_bits or self.bits

    def stored(self, bits: int | str) -> KVDtype | None:
        """The type of keys or values of so many bits; None = as the model computes."""
        types: dict[int | str, KVDtype] = {8: FP8 if self.type == "fp8" else INT8, 4: INT4}
        return types.get(bits)

    def balances(self, layer: int) -> bool:
        """Whether keys and queries of a layer are multiplied by matrices."""
        return self._applies(self.balance, self.bits_of(layer)[0]) and self.hadamard is not True

    def leaves_out_first(self, layer: int) -> tuple[bool, bool]:
        """Whether the key, and the value, of position 0 are left out."""
        k_bits, v_bits = self.bits_of(layer)
        return self._applies(self.first_token, k_bits), self._applies(self.first_token, v_bits)

    def turns_values(self, layer: int) -> bool:
        """Whether a layer's values are rotated, if its weights allow it."""
        return self._applies(self.value_hadamard, self.bits_of(layer)[1])

    def _applies(self, switch: Switch, bits: int | str) -> bool:
        """Whether keys or values of so many bits are changed. `auto` bits may become 4."""
        if self.scheme != "online" or bits == 16:
            return False
        return bits in (4, "auto") if switch == "auto" else switch

    @property
    def is_fitted(self) -> bool:
        """Whether keys and values are observed: some are stored in less than 16 bits."""
        others = (bits for layer in self.layers.values() for bits in (layer.k_bits, layer.v_bits))
        return self.bits != 16 or any(bits not in (None, 16) for bits in others)

    def __post_init__(self) -> None:
        if self.scheme == "static8" and (self.bits != 8 or self.layers or True in self.switches.values()):
            raise ValueError(f"`scheme` static8 has 8 bits everywhere, and none of {', '.join(self.switches)}")
        if self.balance is True and self.hadamard is True:
            raise ValueError("`balance` and `hadamard` exclude each other")


class DatasetRecipe(StrictStruct, frozen=True):
    """A source of text (a preset's name or a path) and its weight among the others."""

    source: str
    weight: Annotated[float, Meta(gt=0)] = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError("`weight` must be a finite number")


NO_TEXT = "none"
BUNDLED_TEXT = "demo"  # like the text that the demo model was trained on


class CalibrationRecipe(StrictStruct, frozen=True):
    """The calibration text: `num_samples` rows of `seq_len` tokens.

    `dataset` is a source, sources that are pooled, or sources with weights. Each weighted source fills its share of the
    rows; a name alone weighs 1. "none": there is no text, and no layer is run.
    """

    dataset: str | tuple[str | DatasetRecipe, ...] = BUNDLED_TEXT
    num_samples: PositiveInt = 64
    seq_len: Annotated[int, Meta(ge=8)] = 512
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    all_experts: bool = False  # calibrate every expert of a sparse layer on all tokens, not only on its own

    @property
    def has_text(self) -> bool:
        return self.dataset not in (NO_TEXT, (NO_TEXT,))

    def __post_init__(self) -> None:
        if not self.dataset:
            raise ValueError("`dataset` names nothing; write a preset or a path")
