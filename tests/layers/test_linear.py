"""Which kernel a weight gets, by its format, the device and what is asked of activations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lmkit.kernels  # noqa: F401  (registers)
from lmkit.errors import UnsupportedError
from lmkit.kernels import ops
from lmkit.kernels.ops import Norm
from lmkit.kernels.registry import Implementation
from lmkit.layers.adapters import StepAdapters
from lmkit.layers.linear import MergedLinear, _select
from lmkit.layers.outline import WeightKind
from lmkit.low_rank import LowRank
from lmkit.models.decoder_layer import joined
from lmkit.qtensor import QTensor, QuantScheme, dequantize, float8_scheme, int_scheme
from tests.formats.linears import rounded

FOUR, GROUPED, ROWS = int_scheme(4, 128), int_scheme(8, 128), int_scheme(8, -1, True)
FLOAT_ROWS, FLOAT_BLOCKS = float8_scheme(), float8_scheme(128)
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
    "one product": (int_scheme(4, 32), int_scheme(4, 32)),
    "two products": (int_scheme(4, 32), int_scheme(8, 32)),
    "one order": (int_scheme(4, 32, act_order=True), int_scheme(4, 32, act_order=True)),
    "two orders": (int_scheme(4, 32, act_order=True), int_scheme(4, 32, act_order=True)),
    "dense": (None, None),
}


@pytest.mark.parametrize("name", [name for name in PACKED if PACKED[name] is not None])
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [96, 100])
def test_adapters_change_their_rows_alone(name: str, activation: str | None, dtype: torch.dtype, width: int) -> None:
    """y = (W + s B A) x before the activation, for two adapters in one step. The other rows keep their bits."""
    generator = torch.Generator().manual_seed(3)
    weights: dict[str, Any] = {role: torch.randn(width, 64, generator=generator) / 8 for role in ROLES}
    schemes = PACKED[name]
    assert schemes is not None
    for role, scheme in zip(ROLES, schemes, strict=True):
        if scheme is not None:
            torch.manual_seed(0 if name == "one order" else len(role))
            weights[role] = rounded(weights[role], scheme)
    linear = MergedLinear(ROLES, dict(weights), activation=activation)
    linear.pack("exact")
    x, norm = torch.randn(5, 64, generator=generator), Norm(torch.rand(64, generator=generator), 1e-5)
    without = linear(x, norm)
    step = StepAdapters("cpu")
    step.count = 3
    adapters = linear.adapt(step)
    dense = {role: dequantize(w) if isinstance(w, QTensor) else w for role, w in weights.items()}
    want = [without]
    for number, role in ((0, "mlp.gate"), (2, "mlp.up")):
        a = (torch.randn(4 + number, 64, generator=generator) / 8).to(dtype)
        b = torch.randn(4 + number, width, generator=generator).to(dtype)
        adapters.set(role, number, LowRank(a, b, 0.5))
        changed = {**dense, role: dense[role] + 0.5 * b.float().T @ a.float()}
        want.append(MergedLinear(ROLES, changed, activation=activation)(x, norm))
    assert torch.equal(linear(x, norm), without)  # no row has one
    numbers = torch.tensor([0, -1, 2, 1, 0], dtype=torch.int32)
    step.set(numbers, None)
    got = linear(x, norm)
    assert torch.equal(got[[1, 3]], without[[1, 3]])
    torch.testing.assert_close(got[[0, 4]], want[1][[0, 4]], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[[2]], want[2][[2]], rtol=1e-4, atol=1e-4)
    step.set(numbers[:1], None)
    assert torch.equal(linear(x[:1], norm), got[:1])  # whatever else is in the step


def test_an_adapter_of_what_is_added_to_the_stream() -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    linear = MergedLinear(("attn.o",), {"attn.o": weight.clone()})
    linear.pack("exact")
    x, stream = torch.randn(5, 64), torch.randn(5, 32)
    plain = joined(*linear.add_to(stream.clone(), x))
    step = StepAdapters("cpu")
    step.count = 1
    a, b = torch.randn(4, 64) / 8, torch.randn(4, 32)
    linear.adapt(step).set("attn.o", 0, LowRank(a, b, 2.0))
    step.set(torch.tensor([-1, 0, -1, 0, -1], dtype=torch.int32), None)
    got = joined(*linear.add_to(stream.clone(), x))
    assert torch.equal(got[::2], plain[::2])
    torch.testing.assert_close(got[1::2], (stream + x @ weight.T + 2 * x @ a.T @ b)[1::2], rtol=1e-4, atol=1e-4)
