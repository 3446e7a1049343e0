"""Which kernel a weight gets, by its format, the device and what is asked of activations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import lmkit.kernels  # noqa: F401  (registers)
from lmkit.errors import UnsupportedError
from lmkit.kernels import ops
from lmkit.kernels.registry import Implementation
from lmkit.layers.linear import _select
from lmkit.layers.outline import WeightKind
from lmkit.qtensor import QuantScheme

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
    return _select(WeightKind("float16", scheme), (256, 256), device, activations).name


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
