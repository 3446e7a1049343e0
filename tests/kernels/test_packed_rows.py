"""Rows of packed weights against the reference, bit by bit, in the layout of every level."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import lmkit.kernels  # noqa: F401  (registers)
from lmkit.formats.mxfp4 import MXFP4
from lmkit.kernels import ops
from lmkit.kernels.cpu import dense, isa, quantized, tiles
from lmkit.kernels.registry import Implementation, Op
from lmkit.qtensor import QTensor, QuantScheme, float8_scheme, int_scheme, quantize

FLOAT8 = float8_scheme()
SCHEMES = {
    ops.linear_w8a8.name: (int_scheme(8, 32, symmetric=True), int_scheme(8, 128), int_scheme(8, -1)),
    ops.linear_w4a8.name: (int_scheme(4, 32),),
    ops.linear_w8a16.name: (int_scheme(8, 32),),
    ops.linear_w4a16.name: (int_scheme(4, 32),),
    ops.linear_fp8.name: (FLOAT8,),
}
KINDS = {ops.linear_w4a16.name: tiles.CODES4, ops.linear_w8a16.name: tiles.CODES8, ops.linear_fp8.name: tiles.FLOAT8}


def kernels() -> Iterator[tuple[Op, Implementation, object]]:
    for name, level in isa.LEVELS.items():
        usable = isa.named(name + isa.EMULATED) if isa.obstacle(level) else level
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            yield ops.linear_dense, dense.dense_implementation(usable), dtype
        for op_name, schemes in SCHEMES.items():
            op, kind, bits = getattr(ops, op_name), KINDS.get(op_name), 8 if op_name == "linear_w8a8" else 4
            kernel = dense.codes_implementation(usable, kind) if kind else quantized.implementation(usable, bits)
            yield from ((op, kernel, scheme) for scheme in schemes)


@pytest.mark.parametrize(
    ("op", "kernel", "kind"), [pytest.param(*case, id=f"{case[0].name}-{case[1].name}-{case[2]}") for case in kernels()]
)
def test_rows_are_those_of_the_weight(op: Op, kernel: Implementation, kind: torch.dtype | QuantScheme) -> None:
    """Odd numbers of inputs and outputs; rows that come twice, the first and the last."""
    torch.manual_seed(3)
    outputs, inputs = 131, 75 if isinstance(kind, torch.dtype) or kind.group_size == -1 else 160
    plain = torch.randn(outputs, inputs)
    weight: torch.Tensor | QTensor = plain.to(kind) if isinstance(kind, torch.dtype) else quantize(plain, kind)
    rows, reference = torch.tensor([130, 0, 5, 5, 64, 127]), op.named("reference")
    assert kernel.rows is not None
    assert reference.rows is not None
    for factor in (1.0, 2.5):
        got = kernel.rows(kernel.pack(weight), rows, factor)
        assert torch.equal(got, reference.rows(reference.pack(weight), rows, factor))


def test_codes_that_are_looked_up() -> None:
    torch.manual_seed(3)
    scheme, values = MXFP4.plain, MXFP4.plain.codes.values
    codes = torch.tensor(values, dtype=torch.uint8)[torch.randint(len(values), (40, 64))]
    weight = QTensor(codes, torch.rand(40, 2).half(), torch.full((40, 2), values[0], dtype=torch.uint8), scheme)
    kernel, rows = quantized.implementation(isa.host(), 8), torch.arange(40)
    reference = ops.linear_w8a8.named("reference")
    assert kernel.rows is not None
    assert reference.rows is not None
    assert torch.equal(kernel.rows(kernel.pack(weight), rows), reference.rows(reference.pack(weight), rows))
