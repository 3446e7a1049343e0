"""Linears on packed weights, against float64 products of the dequantized weight and the activations as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmkit.formats.mxfp4 import MXFP4
from lmkit.formats.nvfp4 import NVFP4
from lmkit.kernels import ops
from lmkit.kernels.cuda import elementwise, gemm, gemm_pack, gemm_plan, gemm_table, linear, module
from lmkit.kernels.cuda.gemm_pack import PackedWeight
from lmkit.kernels.cuda.gemm_plan import Plan, Problem
from lmkit.kernels.cuda.gpus import GPUS, gpu_of
from lmkit.kernels.cuda.switches import Switches
from lmkit.kernels.ops import Norm
from lmkit.kernels.reference.elementwise import ACTIVATIONS
from lmkit.layers.outline import WeightKind, packed_outline
from lmkit.qtensor import QTensor, QuantScheme, dequantize, float8_scheme, int_scheme, plain, quantize
from tests import emulator

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
INT4 = int_scheme(4, 128)
SCHEMES = {
    "int4": INT4,
    "int4-32": int_scheme(4, 32),
    "int4-64": int_scheme(4, 64, symmetric=True),
    "int4-256": int_scheme(4, 256),
    "int4-row": int_scheme(4, -1),
    "int8": int_scheme(8, 128),
    "fp8-row": float8_scheme(),
    "fp8-block": float8_scheme(128, 128),
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
}
IN_BOTH_HALVES = "int4", "int8", "fp8-row", "mxfp4", "nvfp4"
SMALL = Plan(1, 1, 1, 4, 4, 1)  # one tile a block, its stages over four warps
WIDE = Plan(2, 2, 2, 2, 3, 2)
ROUNDING = {F16: 2e-3, BF16: 8e-3, F32: 2e-5}


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """What torch.empty gives is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was measured on this device; what is measured now goes with the test."""
    table = gemm_table.Table(tmp_path / "gemm" / "emulated.json", "emulated")
    monkeypatch.setattr(gemm_table, "table", lambda device: table)


def weight(outputs: int, inputs: int, scheme: QuantScheme = INT4, scales: torch.dtype | None = None) -> QTensor:
    q = plain(quantize(torch.randn(outputs, inputs) * torch.rand(outputs, 1), scheme))
    return q if scales is None else QTensor(q.codes, q.scales.to(scales), q.zeros, q.scheme)


def pack(q: QTensor, device: str, activation: str | None = None, *, rounds: bool = False) -> PackedWeight:
    return gemm_pack.pack(q.to(device), activation, rounds=rounds)


def expected(x: Tensor, q: QTensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    y = x.cpu().double() @ dequantize(q).double().t()
    y = y if bias is None else y + bias.cpu().double()
    if activation is None:
        return y
    gate, up = y.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate, up)


def assert_near(y: Tensor, oracle: Tensor) -> None:
    """Within the rounding of y's dtype, relative to the greatest of a row."""
    limit = ROUNDING[y.dtype] * oracle.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    errors = (y.cpu().double() - oracle).abs()
    assert y.shape == oracle.shape
    assert bool((errors <= limit).all()), f"{float((errors / limit).nan_to_num(torch.inf).max())} times too large"


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_packing_loses_nothing(scheme: str, activation: str | None, device: str) -> None:
    q = weight(44, 328, SCHEMES[scheme])
    packed = pack(q, device, activation)
    for dtype in (F16, BF16, F32) if scheme in IN_BOTH_HALVES else (F16,):
        assert torch.equal(gemm_pack.dequantize(packed, dtype).cpu(), dequantize(q).to(dtype))
    part = dequantize(q).view(2, 22, 328)[:, 8:16].reshape(16, 328) if activation else dequantize(q)[16:32]
    assert torch.equal(gemm_pack.dequantize(packed.slice(1, 2), F16).cpu(), part.half())


@pytest.mark.parametrize("scales", [F32, BF16])
def test_scales_of_other_types_are_not_rounded(scales: torch.dtype, device: str) -> None:
    q = weight(16, 128, scales=scales)
    assert torch.equal(gemm_pack.dequantize(pack(q, device), F32).cpu(), dequantize(q))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_formats(scheme: str, device: str) -> None:
    q, bias = weight(72, 520, SCHEMES[scheme]), torch.randn(72, device=device)
    for dtype in (F16, BF16) if scheme in IN_BOTH_HALVES else (F16,):
        x = torch.randn(11, 520, device=device).to(dtype)
        y = gemm.multiply(x, pack(q, device), WIDE, bias)
        assert y.dtype == dtype
        assert_near(y, expected(x, q, bias))
        assert_near(gemm.multiply(x, pack(q, device), WIDE, bias, F32), expected(x, q, bias))


@pytest.mark.parametrize(
    ("tokens", "plan"),
    [
        (1, SMALL),
        (8, SMALL),
        (13, SMALL),  # two blocks of tokens
        (17, Plan(3, 1, 4, 1, 3, 2)),
        (32, Plan(4, 2, 1, 4, 4, 1)),
        (41, Plan(6, 1, 2, 2, 3, 3, False)),
        (64, Plan(8, 2, 4, 1, 3, 2)),
        (67, Plan(8, 2, 4, 1, 3, 5, False)),
    ],
)
def test_numbers_of_tokens(tokens: int, plan: Plan, device: str) -> None:
    q = weight(152, 640)
    x = torch.randn(tokens, 640, device=device).half()
    assert_near(gemm.multiply(x, pack(q, device), plan, dtype=F32), expected(x, q))


@pytest.mark.parametrize("outputs", [1, 16, 17, 46])
@pytest.mark.parametrize("inputs", [8, 120, 128, 136])
def test_tails(outputs: int, inputs: int, device: str) -> None:
    q = weight(outputs, inputs)
    x = torch.randn(3, inputs, device=device).half()
    assert_near(gemm.multiply(x, pack(q, device), SMALL, dtype=F32), expected(x, q))


@pytest.mark.parametrize("plan", [SMALL, WIDE, Plan(2, 2, 2, 2, 3, 1), Plan(2, 2, 2, 2, 3, 2, False)])
@pytest.mark.parametrize("activation", [None, *ops.ACTIVATIONS])
def test_epilogues(plan: Plan, activation: str | None, device: str) -> None:
    """One range of K, several, and x that does not stay."""
    q, bias = weight(88, 1000), torch.randn(88, device=device)
    x = torch.randn(7, 1000, device=device).half()
    packed, oracle = pack(q, device, activation), expected(x, q, bias, activation)
    assert_near(gemm.multiply(x, packed, plan, bias), oracle)
    assert_near(gemm.multiply(x, packed, plan, bias, F32), oracle)
    stream = torch.randn(*oracle.shape, device=device)
    before = stream.cpu().double()
    assert gemm.multiply(x, packed, plan, bias, residual=stream) is stream
    assert_near(stream, before + oracle)
    assert not module.counters(device).any()


def test_order_of_threads_and_blocks_changes_nothing() -> None:
    q, results = weight(160, 1024), []
    x = torch.randn(5, 1024).half()
    for seed in range(4):
        emulator.install(seed)
        results.append(gemm.multiply(x, pack(q, "cpu"), Plan(1, 1, 1, 4, 4, 1), dtype=F32))
    module.BACKENDS.pop("cpu")
    module.counters.cache_clear()
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_huge_activation(dtype: torch.dtype, device: str) -> None:
    q, x = weight(32, 256), torch.randn(4, 256)
    x[2, 37] = 30000.0
    given = x.to(device, dtype)
    y = gemm.multiply(given, pack(q, device), SMALL, dtype=F32)
    assert_near(y, expected(given, q))


def test_zero_scales(device: str) -> None:
    q = weight(32, 256)
    q.scales[:, 1] = 0
    x = torch.randn(2, 256, device=device).half()
    assert_near(gemm.multiply(x, pack(q, device), SMALL, dtype=F32), expected(x, q))
    q.scales[:] = 0
    assert not gemm.multiply(x, pack(q, device), SMALL).any()


def run(op: Any, x: Tensor, packed: PackedWeight, *args: Any, **options: Any) -> Tensor:
    result: Tensor = op.named("cuda")(x, packed, *args, **options)
    return result


def test_op_with_a_norm(device: str) -> None:
    q, stream = weight(48, 256), 3 * torch.randn(3, 256, device=device)
    norm = Norm(torch.rand(256, device=device), 1e-5, dtype=F16)
    normed = stream.cpu() * (stream.cpu().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.cpu()
    y = run(ops.linear_w4a16, stream, pack(q, device), None, norm)
    assert y.dtype == F16
    assert_near(y, expected(normed.half(), q))
    logits = run(ops.linear_w4a16, stream, pack(q, device), None, norm, dtype=F32)
    assert logits.dtype == F32


@pytest.mark.parametrize(
    ("tokens", "plan"),
    [
        (1, SMALL),
        (3, Plan(1, 1, 2, 2, 3, 3)),
        (4, Plan(1, 2, 2, 2, 6, 2)),  # two tiles, ranges of K
    ],
)
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_norms_inside_the_product(tokens: int, plan: Plan, dtype: torch.dtype, device: str) -> None:
    q, stream, bias = weight(152, 1000), 3 * torch.randn(tokens, 1000), torch.randn(152)
    norm = Norm(torch.rand(1000).to(device), 1e-5, dtype=dtype)
    normed = stream * (stream.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.cpu()
    packed = pack(q, device, "silu")
    y = gemm.multiply(stream.to(device), packed, plan, bias.to(device), norm=norm)
    assert y.dtype == dtype
    assert_near(y, expected(normed.to(dtype), q, bias, "silu"))


def test_which_products_have_their_norm_inside(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a few tokens of a float32 stream, unless it is switched off."""
    packed, norm = pack(weight(48, 256), device), Norm(torch.rand(256, device=device), 1e-5, dtype=F16)
    separate: list[int] = []
    rms_norm = elementwise.rms_norm

    def counted(x: Tensor, norm: Norm) -> Tensor:
        separate.append(len(x))
        return rms_norm(x, norm)

    monkeypatch.setattr(elementwise, "rms_norm", counted)
    for tokens in (4, 5):
        run(ops.linear_w4a16, torch.randn(tokens, 256, device=device), packed, None, norm)
    run(ops.linear_w4a16, torch.randn(1, 256, device=device).half(), packed, None, norm)
    assert separate == [5, 1]
    monkeypatch.setattr(gemm, "switches", lambda: Switches(norm=False))
    run(ops.linear_w4a16, torch.randn(2, 256, device=device), packed, None, norm)
    assert separate == [5, 1, 2]


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("activation", [None, *ops.ACTIVATIONS])
def test_many_tokens_take_the_library(
    dtype: torch.dtype, activation: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_table, "LIBRARY_FROM", 4)
    monkeypatch.setattr(linear, "PANEL_BYTES", 2 * 16 * 256 * 2)  # two panels and a bit
    q, bias = weight(88, 256), torch.randn(88, device=device)
    x = torch.randn(5, 256, device=device).to(dtype)
    packed, oracle = pack(q, device, activation), expected(x, q, bias, activation)
    rounded = {F16: 3e-3, BF16: 2e-2, F32: 2e-5}[dtype] * oracle.abs().max()  # the weight is rounded too
    for options in ({}, {"dtype": F32}, {"residual": torch.zeros(oracle.shape, device=device)}):
        y = run(ops.linear_w4a16, x, packed, bias, **options)
        assert y.dtype == (F32 if options else dtype)
        assert float((y.cpu().double() - oracle).abs().max()) < rounded


def test_op_takes_any_x(device: str) -> None:
    q = weight(48, 256, int_scheme(8, 128))
    packed = pack(q, device)
    wide = torch.randn(3, 512, device=device).half()
    assert_near(run(ops.linear_w8a16, wide[:, 256:], packed, None), expected(wide[:, 256:], q))
    odd = torch.randn(3 * 256 + 1, device=device).half()[1:].view(3, 256)
    assert_near(run(ops.linear_w8a16, odd, packed, None), expected(odd, q))
    assert run(ops.linear_w8a16, wide[:0, :256], packed, None, dtype=F32).shape == (0, 48)
    exact = torch.randn(3, 256, device=device)
    assert_near(run(ops.linear_w8a16, exact, packed, None), expected(exact, q))
    stream = torch.zeros(48, 3, device=device).t()
    assert_near(run(ops.linear_w8a16, wide[:, :256], packed, None, residual=stream), expected(wide[:, :256], q))
    assert_near(run(ops.linear_w8a16, wide[:, :256], packed, None, dtype=BF16), expected(wide[:, :256], q))


def test_refusals(device: str) -> None:
    def reason(**traits: Any) -> str | None:
        return ops.linear_w4a16.named("cuda").accepts(**{"bits": 4, "group_size": 128, "in_features": 256, **traits})

    assert reason() is None
    assert "8 bits" in str(reason(bits=8))
    assert "group_size 48" in str(reason(group_size=48))
    assert "in_features 100" in str(reason(in_features=100))


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("scheme", ["int4", "int4-32", "int8", "fp8-row"])
def test_layout_follows_from_shapes(scheme: str, activation: str | None) -> None:
    implementation = ops.linear_w4a16.named("cuda")
    q = weight(700, 136, SCHEMES[scheme])
    kind = WeightKind(str(q.scales.dtype).removeprefix("torch."), q.scheme)
    outline, packed = packed_outline(implementation, kind, (700, 136), activation), gemm_pack.pack(q, activation)
    assert (outline.codes.shape, outline.params.shape) == (packed.codes.shape, packed.params.shape)
    assert (outline.out_features, outline.num_results) == (packed.out_features, packed.num_results)


@pytest.mark.parametrize("limit", sorted({gpu.block_shared for gpu in GPUS.values()}))
def test_every_problem_has_a_plan(limit: int) -> None:
    for tiles, stages in [(384, 32), (256, 32), (1792, 32), (256, 112), (8016, 32), (1, 1), (8, 7), (512, 224)]:
        for tokens in (1, 3, 16, 57, 64, 96, 255):
            problem = Problem(tokens, tiles, stages, 1072)
            (plan,) = gemm_plan.best(problem, 132, limit)
            assert gemm_plan.problem_with(plan, problem, limit) is None
            assert 0 < problem.workers(plan, 132) <= problem.row_blocks(plan)
            assert problem.ranges(plan) * plan.units * plan.warps_k >= stages


def test_impossible_plans_are_found() -> None:
    problem, limit = Problem(8, 16, 32, 1072), min(gpu.block_shared for gpu in GPUS.values())
    assert gemm_plan.problem_with(SMALL, problem, limit) is None
    for plan in (
        Plan(0, 1, 1, 4, 4, 1), Plan(1, 1, 1, 4, 2, 1), Plan(1, 3, 1, 4, 4, 1), Plan(1, 1, 1, 32, 4, 1),
        Plan(8, 2, 4, 4, 4, 1), Plan(1, 1, 1, 4, 400, 1),
    ):  # fmt: skip
        assert gemm_plan.problem_with(plan, problem, limit) is not None, plan


def tuned(device: str, costs: dict[int, float]) -> gemm_table.Entry:
    """Of 3 tokens; the plans' times are in `costs` by their order."""
    times = iter(sorted(costs))
    packed = pack(weight(32, 256), device)
    entries = gemm_table.tune(
        [packed], F16, linear.library, buckets=(4,), num_plans=len(costs),
        measure=lambda launch, copies: costs[next(times)] + 0 * float(launch(copies - 1).sum()),
    )  # fmt: skip
    return entries[0]


def test_tuning_is_saved_and_used(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_table, "COLD_BYTES", 1 << 14)
    entry = tuned(device, {0: 3.0, 1: 1.0, 2: 2.0})
    packed = pack(weight(32, 256), device)
    problem = gemm.problem_of(4, packed)
    limit = gpu_of(module.backend(device).capability()).block_shared
    assert entry.plan == gemm_plan.best(problem, module.backend(device).num_sms(), limit, 3)[1]
    table = gemm_table.table(device)
    again = gemm_table.Table(table.path, table.device)
    assert again.entries == table.entries
    monkeypatch.setattr(gemm_table, "table", lambda device: again)
    assert gemm_table.choose(3, packed, F16) == entry.plan
    assert again.find(entry.key, 5) is None
    again.add(gemm_table.Entry(entry.key, 2, None, 1.0))
    assert gemm_table.choose(2, packed, F16) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"\xff" + data,
        lambda data: data.replace(b'"tokens": 4', b'"tokens": "4"'),
        lambda data: data.replace(b'"version": 2', b'"version": 1'),
        lambda data: data.replace(b"emulated", b"other"),
        lambda data: json.dumps(json.loads(data) | {"more": 1}).encode(),
    ],
)
def test_damaged_table_is_ignored(damage: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "table.json"
    table = gemm_table.Table(path, "emulated")
    table.add(gemm_table.Entry(gemm_table.Key(32, 256, 4, False, False, 128, "float16"), 4, SMALL, 1.0))
    table.save()
    assert gemm_table.Table(path, "emulated").entries == table.entries
    data = path.read_bytes()
    path.write_bytes(damage(data))
    assert path.read_bytes() != data
    with caplog.at_level("WARNING", logger="lmkit"):
        assert not gemm_table.Table(path, "emulated").entries
    assert "is not used" in caplog.text


def test_kernels_of_every_number_of_tokens_are_known(device: str) -> None:
    packed = pack(quantize(torch.randn(64, 256), int_scheme(4, 128)), device)
    known = set(gemm_table.kernels(packed, F16, 100))
    for tokens in range(1, 101):
        plan = gemm_table.choose(tokens, packed, F16)
        assert plan is not None
        assert set(gemm.kernels_of(packed, plan, F16, tokens)) <= known
    assert len(known) <= 20, "few kernels for any number of tokens"
