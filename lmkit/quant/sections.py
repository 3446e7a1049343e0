"""What a recipe says besides its steps: grid of the weights, KV cache, calibration text. And how a run goes.

Each field says what it means, once: the options of `lmkit quantize`, the tables of docs/reference.md and the checks of
a YAML file are made from these structs. No torch, as the command line imports them.
"""

from __future__ import annotations

import functools
import math
from typing import Annotated, Literal

from msgspec import Meta

from lmkit.config import PositiveInt, StrictStruct
from lmkit.formats.names import Activations, FormatName
from lmkit.kv_dtype import FP8, INT2, INT3, INT4, INT8, KVDtype
from lmkit.option import Note, Option

KVBits = Literal[16, 8, 4, 3, 2]
Switch = Literal["auto"] | bool
# Groups that are no number of inputs of a row.
WIDE_GROUPS = (-1, "channel", "tensor", "block")
_grid = functools.partial(Option, group="Weights and KV cache")
_text = functools.partial(Option, group="Calibration")
_run = functools.partial(Option, group="Run")


class WeightsRecipe(StrictStruct, frozen=True):
    """What the file holds. A recipe (quant.recipe) has these keys at its top."""

    format: Annotated[FormatName, _grid("File format of the weights.")] = "awq"
    activations: Annotated[
        Activations, Note("Rounding of the inputs of quantized linears that the checkpoint asks engines for.")
    ] = "none"
    lm_head: Annotated[
        Literal["auto", "int8", "stored"],
        _grid("The head when served: INT8, as stored, or auto: INT8 if that changes next to nothing."),
    ] = "auto"
    average_bits: Annotated[
        Annotated[float, Meta(ge=1, le=32)] | None,
        _grid("Mixed precision, for example 4.5: each linear gets the bits that its effect is worth."),
    ] = None


class SchemeRecipe(StrictStruct, frozen=True):
    """The grid of the weights.

    `group_size` inputs of an output row share a scale and, unless the grid is symmetric, a zero. "channel" (also
    written -1) is the whole row. Type float is symmetric. Of 8 bits (float8 e4m3) it has one scale for the row, the
    whole tensor, or a block of 128 rows and 128 inputs; of 4 bits it is NVFP4 in groups of 16, MXFP4 in groups of 32.

    With `smaller_groups`, linears whose inputs are not whole groups get groups of 64 or 32 (quant.groups).
    """

    bits: Annotated[Literal[2, 3, 4, 8], _grid("Bits of a weight; --average-bits mixes them.")] = 4
    type: Annotated[
        Literal["int", "float"],
        Note("int: unsigned codes, (code - zero) * scale; float: float8 e4m3, or NVFP4 or MXFP4 with 4 bits."),
    ] = "int"
    group_size: Annotated[
        Literal[-1, 16, 32, 64, 128, "channel", "tensor", "block"],
        _grid("Weights that share a scale; exactly so many. -1 is channel; 16 is NVFP4's."),
    ] = 128
    symmetric: Annotated[bool | None, Note("Without zeros. By default false for int; float is always symmetric.")] = (
        None
    )
    smaller_groups: Annotated[
        bool, Note("A group size that does not divide a linear's inputs falls back to 64, then 32. Of int.")
    ] = True

    def __post_init__(self) -> None:
        if self.type == "int" and self.group_size in ("tensor", "block"):
            raise ValueError(f"group_size {self.group_size} is for type float; int has 32, 64, 128 or channel")
        if self.type == "int" and self.group_size == 16:
            raise ValueError("group_size 16 is for type float of 4 bits; int has 32, 64, 128 or channel")
        if self.type == "float" and self.bits == 4 and self.group_size in (16, 32):
            return
        if self.type == "float" and self.bits != 8:
            raise ValueError("type float has `bits: 8`, or 4 with group_size 16 (NVFP4) or 32 (MXFP4)")
        if self.type == "float" and self.group_size not in WIDE_GROUPS:
            raise ValueError(f"group_size {self.group_size} is for type int; float has channel, tensor or block")
        if self.type == "float" and self.symmetric is False:
            raise ValueError("type float is symmetric")


SWITCHES = ("key_mean", "hadamard", "balance", "first_token", "value_hadamard")


class KVLayerRecipe(StrictStruct, frozen=True):
    """Bits of one layer that differ from the rest."""

    k_bits: Annotated[KVBits | None, Note("Bits of its keys.")] = None
    v_bits: Annotated[KVBits | None, Note("Bits of its values.")] = None


class KVRecipe(StrictStruct, frozen=True):
    """Storage of the KV cache.

    `bits`: 16 = as the model computes, auto = 3, 4 or 8 for each layer's keys and values. The switches change keys and
    values before they are quantized (quant.kv.fit); auto = where it helps. `balance` takes the place of `smooth` and
    `hadamard`.
    """

    bits: Annotated[
        Literal[KVBits, "auto"], _grid("Bits of the KV cache; auto is 8, 4 or 3 by layer.", name="kv_bits")
    ] = 16
    average_bits: Annotated[
        float, Meta(ge=3, le=8), Note("Upper limit of the average of `bits: auto`; below 4, 3 bits are a choice.")
    ] = 5.0
    type: Annotated[Literal["int", "fp8"], Note("Of 8-bit storage; fp8 is float8 e4m3.")] = "int"
    smooth: Annotated[
        bool, Note("SmoothAttention: keys' channels are divided by a power of their maxima, which is searched.")
    ] = True
    key_mean: Annotated[
        Switch, Note("Leave the mean of keys before RoPE out of the cache. auto: up to 4 bits, or where it is large.")
    ] = "auto"
    hadamard: Annotated[
        Switch, Note("Rotate keys by the Walsh-Hadamard matrix. auto: where it helps, not beside `balance`.")
    ] = "auto"
    balance: Annotated[
        Switch, Note("Multiply keys and queries by calibrated matrices, in place of both. auto: up to 4 bits.")
    ] = "auto"
    first_token: Annotated[
        Switch, Note("Leave the mean key and value of position 0 out of the cache. auto: up to 4 bits.")
    ] = "auto"
    value_hadamard: Annotated[
        Switch, Note("Rotate values in the weights of v, and back in those of o. auto: up to 4 bits.")
    ] = "auto"
    scheme: Annotated[
        Literal["online", "static8"], Note("static8: one scale for all tokens, in a compressed-tensors checkpoint.")
    ] = "online"
    layers: Annotated[
        dict[Annotated[int, Meta(ge=0)], KVLayerRecipe], Note("Bits of single layers: {0: {k_bits: 8}}.")
    ] = {}

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
        types: dict[int | str, KVDtype] = {8: FP8 if self.type == "fp8" else INT8, 4: INT4, 3: INT3, 2: INT2}
        return types.get(bits)

    @property
    def choices(self) -> tuple[KVDtype, ...]:
        """The types that `bits: auto` chooses from, ascending."""
        if self.bits != "auto":
            return ()
        return (INT4, INT8) if self.average_bits >= INT4.bits else (INT3, INT4, INT8)

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
        return bits in (2, 3, 4, "auto") if switch == "auto" else switch

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

    source: Annotated[str, Note("A preset, a file, a folder or hub:ORG/NAME.")]
    weight: Annotated[float, Meta(gt=0), Note("Its share of the rows, beside the others'.")] = 1.0

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

    dataset: Annotated[
        str | tuple[str | DatasetRecipe, ...],
        Note("A preset, a file, a folder, hub:ORG/NAME, none, or a list of such. A list may hold {source, weight}."),
    ] = BUNDLED_TEXT
    num_samples: Annotated[PositiveInt, _text("Rows of text.")] = 64
    seq_len: Annotated[int, Meta(ge=8), _text("Tokens of a row.")] = 512
    seed: Annotated[int, Meta(ge=0, le=(1 << 32) - 1), _text("Seed of the choice of text.")] = 0
    all_experts: Annotated[
        bool, Note("Calibrate every expert of a sparse layer on all tokens, not only on its own.")
    ] = False

    @property
    def has_text(self) -> bool:
        return self.dataset not in (NO_TEXT, (NO_TEXT,))

    def __post_init__(self) -> None:
        if not self.dataset:
            raise ValueError("`dataset` names nothing; write a preset or a path")


class RunConfig(StrictStruct, frozen=True):
    """How `lmkit quantize` runs. Nothing here changes what a recipe asks for, but the number of rows for a time."""

    merge_adapter: Annotated[str | None, _run("Merge this LoRA adapter first.", metavar="FOLDER")] = None
    max_memory: Annotated[
        PositiveInt | None,
        _run("Limit of the memory peak, for example 2GiB; smaller steps keep it.", is_size=True),
    ] = None
    time_budget: Annotated[
        float | None,
        _run("Time to take, for example 20m: as many rows as fit by the estimate.", is_time=True),
    ] = None
    ignore_estimate: Annotated[
        bool, _run("Start even if memory or disk will not do by the estimate.", is_switch=True)
    ] = False
    device: Annotated[str, _run("Where to compute; auto is a GPU or the CPU.", metavar="<auto|cpu|cuda|cuda:N>")] = (
        "auto"
    )
    restart: Annotated[bool, _run("Discard the layers of an interrupted run.", is_switch=True)] = False
    eval: Annotated[bool, _run("Compare the result with the source at the end.")] = True
