"""RMSNorm, row codes, embedding, gated activation and angles against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lmkit.attention_spec import Growth
from lmkit.kernels import ops
from lmkit.kernels.cuda import elementwise
from lmkit.kernels.ops import Norm
from lmkit.kernels.reference import elementwise as reference
from lmkit.kernels.reference.linear import quantize_activations, round_to_e4m3

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
EPSILON = {F32: 1e-6, F16: 2**-10, BF16: 2**-7}  # of a value: one step of its type (16 bits), a few of float32


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is NaN: what a kernel does not write is seen."""
    empty = torch.empty

    def filled(*size: int, **options: object) -> Tensor:
        tensor: Tensor = empty(*size, **options)  # type: ignore[call-overload]
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(77)

    monkeypatch.setattr(torch, "empty", filled)


def assert_near(got: Tensor, expected: Tensor) -> None:
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    got, expected, step = got.cpu().float(), expected.cpu().float(), EPSILON[got.dtype]
    error = ((got - expected).abs() - 1e-30) / expected.abs().clamp(min=1e-6 * float(expected.abs().amax()))
    assert bool((error <= step).all()), float(error.max())


def make_norm(columns: int, device: str, **options: object) -> Norm:
    return Norm(torch.randn(columns).to(device), 1e-5, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("columns", [1, 7, 64, 130, 515, 1032, 4104])
@pytest.mark.parametrize(("given", "result"), [(F32, F16), (F32, BF16), (BF16, BF16), (F16, F32), (F32, F32)])
def test_rms_norm(device: str, columns: int, given: torch.dtype, result: torch.dtype) -> None:
    x = (torch.randn(11, columns) * 10 ** torch.linspace(-3, 3, 11)[:, None]).to(given)
    norm = make_norm(columns, "cpu", dtype=result)
    got = elementwise.rms_norm(x.to(device), Norm(norm.weight.to(device), norm.eps, dtype=result))
    assert_near(got, reference.rms_norm(x, norm))


@pytest.mark.parametrize("columns", [1, 7, 64, 515, 4104])
@pytest.mark.parametrize(("given", "result"), [(F32, F16), (BF16, BF16), (F32, F32)])
def test_layer_norm(device: str, columns: int, given: torch.dtype, result: torch.dtype) -> None:
    """Against float64: rows whose mean is far from 0 lose digits in float32, here and in the reference."""
    x = (torch.randn(11, columns) + torch.linspace(-9, 9, 11)[:, None]).to(given)
    weight, bias = torch.randn(columns), torch.randn(columns)
    norm = Norm(weight.to(device), 1e-5, dtype=result, bias=bias.to(device))
    wanted = torch.nn.functional.layer_norm(x.double(), (columns,), weight.double(), bias.double(), 1e-5)
    got = elementwise.rms_norm(x.to(device), norm).cpu()
    torch.testing.assert_close(got.double(), wanted.to(result).double(), rtol=2 * EPSILON[result], atol=3e-5)


def test_codes_and_sums_of_a_layer_norm(device: str) -> None:
    x, stream = torch.randn(3, 264).half(), torch.randn(3, 264)
    weight, bias = torch.randn(264).to(device), torch.randn(264).to(device)
    norm = Norm(weight, 1e-5, stream.to(device, copy=True), F16, bias)
    got = elementwise.quantize_rows(x.to(device), torch.int8, norm)
    y = elementwise.rms_norm((x + stream).to(device), Norm(weight, 1e-5, None, F16, bias))
    assert torch.equal(got.codes.cpu(), expected_codes(y.cpu(), torch.int8)[0])
    assert norm.residual is not None
    assert torch.equal(norm.residual.cpu(), x + stream)


@pytest.mark.parametrize("columns", [7, 64, 520])
@pytest.mark.parametrize(("given", "stream"), [(F16, F32), (BF16, F32), (F16, F16), (BF16, BF16), (F32, F32)])
def test_a_residual_stream_gets_the_sum(device: str, columns: int, given: torch.dtype, stream: torch.dtype) -> None:
    x, residual, norm = torch.randn(5, columns).to(given), torch.randn(5, columns).to(stream), make_norm(columns, "cpu")
    there = residual.to(device, copy=True)
    got = elementwise.rms_norm(x.to(device), Norm(norm.weight.to(device), norm.eps, there))
    assert_near(got, reference.rms_norm(x, Norm(norm.weight, norm.eps, residual)))
    assert torch.equal(there.cpu(), residual)  # which the reference has written


@pytest.mark.parametrize(("dim", "first"), [(16, 1), (128, 2), (24, 1), (7, 3)])
def test_heads_inside_a_wider_tensor(device: str, dim: int, first: int) -> None:
    whole = torch.randn(9, 7, dim).bfloat16()
    norm = make_norm(dim, "cpu")
    heads = whole.to(device)[:, first : first + 3]
    assert_near(
        elementwise.rms_norm(heads, Norm(norm.weight.to(device), 1e-5)),
        reference.rms_norm(whole[:, first : first + 3], norm),
    )


def test_rows_that_begin_anywhere(device: str) -> None:
    """Columns of a wider tensor, the first one not at a multiple of 16 bytes; a stream whose rows are apart."""
    x, stream, norm = torch.randn(4, 64).half(), torch.randn(4, 80), make_norm(64, "cpu", dtype=F16)
    wide, there = torch.zeros(4, 67).half().to(device), stream.to(device, copy=True)
    wide[:, 3:] = x.to(device)
    got = elementwise.rms_norm(wide[:, 3:], Norm(norm.weight.to(device), 1e-5, there[:, 8:72], F16))
    assert_near(got, reference.rms_norm(x, Norm(norm.weight, 1e-5, stream[:, 8:72], F16)))
    assert torch.equal(there.cpu(), stream)


@pytest.mark.parametrize("columns", [96, 4104])
def test_a_rows_norm_does_not_depend_on_the_others(device: str, columns: int) -> None:
    x, norm = torch.randn(19, columns).to(device), make_norm(columns, device, dtype=BF16)
    together = elementwise.rms_norm(x, norm)
    assert torch.equal(torch.cat([elementwise.rms_norm(row[None], norm) for row in x.unbind()]), together)


def expected_codes(y: Tensor, codes: torch.dtype) -> tuple[Tensor, Tensor]:
    integers, scales = (quantize_activations if codes == torch.int8 else round_to_e4m3)(y)
    return integers.to(codes), scales[:, 0]


def edge_rows(columns: int) -> Tensor:
    """Ordinary rows, a row of zeros, halves between two codes, an outlier, tiny and huge rows."""
    x = torch.randn(9, columns)
    x[1] = 0
    x[2] = torch.arange(columns) % 255 / 2 - 60
    x[2, 0] = 127
    x[3, -1] = 1e4
    x[4] *= 1e-6
    x[5] *= 1e4
    x[6] = -3
    return x


@pytest.mark.parametrize("columns", [1, 7, 130, 512, 515])
@pytest.mark.parametrize("given", [F32, F16, BF16])
@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
def test_codes_are_the_reference_s(device: str, columns: int, given: torch.dtype, codes: torch.dtype) -> None:
    x = edge_rows(columns).to(given)
    got = elementwise.quantize_rows(x.to(device), codes, min_rows=12)
    expected, scales = expected_codes(x, codes)
    assert got.codes.shape == (12, columns)
    assert torch.equal(got.codes[:9].cpu().view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(got.scales[:9].cpu(), scales)
    if codes == torch.int8:
        assert torch.equal(got.sums[:9].cpu(), expected.sum(1).int())


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("half", [F16, BF16])
def test_codes_of_a_norm_are_those_of_its_rounded_result(device: str, half: torch.dtype, codes: torch.dtype) -> None:
    x, stream, norm = torch.randn(6, 264).to(half).to(device), torch.randn(6, 264).to(device), make_norm(264, device)
    copy = stream.clone()
    y = elementwise.rms_norm(x, Norm(norm.weight, 1e-5, copy, half))
    got = elementwise.quantize_rows(x, codes, Norm(norm.weight, 1e-5, stream, half))
    expected, scales = expected_codes(y.cpu(), codes)
    assert torch.equal(got.codes.cpu().view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(got.scales.cpu(), scales)
    assert torch.equal(stream, copy)


@pytest.mark.parametrize("columns", [elementwise.WIDTH * n for n in (512, 1024, 2048, 4096, 4097)])
def test_as_many_columns_as_there_may_be(device: str, columns: int) -> None:
    """Up to the most that stay in registers, and one vector more."""
    x, norm = torch.randn(2, columns), make_norm(columns, "cpu", dtype=F16)
    assert_near(
        elementwise.rms_norm(x.to(device), Norm(norm.weight.to(device), 1e-5, dtype=F16)), reference.rms_norm(x, norm)
    )
    if columns > elementwise.MAX_COLUMNS:
        return
    got = elementwise.quantize_rows(x.to(device), torch.int8)
    expected, _ = expected_codes(x, torch.int8)
    assert torch.equal(got.codes.cpu(), expected)
    assert torch.equal(got.sums.cpu(), expected.sum(1).int())


def test_no_rows(device: str) -> None:
    assert elementwise.rms_norm(torch.empty(0, 16, device=device), make_norm(16, device)).shape == (0, 16)
    assert elementwise.gated_activation(torch.empty(0, 16, device=device), "silu").shape == (0, 8)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("columns", [1, 30, 64, 2056])
def test_embedding(device: str, columns: int, dtype: torch.dtype) -> None:
    table, rows = torch.randn(40, columns).to(dtype), torch.randint(40, (9,))
    got = elementwise.embedding(table.to(device), rows.to(device))
    assert got.dtype == F32
    assert torch.equal(got.cpu(), table[rows].float())
    scaled = elementwise.embedding(table.to(device), rows.to(device), 55.5)
    assert torch.equal(scaled.cpu(), table[rows].float() * 55.5)


@pytest.mark.parametrize("columns", [1, 30, 64, 2056])
def test_add_positions(device: str, columns: int) -> None:
    x, table, positions = torch.randn(9, columns), torch.randn(40, columns), torch.randint(40, (9,)).int()
    elementwise.add_positions(there := x.to(device, copy=True), table.to(device), positions.to(device))
    assert torch.equal(there.cpu(), x + table[positions.long()])


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 30), (5, 64), (2, 2056)])
def test_ungated_activations(device: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    x[0, 0] = float("nan")
    wide = x.float()
    every = {"relu": wide.relu(), "gelu": functional.gelu(wide), "relu2": wide.relu().square()}
    for activation, want in ((name, each.to(dtype)) for name, each in every.items()):
        got = elementwise.ungated_activation(there := x.to(device, copy=True), activation)
        assert got is there
        near = 0 if activation != "gelu" else max(torch.finfo(dtype).eps, 1e-6)
        torch.testing.assert_close(got.cpu(), want, rtol=near, atol=near, equal_nan=True)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("dim", [6, 64])
def test_grown_queries(device: str, dim: int, dtype: torch.dtype) -> None:
    q, growth = torch.randn(6, 4 * dim).to(dtype)[:, dim:].unflatten(1, (3, dim)), Growth(0.3, 7, 1)
    positions = torch.tensor([0, 5, 6, 13, 400, 90000]).int()
    got = elementwise.grown_queries(q.to(device), positions.to(device), growth)
    want = (q.double() * (1 + 0.3 * ((positions.double() + 1) / 7).floor().log1p())[:, None, None]).to(dtype)
    torch.testing.assert_close(got.cpu(), want, rtol=max(torch.finfo(dtype).eps, 1e-6), atol=0)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("columns", [1, 30, 515])
def test_gather_columns(device: str, columns: int, dtype: torch.dtype) -> None:
    x, order = torch.randn(5, columns + 3).to(dtype)[:, :columns], torch.randperm(columns).int()
    got = elementwise.gather_columns(x.to(device), order.to(device))
    assert torch.equal(got.cpu(), x[:, order])


@pytest.mark.parametrize("shape", [(1, 5), (3, 2056)])
def test_softcap(device: str, shape: tuple[int, int]) -> None:
    x = torch.randn(shape) * 40
    x[0, :4] = torch.tensor([0.0, 1e-6, -1e30, 1e30])
    got = elementwise.softcap(there := x.to(device, copy=True), 30.0)
    assert got is there
    torch.testing.assert_close(got.cpu(), reference.softcap(x, 30.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("columns", [1, 7, 64, 2056])
@pytest.mark.parametrize("name", ops.ACTIVATIONS)
def test_gated_activation(device: str, columns: int, dtype: torch.dtype, name: str) -> None:
    """In float64: the formula of gelu_tanh loses digits in float32, where 1 + tanh is small."""
    gate_up = (torch.randn(3, 2 * columns) * 40).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    wanted = reference.ACTIVATIONS[name](gate, up).to(dtype)
    got = elementwise.gated_activation(gate_up.to(device), name).cpu()
    # Where 1 + tanh vanishes, a float32 keeps a tail that float64 rounds to 0: far below a step of x * up.
    floor = 1e-9 * float((gate * up).abs().max())
    torch.testing.assert_close(got.double(), wanted.double(), rtol=4 * EPSILON[dtype], atol=floor)


def test_angles_of_far_positions(device: str) -> None:
    positions = torch.tensor([0, 1, 77, 4095, 131071, 1048575]).int()
    inv_freq = 1 / 5e5 ** torch.linspace(0, 1, 20)
    got = elementwise.rope_angles(positions.to(device), inv_freq.to(device), 1.3)
    angles = (positions[:, None].float() * inv_freq).double()  # rounded to float32, as the reference has it
    for part, exact in zip(got, (angles.cos(), angles.sin()), strict=True):
        assert part.dtype == F32
        assert float((part.cpu().double() - 1.3 * exact).abs().max()) < 4e-7
