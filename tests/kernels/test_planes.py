"""Weights in planes of bits, as GGUF's types have them, against the reference: products and rows, at every level."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import lmkit.kernels  # noqa: F401  (registers)
from lmkit.errors import UnsupportedError
from lmkit.kernels import plane_ops
from lmkit.kernels.cpu import isa, packed_planes, quantized, threads
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.workspace import Workspace
from lmkit.kernels.ops import Norm
from lmkit.layers.linear import MergedLinear
from lmkit.layers.outline import kind_of, packed_outline
from lmkit.models.shard import Shard
from lmkit.qtensor import QTensor, dequantize, int_scheme, quantize
from lmkit.turbo.runners.cpu_captured import _OnlyKernels
from tests.kernels.cases import F32_TOLERANCE, difference
from tests.kernels.planes import SCHEMES, random_weight

OUTPUTS, INPUTS = 70, 512
# Each dot product of AVX2 (sums of 8, 4 and 2 quads in 16 bits, and wide codes), and other layouts.
ELSEWHERE = {
    "avx2": ("Q4_K", "Q5_0", "Q6_K", "IQ4_NL", "IQ1_S"), "portable": ("Q5_K",), "neon_i8mm": ("IQ4_XS", "IQ2_XXS"),
    "amx": ("Q4_1", "Q6_K", "IQ4_NL", "IQ2_XS"), "avx512_vnni": ("Q4_1", "Q6_K", "IQ3_XXS"),
}  # fmt: skip


def usable(name: str) -> Isa:
    level = isa.LEVELS[name]
    return isa.named(name + isa.EMULATED) if isa.obstacle(level) else level


def pairs() -> Iterator[tuple[str, str]]:
    yield from ((isa.host().name, name) for name in SCHEMES)
    yield from ((level, name) for level, names in ELSEWHERE.items() if level != isa.host().name for name in names)


def weight_of(name: str, outputs: int = OUTPUTS) -> QTensor:
    torch.manual_seed(7)
    return random_weight(SCHEMES[name], outputs, INPUTS)


@pytest.mark.parametrize(("level", "name"), pairs())
def test_products_and_rows_are_those_of_the_weight(level: str, name: str) -> None:
    """Of few rows, which unpack in registers, and of many, which share unpacked panels."""
    weight, kernel = weight_of(name), quantized.planes_implementation(usable(level))
    packed, reference = kernel.pack(weight), plane_ops.linear_planes.named("reference")
    assert kernel.rows is not None
    assert torch.equal(kernel.rows(packed, torch.tensor([69, 0, 5, 5])), dequantize(weight)[[69, 0, 5, 5]])
    x, bias = torch.randn(40, INPUTS), torch.randn(OUTPUTS)
    x[1], x[2, :40], x[3, 5] = 0, 0, 1e4
    many = kernel(x, packed, bias)
    assert difference([many], [reference(x, reference.pack(weight), bias)]) <= F32_TOLERANCE
    for rows in (1, 2, 7):
        assert torch.equal(kernel(x[:rows], packed, bias), many[:rows])
    here = quantized.planes_implementation(isa.host())
    assert torch.equal(here(x, here.pack(weight), bias), many)


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_a_gated_weight_after_a_norm(name: str) -> None:
    weight, kernel = weight_of(name, 2 * 40), quantized.planes_implementation(isa.host())
    reference, x = plane_ops.linear_planes.named("reference"), torch.randn(5, INPUTS)
    norm = Norm(torch.rand(INPUTS), 1e-3)
    got = kernel(x, kernel.pack(weight, "silu"), None, norm)
    # A last bit of the norm may carry an activation over the edge between two codes.
    assert difference([got], [reference(x, reference.pack(weight, "silu"), None, norm)]) <= 2e-2


@pytest.mark.parametrize("level", dict.fromkeys((isa.host().name, "amx")))
@pytest.mark.parametrize("weight", [weight_of("Q6_K"), quantize(torch.randn(70, 96), int_scheme(8, 32, True))])
def test_inputs_keep_16_bits(weight: QTensor, level: str) -> None:
    """Of a few rows, of tiles that are full, and of one that is not."""
    kernel, reference = quantized.split_implementation(usable(level)), plane_ops.linear_split.named("reference")
    traits = {"scales": torch.float16, "in_features": weight.codes.shape[1], "group_size": 32}
    assert kernel.accepts(scheme=weight.scheme, **traits) is None
    x = torch.randn(40, weight.codes.shape[1])
    packed, exact = kernel.pack(weight), x.double() @ dequantize(weight).double().T
    many = kernel(x, packed, None)
    assert difference([many], [reference(x, reference.pack(weight), None)]) <= 2e-5
    assert difference([many.double()], [exact]) <= 1e-4
    for rows in (1, 3, 9, 21):
        assert torch.equal(kernel(x[:rows], packed, None), many[:rows])
    assert kernel.rows is not None
    assert torch.equal(kernel.rows(packed, torch.arange(70)), dequantize(weight))


@pytest.mark.parametrize("name", SCHEMES)
def test_a_packed_weight_takes_the_bytes_that_the_scheme_says(name: str) -> None:
    """And an outline of it has the same shapes."""
    weight, kernel = weight_of(name, 640), quantized.planes_implementation(isa.host())
    packed = kernel.pack(weight)
    assert packed.codes.nbytes + packed.scales.nbytes == weight.scheme.num_bytes((640, INPUTS))
    outline = packed_outline(kernel, kind_of(weight), (640, INPUTS))
    assert (outline.codes.shape, outline.scales.shape) == (packed.codes.shape, packed.scales.shape)
    assert outline.form == packed.form


def test_roles_of_one_type_become_one_product() -> None:
    weights = {role: random_weight(SCHEMES["Q4_K"], 64, INPUTS) for role in ("gate", "up")}
    dense = torch.cat([dequantize(weight) for weight in weights.values()])
    merged, x = MergedLinear(("gate", "up"), dict(weights)), torch.randn(3, INPUTS)
    merged.pack("exact")
    assert merged.packed is not None
    assert len(merged.packed) == 1
    assert difference([merged(x)], [x @ dense.T]) <= 1e-4


def test_roles_of_several_types_stand_side_by_side_in_a_captured_step() -> None:
    """As the values of Q4_K_M, whose keys and queries have fewer bits."""
    weights = {"q": random_weight(SCHEMES["Q4_K"], 64, INPUTS), "v": random_weight(SCHEMES["Q6_K"], 40, INPUTS)}
    alone, x = [MergedLinear((role,), {role: weight}) for role, weight in weights.items()], torch.randn(3, INPUTS)
    merged = MergedLinear(("q", "v"), dict(weights))
    for linear in (*alone, merged):
        linear.pack("exact")
    with Workspace(1 << 20).active(), threads.capturing() as program, _OnlyKernels():
        y = merged(x)
    program.launch()
    assert torch.equal(y, torch.cat([linear(x) for linear in alone], 1))


def test_a_rank_takes_whole_super_groups() -> None:
    weight, halves = weight_of("Q4_K"), [Shard(rank, tp=2) for rank in range(2)]
    parts = [shard._columns("mlp.down", weight) for shard in halves]
    assert torch.equal(
        torch.cat([dequantize(part) for part in parts if isinstance(part, QTensor)], 1), dequantize(weight)
    )
    with pytest.raises(UnsupportedError, match="super-groups of 256"):
        Shard(0, tp=4)._columns("mlp.down", weight)


def test_what_planes_do_not_hold_is_refused_by_name() -> None:
    reason = packed_planes.accepts(scheme=SCHEMES["Q4_K"], scales=torch.int8, in_features=288)
    assert reason == "288 inputs are not a multiple of 256"
    reason = packed_planes.accepts(scheme=SCHEMES["Q4_1"], scales=torch.float32, in_features=288)
    assert reason == "scales of torch.float32, not float16"
