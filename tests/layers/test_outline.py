"""Outlines have the shapes that packing gives, for every kernel of every level and for the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lmkit.codes import Integers
from lmkit.errors import CheckpointError
from lmkit.formats.mxfp4 import MXFP4
from lmkit.kernels import ops
from lmkit.kernels.cpu import dense, quantized
from lmkit.kernels.cpu.isa import LEVELS
from lmkit.kernels.registry import Implementation
from lmkit.layers.outline import STEP, WeightKind, kind_of, packed_outline
from lmkit.qtensor import QuantScheme, float8_scheme, int_scheme

DENSE = [WeightKind(dtype) for dtype in ("float32", "bfloat16", "float16")]
FOUR = [WeightKind("float16", int_scheme(4, group)) for group in (32, 128, -1)]
EIGHT = [
    WeightKind(dtype, int_scheme(8, group)) for dtype, group in (("float16", 128), ("float32", -1), ("bfloat16", -1))
]
LOOKED_UP = [WeightKind("float32", dataclasses.replace(MXFP4.plain, group_size=group)) for group in (16, 32)]
FLOAT8 = [WeightKind("float32", float8_scheme(group)) for group in (-1, 128)]


def cases() -> Iterator[tuple[Implementation, WeightKind]]:
    for isa in LEVELS.values():
        made = [(dense.dense_implementation(isa), DENSE), (dense.codes_implementation(isa, "int4"), FOUR)]
        made += [(dense.codes_implementation(isa, "int8"), EIGHT), (dense.codes_implementation(isa, "float8"), FLOAT8)]
        made += [(quantized.implementation(isa, 4), FOUR), (quantized.implementation(isa, 8), EIGHT + LOOKED_UP)]
        yield from ((impl, kind) for impl, kinds in made for kind in kinds)
    for op, kinds in (
        (ops.linear_dense, DENSE),
        (ops.linear_w4a16, FOUR),
        (ops.linear_w8a8, EIGHT),
        (ops.linear_fp8, FLOAT8),
    ):
        yield from ((op.named("reference"), kind) for kind in kinds)


def facts(packed: Any) -> Any:
    """Shapes and dtypes in the place of tensors."""
    if isinstance(packed, Tensor):
        return packed.shape, packed.dtype
    if dataclasses.is_dataclass(packed):
        return {field.name: facts(getattr(packed, field.name)) for field in dataclasses.fields(packed)}
    return packed


@pytest.mark.parametrize("rows", [1, 40, STEP, STEP + 8, 3 * STEP, 4 * STEP + 56])
def test_an_outline_has_the_shapes_of_packing(rows: int) -> None:
    for impl, kind in cases():
        for activation in (None, "silu") if rows % 2 == 0 else (None,):
            outline = packed_outline(impl, kind, (rows, 192), activation)
            packed = impl.pack(kind.zeros((rows, 192)), activation)
            assert facts(outline) == facts(packed), (impl.name, kind, activation)


def test_the_kind_of_a_weight_makes_one_like_it() -> None:
    for kind in [*DENSE, *FOUR, *EIGHT, *FLOAT8]:
        assert kind_of(kind.zeros((8, 64))) == kind


@pytest.mark.parametrize("kind", [WeightKind("nn"), WeightKind("float16", int_scheme(4, 0)),
                                  WeightKind("float32", float8_scheme(128, 128)),
                                  WeightKind("float16", int_scheme(7, 32)), WeightKind("no such")])  # fmt: skip
def test_an_impossible_kind_is_refused(kind: WeightKind) -> None:
    with pytest.raises(CheckpointError):
        kind.zeros((8, 64))


def test_an_outline_takes_no_memory() -> None:
    outline = packed_outline(ops.linear_dense.named("reference"), DENSE[0], (1 << 20, 1 << 10))
    assert (outline.weight.shape, outline.weight.device) == ((1 << 20, 1 << 10), torch.device("meta"))


def test_codes_that_no_byte_holds_are_refused() -> None:
    for values in ((0, 256), (-1,), tuple(range(17))):
        with pytest.raises(CheckpointError, match="no such scheme"):
            WeightKind("float32", QuantScheme(Integers(8, values=values), 32)).zeros((1, 32))
