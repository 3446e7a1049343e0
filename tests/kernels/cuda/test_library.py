"""Linears on torch's matmul, and the stream of weights for few tokens, against float32 oracles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cuda import elementwise
from lmkit.kernels.ops import Norm
from lmkit.kernels.reference import linear as reference
from lmkit.kernels.registry import Op
from lmkit.qtensor import QTensor, QuantScheme, float8_scheme, int_scheme, plain, quantize
from tests import emulator

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
INT8, INT8_ASYMMETRIC = int_scheme(8, -1, True), int_scheme(8, -1)
FLOAT8, FLOAT8_TENSOR = float8_scheme(), float8_scheme(-1, -1)
STEP = {F32: 3e-6, F16: 2**-10, BF16: 2**-7}  # a result's rounding; float32: another order of its sum


def run(
    op: Op, x: Tensor, weight: Any, bias: Tensor | None, device: str, *, activation: str | None = None, **options: Any
) -> Tensor:
    impl = op.named("cuda")
    there = options | {key: value.to(device, copy=True) for key, value in options.items() if isinstance(value, Tensor)}
    weight = (
        QTensor(*(part.to(device) for part in (weight.codes, weight.scales, weight.zeros)), weight.scheme)
        if isinstance(weight, QTensor)
        else weight.to(device)
    )
    y: Tensor = impl(x.to(device), impl.pack(weight, activation), None if bias is None else bias.to(device), **there)
    if "residual" in there:
        assert y.data_ptr() == there["residual"].data_ptr()
    return y.cpu()


def oracle(
    op: Op, x: Tensor, weight: Any, bias: Tensor | None, *, activation: str | None = None, **options: Any
) -> Tensor:
    """The reference, which rounds nothing before the end."""
    dtype = options.pop("dtype", None) or x.dtype
    options = {key: value.clone() if isinstance(value, Tensor) else value for key, value in options.items()}
    y: Tensor = op.named("reference")(x, reference.keep(weight, activation), bias, dtype=F32, **options)
    return y if "residual" in options else y.to(dtype)


def assert_near(got: Tensor, expected: Tensor) -> None:
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert bool(got.isfinite().all())
    assert float((got.float() - expected.float()).abs().max()) <= STEP[got.dtype] * float(expected.float().abs().max())


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 1), (64, 16), (200, 33), (520, 40), (2056, 17)])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8])
@pytest.mark.parametrize("half", [F16, BF16])
def test_few_tokens_stream_dense_weights(
    device: str, half: torch.dtype, tokens: int, inputs: int, outputs: int
) -> None:
    x, weight, bias = torch.randn(tokens, inputs).to(half), torch.randn(outputs, inputs).to(half), torch.randn(outputs)
    expected = oracle(ops.linear_dense, x, weight, bias, dtype=F32)
    assert_near(run(ops.linear_dense, x, weight, bias, device), expected.to(half))
    assert_near(run(ops.linear_dense, x, weight, bias, device, dtype=F32), expected)
    assert_near(
        run(ops.linear_dense, x, weight, None, device, dtype=F32), oracle(ops.linear_dense, x, weight, None, dtype=F32)
    )


def test_the_stream_is_what_runs_for_few_tokens() -> None:
    emulated = emulator.install()
    elementwise.kernel_for.cache_clear()
    weight = torch.randn(32, 64).half()
    for tokens, launched in ((8, ["gemv"]), (9, []), (0, [])):
        emulated.launches.clear()
        run(ops.linear_dense, torch.randn(tokens, 64).half(), weight, None, "cpu")
        assert emulated.launches == launched


def test_tokens_of_a_stream_do_not_depend_on_each_other(device: str) -> None:
    x, weight = torch.randn(8, 520).half(), torch.randn(40, 520).half()
    together = run(ops.linear_dense, x, weight, None, device, dtype=F32)
    assert torch.equal(
        torch.cat([run(ops.linear_dense, row[None], weight, None, device, dtype=F32) for row in x]), together
    )


@pytest.mark.parametrize("tokens", [1, 8, 9, 40])
@pytest.mark.parametrize("half", [F16, BF16])
@pytest.mark.parametrize("activation", [None, *ops.ACTIVATIONS])
def test_dense(device: str, activation: str | None, half: torch.dtype, tokens: int) -> None:
    """Norm in front, gate and residual stream after, for the stream of weights and for the library's product."""
    x, weight, bias = torch.randn(tokens, 72), torch.randn(60, 72).to(half), torch.randn(60)
    norm, given = Norm(torch.rand(72), 1e-5, dtype=half), {"activation": activation}
    normed = elementwise.rms_norm(x.to(device), on(norm, device)).cpu()  # has its own test; it rounds
    whole = oracle(ops.linear_dense, normed, weight, bias, dtype=F32, **given)
    got = run(ops.linear_dense, x, weight, bias, device, norm=on(norm, device), **given)
    assert got.dtype == half
    assert float((got.float() - whole).abs().max()) <= 3 * STEP[half] * float(whole.abs().max())  # gate and up rounded
    assert_near(run(ops.linear_dense, x, weight, bias, device, norm=on(norm, device), dtype=F32, **given), whole)
    stream, x = torch.randn(tokens, whole.shape[1]), x.to(half)
    options = {"residual": stream, "activation": activation}
    assert_near(
        run(ops.linear_dense, x, weight, bias, device, **options), oracle(ops.linear_dense, x, weight, bias, **options)
    )


def test_a_dense_stream_of_columns_and_of_odd_widths(device: str) -> None:
    """Rows apart from each other; rows that 16-byte loads cannot reach."""
    wide, weight = torch.randn(3, 200).half(), torch.randn(20, 64).half()
    assert_near(
        run(ops.linear_dense, wide[:, 8:72], weight, None, device),
        oracle(ops.linear_dense, wide[:, 8:72], weight, None),
    )
    odd = torch.randn(20, 61).half()
    assert_near(
        run(ops.linear_dense, wide[:, :61], odd, None, device), oracle(ops.linear_dense, wide[:, :61], odd, None)
    )


def test_activations_of_another_type_go_to_torch(device: str) -> None:
    x, weight = torch.randn(3, 64), torch.randn(20, 64).half()
    assert_near(run(ops.linear_dense, x, weight, None, device), oracle(ops.linear_dense, x, weight, None))


def on(norm: Norm, device: str) -> Norm:
    return Norm(
        norm.weight.to(device),
        norm.eps,
        None if norm.residual is None else norm.residual.to(device, copy=True),
        norm.dtype,
    )


CODED = [
    (ops.linear_w8a8, INT8), (ops.linear_w8a8, INT8_ASYMMETRIC), (ops.linear_fp8_a8, FLOAT8),
    (ops.linear_fp8_a8, FLOAT8_TENSOR),
]  # fmt: skip


def coded(op: Op, scheme: QuantScheme, outputs: int, inputs: int) -> QTensor:
    return plain(quantize(torch.randn(outputs, inputs) * (torch.rand(outputs, 1) + 0.1), scheme))


@pytest.mark.parametrize(("op", "scheme"), CODED)
@pytest.mark.parametrize("given", [F32, F16, BF16])
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"), [(1, 16, 16), (7, 528, 48), (8, 4112, 16), (9, 80, 32), (33, 64, 2064)]
)
def test_codes(
    device: str, op: Op, scheme: QuantScheme, given: torch.dtype, tokens: int, inputs: int, outputs: int
) -> None:
    x = (torch.randn(tokens, inputs) * 10 ** torch.linspace(-3, 3, tokens)[:, None]).to(given)
    x[-1, 3:] = 0
    weight, bias = coded(op, scheme, outputs, inputs), torch.randn(outputs)
    assert_near(run(op, x, weight, bias, device), oracle(op, x, weight, bias))
    for got, expected in zip(
        run(op, x, weight, None, device, dtype=F32), oracle(op, x, weight, None, dtype=F32), strict=True
    ):
        assert_near(got, expected)  # token by token, whatever its size


@pytest.mark.parametrize(("op", "scheme"), CODED)
def test_a_token_of_codes_is_the_same_among_few_and_many(device: str, op: Op, scheme: QuantScheme) -> None:
    x, weight = torch.randn(20, 272), coded(op, scheme, 48, 272)
    many = run(op, x, weight, None, device)
    few = torch.cat([run(op, part, weight, None, device) for part in x.split((8, 1, 7, 4))])
    if op is ops.linear_w8a8:
        assert torch.equal(few, many)  # integer sums are exact
    else:
        assert_near(few, many)


@pytest.mark.parametrize(("op", "scheme"), CODED)
@pytest.mark.parametrize("half", [F16, BF16])
@pytest.mark.parametrize("activation", [None, *ops.ACTIVATIONS])
@pytest.mark.parametrize(("tokens", "outputs"), [(1, 64), (19, 112)])
def test_codes_with_norm_gate_and_stream(
    device: str, op: Op, scheme: QuantScheme, half: torch.dtype, activation: str | None, tokens: int, outputs: int
) -> None:
    x, weight, bias = torch.randn(tokens, 96).to(half), coded(op, scheme, outputs, 96), torch.randn(outputs)
    before, stream = torch.randn(tokens, 96), torch.randn(tokens, outputs // 2 if activation else outputs)
    norm = Norm(torch.rand(96), 1e-5, before, half)
    there = on(norm, device)
    got = run(op, x, weight, bias, device, norm=there, activation=activation)
    whole = op.named("reference")(x, reference.keep(weight, activation), bias, norm, dtype=F32)
    assert got.dtype == half  # the last bit of a norm may carry an activation over the edge between two codes:
    assert float((got.float() - whole).abs().max()) <= 2e-2 * float(whole.abs().max())
    assert there.residual is not None
    assert torch.equal(there.residual.cpu(), before)  # which the reference has written
    options = {"residual": stream, "activation": activation}
    assert_near(run(op, x, weight, bias, device, **options), oracle(op, x, weight, bias, **options))


def test_no_tokens(device: str) -> None:
    for op, weight in (
        (ops.linear_dense, torch.randn(32, 64).half()),
        (ops.linear_w8a8, coded(ops.linear_w8a8, INT8, 32, 64)),
        (ops.linear_fp8_a8, coded(ops.linear_fp8_a8, FLOAT8, 32, 64)),
    ):
        assert run(op, torch.empty(0, 64).half(), weight, None, device).shape == (0, 32)


@pytest.mark.parametrize(
    ("traits", "reason"),
    [
        ({"group_size": 128}, "group_size 128"),
        ({"in_features": 100}, "multiples of 16"),
        ({"out_features": 24}, "multiples of 16"),
        ({"in_features": 65536}, "at most 32768"),
        ({"bits": 4}, "4 bits"),
    ],
)
def test_refusals(traits: dict[str, int], reason: str) -> None:
    emulator.install()
    given = {"group_size": -1, "in_features": 64, "out_features": 64, "bits": 8} | traits
    for op in (ops.linear_w8a8, ops.linear_fp8_a8):
        assert reason in (op.named("cuda").accepts(**given) or "")


def test_float8_products_need_a_gpu_that_has_them() -> None:
    traits = {"group_size": -1, "in_features": 64, "out_features": 64, "bits": 8}
    emulator.install(capability=(8, 9))
    assert ops.linear_fp8_a8.named("cuda").accepts(**traits) is None
    emulator.install(capability=(8, 0))
    assert "8.9, not 8.0" in (ops.linear_fp8_a8.named("cuda").accepts(**traits) or "")
