"""A budget of bits is counted as files are, spent as well as it can be, and on what the model's output shows."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit.errors import ConfigError
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.kv_dtype import FLOAT32
from lmkit.layers.batch import allocate_kv, whole_batch
from lmkit.models.roles import LINEARS
from lmkit.models.source import ModelSource
from lmkit.qtensor import QuantScheme, int_scheme, quantize
from lmkit.quant.groups import candidates, fit_groups
from lmkit.quant.mixed_precision import BitBudget, Group, choose, make_bit_budget, name_of
from lmkit.quant.plan import make_plan
from lmkit.quant.recipe import Recipe
from lmkit.quant.report import sensitivity
from lmkit.quant.report.evaluate import encode_text
from lmkit.quant.run import prepare
from tests.quant.helpers import recipe, tiny_checkpoint

MIXED = {"format": "compressed-tensors", "scheme": {"group_size": 64, "symmetric": True}}


def mixed(bits: float, **sections: Any) -> Recipe:
    return recipe(**(MIXED | {"average_bits": bits} | sections))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("source"), intermediate_size=128)


def budget_of(costs: list[list[int]]) -> BitBudget:
    """Groups with these bits of 100 weights in all."""
    choices = int_scheme(4, 32), int_scheme(8, 32), None
    return BitBudget(tuple(Group(0, {"attn.o": "o_proj"}, choices[: len(c)], tuple(c)) for c in costs), 0, 100)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_within_the_budget_is_better(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    divisor = (1, 24)[seed % 2]
    costs = [(torch.randint(1, 60, (3,), generator=generator) * divisor).sort().values.tolist() for _ in range(5)]
    losses = torch.rand(5, 3, generator=generator).tolist()
    budget = budget_of(costs)
    limit = budget.lowest + (budget.highest - budget.lowest) * float(torch.rand((), generator=generator))
    chosen = choose(budget, losses, limit)
    assert budget.reached(chosen) <= limit
    possible = [list(c) for c in itertools.product(range(3), repeat=5) if budget.reached(list(c)) <= limit + 1e-12]
    best = min(sum(losses[i][c] for i, c in enumerate(choice)) for choice in possible)
    assert sum(losses[i][c] for i, c in enumerate(chosen)) == pytest.approx(best)


def test_a_fine_budget_is_kept_where_costs_have_no_common_divisor() -> None:
    costs = [[1_000_003 * (i + 1), 1_999_993 * (i + 1) + i, 4_000_037 * (i + 1)] for i in range(6)]
    budget = budget_of(costs)
    losses = [[4.0 * (i + 1), 1.0, 0.0] for i in range(6)]
    for share in (0.1, 0.3, 0.7, 0.99):
        limit = budget.lowest + (budget.highest - budget.lowest) * share
        assert budget.lowest < budget.reached(choose(budget, losses, limit)) <= limit


def test_bits_are_those_of_the_file(source: Path, tmp_path: Path) -> None:
    asked = recipe(format="awq", average_bits=10.0)
    report = prepare(source, asked).run(tmp_path / "out")
    assert report.mixed_precision is not None
    reader = CheckpointReader(tmp_path / "out")
    modules = [ModelSource(source).spec.module_name(i, role) for i in range(2) for role in LINEARS]
    names = [n for n in reader.names() if n.rpartition(".")[0] in modules]
    num_weights = sum(CheckpointReader(source).tensor(m + ".weight").numel() for m in modules)
    assert report.mixed_precision.reached == pytest.approx(
        8 * sum(reader.info(n).nbytes for n in names) / num_weights, abs=1e-4
    )
    assert report.mixed_precision.reached <= 10.0
    dense = {m for group in report.mixed_precision.groups if group.chosen == "dense" for m in group.modules}
    assert 0 < len(dense) < len(modules)
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert entry["modules_to_not_convert"] == sorted(dense)
    reasons = {linear.module: linear.reason for layer in report.layers for linear in layer.linears if linear.reason}
    assert reasons.keys() == dense


def test_fused_linears_share_what_all_of_them_can_have(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, intermediate_size=96)
    asked = mixed(9, ignore=["attn.k"])
    budget = make_bit_budget(ModelSource(path).spec, asked, make_plan(ModelSource(path), asked).linears)
    first = [group for group in budget.groups if group.layer == 0]
    assert [tuple(group.modules) for group in first] == [
        ("attn.q", "attn.v"), ("attn.o",), ("mlp.gate", "mlp.up"), ("mlp.down",),
    ]  # fmt: skip
    names = [[name_of(choice) for choice in group.choices] for group in first]
    assert names[0] == ["int4 g64", "int4 g32", "int8 g64", "dense"]
    assert names[3] == ["int4 g32", "int8 g32", "dense"]  # of 96 inputs, which 64 does not divide
    assert budget.fixed_bits == 2 * 32 * 64 * 32  # attn.k of both layers, float32
    assert list(first[0].bits) == sorted(first[0].bits)


def test_candidates_follow_the_format() -> None:
    assert [name_of(scheme) for scheme in candidates(mixed(5))] == ["int4 g64", "int4 g32", "int8 g64"]
    assert [name_of(scheme) for scheme in candidates(mixed(4.2))] == [
        "int2 g64", "int2 g32", "int3 g64", "int3 g32", "int4 g64", "int4 g32", "int8 g64",
    ]  # fmt: skip
    assert [name_of(scheme) for scheme in candidates(recipe(average_bits=5.0))] == ["int4 g32"]
    assert [name_of(scheme) for scheme in candidates(recipe())] == ["int4 g32"]


def test_budgets_out_of_reach_are_refused_with_what_can_be_reached(source: Path) -> None:
    with pytest.raises(ConfigError, match=r"average_bits 2\.2 cannot be reached; the lowest for this model is 2\.282$"):
        prepare(source, mixed(2.2))
    with pytest.raises(ConfigError, match="every linear dense; this model has 32"):
        prepare(source, mixed(32))
    assert prepare(source, mixed(4.25)).plan.dense == {}


def test_kl_is_that_of_the_model_with_one_group_rounded(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelSource(source)
    budget = make_bit_budget(model.spec, mixed(5), fit_groups(model.spec, mixed(5)).linears)
    rows = torch.randint(0, model.spec.vocab_size, (3, 20), generator=torch.Generator().manual_seed(1))
    measured = sensitivity.measure(model, budget.groups, rows)

    def log_probs(rounded: Group | None, scheme: QuantScheme | None) -> torch.Tensor:
        decoder = model.head()
        decoder.layers = [model.layer(i, torch.float32) for i in range(2)]
        if rounded is not None and scheme is not None:
            weights = decoder.layers[rounded.layer].weights
            weights.update({role: quantize(weights[role], scheme) for role in rounded.modules})  # type: ignore[arg-type]
        batch, blocks = whole_batch(rows.tolist(), 32)
        layer = model.spec.layers[0]
        kv = [allocate_kv(blocks, layer.num_kv_heads, 32, layer.head_dim, (FLOAT32, FLOAT32))] * 2
        return decoder.head(*decoder.hidden(batch, kv)).log_softmax(-1)

    exact = log_probs(None, None)
    for number in (0, 3, 6):
        group = budget.groups[number]
        for choice, scheme in enumerate(group.choices):
            difference = exact - log_probs(group, scheme)
            expected = float((exact.exp() * difference).sum(-1, dtype=torch.float64).clamp_min(0).mean())
            assert measured[number][choice] == pytest.approx(expected, rel=1e-2, abs=1e-7)
        assert measured[number][0] > 10 * measured[number][2] > 0
    monkeypatch.setattr(sensitivity, "VARIANT_BYTES", 4 * 20 * 64 * 5)  # five variants at a time, each row by itself
    for once, again in zip(measured, sensitivity.measure(model, budget.groups, rows), strict=True):
        assert again == pytest.approx(once, rel=1e-4, abs=1e-9)


def test_more_bits_are_worth_less_kl_and_the_plan_is_the_same_each_time(source: Path) -> None:
    kls = []
    for bits in (4.25, 5, 7, 12):
        quantizer = prepare(source, mixed(bits))
        plan, report = sensitivity.choose_schemes(
            quantizer.source, quantizer.recipe, quantizer.plan, quantizer.data.rows
        )
        again = sensitivity.choose_schemes(quantizer.source, quantizer.recipe, plan, quantizer.data.rows)
        assert again[0] == plan
        assert report.reached <= bits
        assert {m for m, scheme in plan.linears.items() if scheme is None} == set(plan.dense)
        kls.append(report.kl)
    assert kls == sorted(kls, reverse=True)
    assert kls[0] > 4 * kls[-1]


@pytest.mark.parametrize("steps", [[{"step": "rtn"}], [{"step": "rtn"}, {"step": "refine"}]])
def test_fewer_than_four_bits_are_kept_and_served(source: Path, tmp_path: Path, steps: list[dict[str, str]]) -> None:
    """Files hold codes of 2 and 3 bits, also after `refine`, which reads what was written."""
    report = prepare(source, mixed(3, steps=steps)).run(tmp_path / "out", eval_ids=encode_text(source)[:300])
    assert report.mixed_precision is not None
    assert (report.refined is not None) == (len(steps) == 2)
    assert 2.9 < report.mixed_precision.reached <= 3
    chosen = {module: group.chosen for group in report.mixed_precision.groups for module in group.modules}
    assert {name[:4] for name in chosen.values()} >= {"int2", "int3"}
    reader = CheckpointReader(tmp_path / "out")
    stored = sum(
        reader.info(f"{module}.{part}").nbytes
        for module in chosen
        for part in ("weight_packed", "weight_scale", "weight_zero_point")
        if reader.has(f"{module}.{part}")
    )
    num_weights = sum(CheckpointReader(source).tensor(m + ".weight").numel() for m in chosen)
    assert 8 * stored / num_weights == pytest.approx(report.mixed_precision.reached, abs=1e-3)
    assert report.evaluation is not None
    served = report.evaluation.divergence
    assert served is not None
    assert served.kl_mean == pytest.approx(report.mixed_precision.kl, rel=0.5)


def test_a_budget_beats_one_scheme_of_the_same_bits(source: Path, tmp_path: Path) -> None:
    one = recipe(format="compressed-tensors", scheme={"bits": 3, "group_size": 64})
    bits = 3 + (16 + 3) / 64
    ids = encode_text(source)[:1024]
    kl = []
    for name, asked in (("one", one), ("mixed", mixed(bits, scheme={"group_size": 64}))):
        report = prepare(source, asked).run(tmp_path / name, eval_ids=ids)
        assert report.evaluation is not None
        assert report.evaluation.divergence is not None
        kl.append(report.evaluation.divergence.kl_mean)
    assert kl[1] < kl[0]
