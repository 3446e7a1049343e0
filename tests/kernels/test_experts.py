"""Mixtures of experts: the choice of experts, and products with the weights of many of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lmkit.kernels  # noqa: F401  (registers)
from lmkit.kernels import ops
from lmkit.kernels.cpu import dense, isa, quantized, tiles
from lmkit.kernels.ops import Places, Routing
from lmkit.kernels.registry import Implementation
from lmkit.qtensor import float8_scheme, int_scheme, quantize

SOFTMAX = Routing(3, True, False, 1, 1, 2, 1.0)
ROUTINGS = {
    "softmax": (SOFTMAX, 7, False),
    "not normalized": (Routing(2, False, False, 1, 1, 2, 1.5), 6, False),
    "one": (Routing(1, True, False, 1, 1, 2, 1.0), 2, False),
    "all": (Routing(5, True, False, 1, 1, 2, 1.0), 5, False),
    "sigmoid": (Routing(8, True, True, 1, 1, 2, 2.5), 128, True),
    "two best of a group": (Routing(3, True, True, 4, 2, 2, 1.0), 8, True),
    "best of a group": (Routing(6, True, False, 8, 3, 1, 16.0), 64, False),
}


def placed(logits: Tensor, routing: Routing, held: range | None = None) -> tuple[Tensor, Places]:
    weights, experts = ops.route.select("cpu")(logits, routing, None)
    num = logits.shape[1]
    return weights, ops.expert_places.select("cpu")(experts, num, range(num) if held is None else held)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("count", [0, 1, 150])
def test_route(name: str, count: int) -> None:
    routing, num_experts, has_bias = ROUTINGS[name]
    torch.manual_seed(3)
    logits = torch.randn(count, num_experts + 1)[:, :num_experts] * 3
    bias = torch.randn(num_experts) if has_bias else None
    weights, experts = ops.route.select("cpu")(logits, routing, bias)
    expected, chosen = ops.route.named("reference")(logits, routing, bias)
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("routing", [SOFTMAX, Routing(3, True, True, 4, 2, 2, 1.0)])
def test_of_equal_experts_the_lower_numbers_win_and_no_score_gives_nan(routing: Routing) -> None:
    for value in (0.0, -1e4):
        weights, experts = ops.route.select("cpu")(torch.full((2, 8), value), routing, None)
        assert experts.tolist() == [[0, 1, 2]] * 2
        assert weights.isfinite().all()


@pytest.mark.parametrize("held", [range(41), range(9, 23)])
@pytest.mark.parametrize("count", [1, 2, 100])
def test_places_and_sums(count: int, held: range) -> None:
    torch.manual_seed(4)
    logits, shared = torch.randn(count, 41), torch.randn(count, 33)
    weights, places = placed(logits, SOFTMAX, held)
    _, experts = ops.route.named("reference")(logits, SOFTMAX, None)
    expected = ops.expert_places.named("reference")(experts, 41, held)
    used = 1 + 3 * int(places.active[0])
    assert torch.equal(places.active[:used], expected.active[:used])
    assert places.active.shape == expected.active.shape
    assert torch.equal(places.tokens, expected.tokens)
    assert torch.equal(places.of_token, expected.of_token)

    y, got, wanted, in_turns = torch.randn(3 * count, 33), *(torch.full((count, 33), v) for v in (7.0, 7.0, 0.0))
    ops.sum_places.select("cpu")(y, weights, places, got)
    ops.sum_places.named("reference")(y, weights, places, wanted)
    torch.testing.assert_close(got, wanted)
    for of_token, factors in zip(places.of_token.unbind(1), weights.unbind(1), strict=True):
        ops.add_rows.select("cpu")(in_turns, torch.arange(count), y[of_token], factors)
    assert torch.equal(in_turns, got)
    for logit in (None, logits[:, 40:]):
        ops.add_shared.select("cpu")(got, shared, logit)
        ops.add_shared.named("reference")(wanted, shared, logit)
        torch.testing.assert_close(got, wanted)


def implementations() -> list[Any]:
    found: list[tuple[str, Implementation, Any]] = []
    for name, level in isa.LEVELS.items():
        level = isa.named(name + isa.EMULATED) if isa.obstacle(level) else level
        found += [(f"{level.name}-w{bits}a8", quantized.implementation(level, bits), bits) for bits in (4, 8)]
    host = isa.host()
    codes = {tiles.CODES4: 4, tiles.CODES8: 8, tiles.FLOAT8: "float8"}
    found += [(f"{kind}", dense.codes_implementation(host, kind), value) for kind, value in codes.items()]
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    found += [(str(dtype), dense.dense_implementation(host), dtype) for dtype in dtypes]
    long = [pytest.mark.exhaustive]  # 8 bits by an emulated processor, which has the loop of 4 bits
    return [
        pytest.param(impl, kind, id=name, marks=long if isa.EMULATED in name and kind == 8 else ())
        for name, impl, kind in found
    ]


def packed(impl: Implementation, kind: Any, rows: int, inputs: int, activation: str | None) -> Any:
    weight = torch.randn(rows, inputs)
    if isinstance(kind, torch.dtype):
        return impl.pack(weight.to(kind), activation)
    is_float = kind == "float8"
    scheme = float8_scheme(32) if is_float else int_scheme(kind, 32)
    return impl.pack(quantize(weight, scheme), activation)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("impl", "kind"), implementations())
def test_products_have_the_bits_of_a_call_for_each_expert(impl: Implementation, kind: Any, activation: str) -> None:
    """Also of experts with more rows than a block of them, and without any."""
    torch.manual_seed(5)
    rows, inputs, num_experts = 2 * 37, 96, 4
    weights = [packed(impl, kind, rows, inputs, activation) for _ in range(num_experts)]
    parts = [(weight, torch.randn(rows) if activation else None) for weight in weights]
    if (table := impl.of_experts.table(parts)) is None:
        pytest.skip("tile registers compute all products of such weights")
    for count in (1, 3, 130):
        logits, x = torch.randn(count, num_experts) + torch.tensor([0.0, 9.0, -99.0, 0.0]), torch.randn(count, inputs)
        _, places = placed(logits, Routing(2, True, False, 1, 1, 2, 1.0))
        got = impl.of_experts.multiply(x, places, table, True)
        assert torch.equal(impl.of_experts.multiply(x[places.tokens], places, table, False), got)
        for expert, first, end in places.active[1:].view(-1, 3)[: int(places.active[0])].tolist():
            assert torch.equal(got[first:end], impl(x[places.tokens[first:end]], *parts[expert])), (count, expert)
