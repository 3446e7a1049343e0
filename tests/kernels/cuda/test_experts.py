"""Mixtures of experts on a GPU: who computes what, and products with many experts' weights, against references."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import lmkit.kernels  # noqa: F401  (registers)
from lmkit.formats.nvfp4 import NVFP4
from lmkit.kernels import ops
from lmkit.kernels.cuda import coded_rows, elementwise, experts, gemm_experts, gemm_pack, module, variants
from lmkit.kernels.cuda.gemm_experts import ExpertTable
from lmkit.kernels.cuda.gemm_plan import SCRATCH_BYTES
from lmkit.kernels.ops import Norm, Places, Routing
from lmkit.layers.blocks.moe import GPU_ROWS
from lmkit.models.shard import Shard
from lmkit.qtensor import QTensor, dequantize, int_scheme, plain, quantize
from tests import emulator
from tests.kernels import planes
from tests.kernels.cuda import test_int8_rows
from tests.kernels.cuda.test_linear import assert_near, expected, pack
from tests.kernels.planes import random_weight
from tests.kernels.test_experts import ROUTINGS

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """What torch.empty gives is NaN, or the greatest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("count", [1, 21])
def test_route(name: str, count: int, device: str) -> None:
    routing, num_experts, has_bias = ROUTINGS[name]
    logits = torch.randn(count, num_experts + 1)[:, :num_experts] * 3
    bias = torch.randn(num_experts) if has_bias else None
    wanted, chosen = ops.route.named("reference")(logits, routing, bias)
    weights, numbers = experts.route(logits.to(device), routing, None if bias is None else bias.to(device))
    assert torch.equal(numbers.cpu(), chosen)
    torch.testing.assert_close(weights.cpu(), wanted)


@pytest.mark.parametrize("value", [0.0, -1e4, torch.nan])
def test_equal_and_missing_scores_choose_the_lower_numbers(value: float, device: str) -> None:
    """Tokens that pad a captured step may have any scores, and their experts must exist."""
    for routing in (Routing(3, True, False, 1, 1, 2, 1.0), Routing(3, True, True, 4, 2, 2, 1.0)):
        _, numbers = experts.route(torch.full((2, 40), value, device=device), routing, None)
        assert numbers.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize(("count", "per_token", "num_experts"), [(1, 3, 8), (37, 2, 41), (70, 8, 130), (3, 1, 1)])
def test_places_and_sums(count: int, per_token: int, num_experts: int, device: str) -> None:
    scores = torch.randn(count, num_experts) + torch.linspace(0, 4, num_experts)
    numbers = scores.topk(per_token).indices.sort(-1).values
    held = range(num_experts // 3, num_experts)
    want = ops.expert_places.named("reference")(numbers, num_experts, held)
    got = experts.expert_places(numbers.to(device), num_experts, held)
    used = 1 + 3 * int(want.active[0])
    assert torch.equal(got.active[:used].cpu(), want.active[:used])
    assert torch.equal(got.tokens.cpu(), want.tokens)
    assert torch.equal(got.of_token.cpu(), want.of_token)

    weights, logits = torch.rand(count, per_token), torch.randn(count, 3)
    for width in (40, 33):
        y, shared = torch.randn(count * per_token, width), torch.randn(count, width)
        out, sums = torch.empty(count, width, device=device), torch.empty(count, width)
        experts.sum_places(y.to(device), weights.to(device), got, out)
        ops.sum_places.named("reference")(y, weights, want, sums)
        torch.testing.assert_close(out.cpu(), sums)
        for dtype, logit in ((F32, None), (F16, logits[:, 2:]), (BF16, logits[:, 1:2])):
            experts.add_shared(out, shared.to(device, dtype), None if logit is None else logit.to(device))
            ops.add_shared.named("reference")(sums, shared.to(dtype), logit)
            torch.testing.assert_close(out.cpu(), sums)


def placed(count: int, per_token: int, num_experts: int, device: str) -> Places:
    """Few experts have most tokens, and the last one has none."""
    scores = torch.randn(count, num_experts) + torch.linspace(1, -1, num_experts)
    scores[:, 0], scores[:, -1] = 3, -100
    return experts.expert_places(
        scores.topk(per_token).indices.sort(-1).values.to(device), num_experts, range(num_experts)
    )


def check(
    weights: list[QTensor],
    biases: list[Any],
    x: Tensor,
    places: Places,
    activation: str | None,
    by_token: bool,
    *,
    rounds: bool = False,
) -> None:
    packed, oracle = (test_int8_rows.packed, test_int8_rows.expected) if rounds else (pack, expected)
    parts = [(packed(q, x.device.type, activation), bias) for q, bias in zip(weights, biases, strict=True)]
    table = ExpertTable.of(parts)
    assert table is not None
    y = gemm_experts.multiply(x, places, table, by_token)
    assert y.dtype == (x.dtype if by_token else F32)
    for expert, first, end in places.active[1:].view(-1, 3)[: int(places.active[0])].tolist():
        rows = x[places.tokens[first:end]] if by_token else x[first:end]
        assert_near(y[first:end], oracle(rows, weights[expert], biases[expert], activation))
    assert not module.counters(x.device.type).any()


SCHEMES = {"int4": int_scheme(4, 128), "int4-32": int_scheme(4, 32), "int8": int_scheme(8, 128), "nvfp4": NVFP4}


@pytest.mark.parametrize("count", [1, 5, 45])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_are_those_of_each_expert(scheme: str, count: int, device: str) -> None:
    """Gate and up of tokens, then down of places; experts with none, one and several blocks of rows."""
    dtype, num_experts, per_token = BF16 if scheme == "int4-32" else F16, 6, 2
    places = placed(count, per_token, num_experts, device)
    up = [plain(quantize(torch.randn(2 * 24, 264), SCHEMES[scheme])) for _ in range(num_experts)]
    biases = [torch.randn(48, device=device) if scheme == "int8" else None for _ in up]
    check(up, biases, torch.randn(count, 264, device=device).to(dtype), places, "silu", by_token=True)
    down = [plain(quantize(torch.randn(40, 136), SCHEMES[scheme])) for _ in range(num_experts)]
    x = torch.randn(count * per_token, 136, device=device).to(dtype)
    check(down, [None] * num_experts, x, places, None, by_token=False)


@pytest.mark.parametrize("name", ["Q4_K", pytest.param("Q6_K", marks=pytest.mark.exhaustive)])
def test_k_quants_whole_and_of_ranks(name: str, device: str) -> None:
    """Offsets, factors and codes of 6 bits: each expert's are its own, and ranks of --tp have rows of gate and up, and
    whole super-groups of the inputs of down."""
    up, down = ([random_weight(planes.SCHEMES[name], *size) for _ in range(4)] for size in ((2 * 24, 512), (40, 512)))
    places = placed(5, 2, 4, device)
    check(up, [None] * 4, torch.randn(5, 512, device=device).half(), places, "silu", by_token=True)
    x, none = torch.randn(10, 512, device=device).half(), [None] * 4
    ranks = [Shard(rank, tp=2) for rank in range(2)]
    parts = [[shard._columns("mlp.down", q) for q in down] for shard in ranks]
    for part, of_rank in zip(x.chunk(2, dim=1), parts, strict=True):
        check(of_rank, none, part.contiguous(), places, None, by_token=False)
    whole = [torch.cat([dequantize(part) for part in of_expert], dim=1) for of_expert in zip(*parts, strict=True)]
    assert all(map(torch.equal, whole, map(dequantize, down)))
    rows = [dequantize(shard.rows(up[0], slice(24 * rank, 24 * rank + 24))) for rank, shard in enumerate(ranks)]
    assert torch.equal(torch.cat(rows), dequantize(up[0]))


@pytest.mark.parametrize(("scheme", "count"), [("int4", 1), ("int4", 45), ("int4-32", 5)])
def test_rounded_inputs(scheme: str, count: int, device: str) -> None:
    """As above, with int8 inputs: a token is rounded once, and its experts read its codes wherever their rows begin."""
    dtype, num_experts, per_token = BF16 if scheme == "int4-32" else F16, 6, 2
    places = placed(count, per_token, num_experts, device)
    up = [quantize(torch.randn(2 * 24, 264), SCHEMES[scheme]) for _ in range(num_experts)]
    x = test_int8_rows.inputs(count, 264, device, dtype)
    check(up, [None] * num_experts, x, places, "silu", by_token=True, rounds=True)
    down = [quantize(torch.randn(40, 136), SCHEMES[scheme]) for _ in range(num_experts)]
    biases = [torch.randn(40, device=device) for _ in down]
    x = test_int8_rows.inputs(count * per_token, 136, device, dtype)
    check(down, biases, x, places, None, by_token=False, rounds=True)


def test_weights_of_eight_bits_take_the_values_of_rounded_inputs(device: str) -> None:
    weights = [quantize(torch.randn(40, 136), SCHEMES["int8"]) for _ in range(6)]
    x, places = test_int8_rows.inputs(10, 136, device), placed(5, 2, 6, device)
    tables = [ExpertTable.of([(pack(q, device, rounds=rounds), None) for q in weights]) for rounds in (True, False)]
    rounding, exact = (table for table in tables if table is not None)
    rounded = coded_rows.rounded(x, rounding.packed)
    assert not torch.equal(rounded, x)
    got = gemm_experts.multiply(x, places, rounding, False)
    assert torch.equal(got, gemm_experts.multiply(rounded, places, exact, False))


@pytest.mark.parametrize("units", [1, 3])
def test_ranges_and_more_experts_than_a_warp_looks_at(units: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of several ranges of K, which the last block of a row block adds up."""
    chosen = gemm_experts.plan_for

    def plan_for(*args: Any) -> Any:
        problem, _ = chosen(*args)
        return problem, gemm_experts.Plan(1, 1, 1, 2, 3, units, per_sm=2)

    monkeypatch.setattr(gemm_experts, "plan_for", plan_for)
    weights = [quantize(torch.randn(16, 640), int_scheme(4, 128)) for _ in range(70)]
    places = placed(90, 3, 70, device)
    assert int(places.active[0]) > 32
    assert max(end - first for _, first, end in places.active[1:].view(-1, 3).tolist()[:2]) > 8
    check(weights, [None] * 70, torch.randn(90, 640, device=device).half(), places, None, by_token=True)


def test_plans_hold_every_row() -> None:
    """The grid has a block for every row, however the rows fall on experts."""
    for num_places, num_experts, rows in ((1, 8, 8), (17, 2, 8), (64, 128, 8), (4096, 8, 64)):
        counts = torch.zeros(num_experts, dtype=torch.int64)
        counts[: min(num_experts, num_places)] = 1
        counts[0] += num_places - counts.sum()
        worst = [counts, torch.bincount(torch.randint(num_experts, (num_places,)), minlength=num_experts)]
        for each in worst:
            assert sum(-(-int(n) // rows) for n in each) <= gemm_experts.num_blocks(num_places, num_experts, rows)


def test_kernels_that_overlap_wait() -> None:
    """Rows, their order and their experts are read after the wait."""
    emulator.install(seed=5, overlap=True)
    try:
        normed = elementwise.rms_norm(torch.randn(18, 256), Norm(torch.rand(256), 1e-5, dtype=F16))
        logits = torch.randn(9, 8)
        weights, numbers = experts.route(logits, Routing(2, True, False, 1, 1, 2, 1.0), None)
        places = experts.expert_places(numbers, 8, range(8))
        table = ExpertTable.of([(gemm_pack.pack(quantize(torch.randn(32, 256), int_scheme(4, 128))), None)] * 8)
        assert table is not None
        out = torch.empty(9, 32)
        experts.sum_places(gemm_experts.multiply(normed, places, table, False), weights, places, out)
        experts.add_shared(out, normed[:9, :32], logits[:, :1])
        assert out.isfinite().all()
    finally:
        module.BACKENDS.pop("cpu", None)
        module.counters.cache_clear()


def test_the_memory_plan_knows_the_limits() -> None:
    assert gemm_experts.OF_EXPERTS.max_rows == GPU_ROWS


def test_sums_of_ranges_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtral's down, whose fastest plan by estimate has more."""
    monkeypatch.setitem(module.BACKENDS, "meta", variants.Recorder())
    q = QTensor(
        torch.empty(4096, 14336, dtype=torch.uint8, device="meta"), torch.empty(4096, 112, dtype=F16, device="meta"),
        torch.empty(4096, 112, dtype=torch.uint8, device="meta"), int_scheme(4, 128),
    )  # fmt: skip
    packed = gemm_pack.pack(q)

    def sums(limit: int) -> int:
        monkeypatch.setattr(gemm_experts, "SCRATCH_BYTES", limit)
        problem, plan = gemm_experts.plan_for(packed, F16, 2048, 8)
        return 4 * 2048 * 4096 * problem.ranges(plan) if problem.ranges(plan) > 1 else 0

    assert sums(1 << 40) > SCRATCH_BYTES >= sums(SCRATCH_BYTES)
