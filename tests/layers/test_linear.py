"""Which kernel a weight gets, by its format, the device and what is asked of activations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import lmkit.kernels  # noqa: F401  (registers)
from lmkit.errors import UnsupportedError
from lmkit.kernels import ops
from lmkit.kernels.ops import Norm
from lmkit.kernels.registry import Implementation
from lmkit.layers.linear import MergedLinear, _select
from lmkit.layers.outline import WeightKind
from lmkit.qtensor import QTensor, QuantScheme, dequantize, quantize

FOUR, GROUPED, ROWS = QuantScheme(4, 128), QuantScheme(8, 128), QuantScheme(8, -1, True)
FLOAT_ROWS, FLOAT_BLOCKS = QuantScheme(8, -1, True, "float"), QuantScheme(8, 128, True, "float")
OPS = [
    ops.linear_w4a16, ops.linear_w4a8, ops.linear_w8a16, ops.linear_w8a8, ops.linear_fp8, ops.linear_fp8_a8,
]  # fmt: skip


@pytest.fixture
def gpu_kernels() -> Iterator[dict[str, str]]:
    """Every linear has a kernel for the device "gpu", which is called as the op is; but for those in the dict."""
    refused: dict[str, str] = {}
    for op in OPS:
        accepts = lambda name=op.name, **traits: refused.get(name)  # noqa: E731
        op.register(Implementation(op.name, "gpu", lambda *args: None, accepts, priority=90))
    yield refused
    for op in OPS:
        op.implementations = [impl for impl in op.implementations if impl.device != "gpu"]


def selected(scheme: QuantScheme, activations: str, device: str = "gpu") -> str:
    return _select(WeightKind("float16", scheme), (256, 256), device, activations, None).name


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (FOUR, {"auto": "linear_w4a16", "int8": "linear_w4a8", "exact": "linear_w4a16"}),
        (GROUPED, {"auto": "linear_w8a16", "int8": "linear_w8a8", "exact": "linear_w8a16"}),
        (ROWS, {"auto": "linear_w8a8", "int8": "linear_w8a8", "exact": "linear_w8a16"}),
        (FLOAT_ROWS, {"auto": "linear_fp8_a8", "fp8": "linear_fp8_a8", "exact": "linear_fp8", "int8": "linear_fp8"}),
        (FLOAT_BLOCKS, {"auto": "linear_fp8", "fp8": "linear_fp8_a8", "exact": "linear_fp8", "int8": "linear_fp8"}),
    ],
)
def test_activations_decide_the_op(gpu_kernels: None, scheme: QuantScheme, expected: dict[str, str]) -> None:
    assert {activations: selected(scheme, activations) for activations in expected} == expected


@pytest.mark.parametrize(("scheme", "rounded"), [(ROWS, "linear_w8a8"), (FLOAT_ROWS, "linear_fp8_a8")])
def test_auto_takes_the_exact_kernel_if_there_is_no_other(
    gpu_kernels: dict[str, str], scheme: QuantScheme, rounded: str
) -> None:
    gpu_kernels[rounded] = "too small"
    assert selected(scheme, "auto") == {"linear_w8a8": "linear_w8a16", "linear_fp8_a8": "linear_fp8"}[rounded]


@pytest.mark.parametrize("scheme", [FOUR, GROUPED, ROWS])
def test_fp8_activations_of_integers_are_refused(scheme: QuantScheme) -> None:
    with pytest.raises(UnsupportedError, match=f"fp8 need float8 weights, not {scheme.bits}-bit integers"):
        selected(scheme, "fp8", "cpu")


ROLES = ("mlp.gate", "mlp.up")
PACKED = {
    "plain": None,
    "one product": (QuantScheme(4, 32), QuantScheme(4, 32)),
    "two products": (QuantScheme(4, 32), QuantScheme(8, 32)),
    "dense": (None, None),
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
def test_a_low_rank_delta_is_that_of_the_weight(name: str, activation: str | None) -> None:
    """y = (W + B A) x, before the activation: as a delta on `up`, and as a weight that has it."""
    generator = torch.Generator().manual_seed(3)
    weights = {role: torch.randn(96, 64, generator=generator) / 8 for role in ROLES}
    if (schemes := PACKED[name]) is not None:
        weights = {
            role: w if scheme is None else quantize(w, scheme)
            for (role, w), scheme in zip(weights.items(), schemes, strict=True)
        }
    a, b = torch.randn(4, 64, generator=generator) / 8, torch.randn(96, 4, generator=generator)
    x, norm = torch.randn(5, 64, generator=generator), Norm(torch.rand(64, generator=generator), 1e-5)
    dense = {role: dequantize(w) if isinstance(w, QTensor) else w for role, w in weights.items()}
    changed = MergedLinear(ROLES, {**dense, "mlp.up": dense["mlp.up"] + b @ a}, activation=activation)
    linear = MergedLinear(ROLES, dict(weights), activation=activation)
    linear.takes_deltas = True
    if schemes is not None:
        linear.pack("exact")
    without = linear(x, norm)
    linear.deltas["mlp.up"] = lambda x: (x @ a.T) @ b.T
    torch.testing.assert_close(linear(x, norm), changed(x, norm), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(without, linear(x, norm), atol=1e-2)
    linear.deltas.clear()
    assert torch.equal(linear(x, norm), without)


def test_a_delta_of_what_is_added_to_the_stream() -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    linear = MergedLinear(("attn.o",), {"attn.o": weight.clone()})
    linear.pack("exact")
    linear.deltas["attn.o"] = lambda x: x[:, :32] * 3
    x, stream = torch.randn(5, 64), torch.randn(5, 32)
    delta, residual = linear.add_to(stream.clone(), x)
    got = delta if residual is None else delta + residual
    torch.testing.assert_close(got, stream + x @ weight.T + 3 * x[:, :32], rtol=1e-4, atol=1e-4)


def test_a_kernel_that_computes_the_activation_refuses_deltas() -> None:
    linear = MergedLinear(ROLES, {role: torch.randn(32, 64) for role in ROLES}, activation="silu")
    linear.pack("exact")
    linear.deltas["mlp.up"] = lambda x: x[:, :32]
    with pytest.raises(AssertionError, match="computes the activation"):
        linear(torch.randn(2, 64))
