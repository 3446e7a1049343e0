"""Every implementation of every op against the reference."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import lmkit.kernels  # noqa: F401  (registers)
from lmkit.kernels import index_ops, ops, recurrent_ops
from lmkit.kernels.cpu import attention, dense, isa, quantized, tiles
from lmkit.kernels.registry import Implementation, Op
from tests.kernels.cases import PLANES_TOLERANCE, SPLIT_TOLERANCE, Case, all_cases, difference, run

CASES = all_cases()
BY_ID = {case.id: case for case in CASES}


def registered() -> Iterator[tuple[Implementation, Case]]:
    """Those of CUDA take other types of activations: tests/kernels/cuda has their cases."""
    for case in CASES:
        yield from (
            (impl, case) for impl in case.op.implementations if impl.name != "reference" and impl.device != "cuda"
        )


def other_levels() -> Iterator[tuple[Implementation, Case]]:
    """The other instruction sets' kernels: native where this machine can run them, else their layouts, emulated."""
    seen = {(isa.host().lanes, isa.host().neon)}
    dense_seen = set(seen)  # dense products depend on nothing else
    for name, level in isa.LEVELS.items():
        if level == isa.host():
            continue
        level = isa.named(name + isa.EMULATED) if isa.obstacle(level) else level
        kernels = [
            (ops.linear_w4a8, quantized.implementation(level, 4)),
            (ops.linear_w8a8, quantized.implementation(level, 8)),
        ]
        if (level.lanes, level.neon) not in seen or level.tiles:
            if (level.lanes, level.neon) not in dense_seen or level.tiles:
                kernels.append((ops.linear_dense, dense.dense_implementation(level)))
            dense_seen.add((level.lanes, level.neon))
            kernels.append((ops.paged_attention, attention.implementation(level)))
        if level.neon:  # both levels of NEON have the same
            seen.add((level.lanes, level.neon))
        if level.tiles:
            codes = (ops.linear_w4a16, tiles.CODES4), (ops.linear_w8a16, tiles.CODES8), (ops.linear_fp8, tiles.FLOAT8)
            kernels += [(op, dense.codes_implementation(level, kind)) for op, kind in codes]
        for op, impl in kernels:
            yield from ((impl, case) for case in CASES if case.brief and case.op is op)


PAIRS = [pytest.param(impl, case, id=f"{impl.name}-{case.id}") for impl, case in (*registered(), *other_levels())]
EXACT = (ops.linear_dense, ops.linear_w4a16, ops.linear_w8a16, ops.linear_fp8)
ON_TILES = {ops.paged_attention.name: PLANES_TOLERANCE} | {op.name: SPLIT_TOLERANCE for op in EXACT}


@functools.cache
def expected(case_id: str) -> list[Tensor]:
    case = BY_ID[case_id]
    return run(case.op.named("reference"), case)


@pytest.mark.parametrize(("implementation", "case"), PAIRS)
def test_agrees_with_the_reference(implementation: Implementation, case: Case) -> None:
    if (reason := implementation.accepts(**case.traits)) is not None:
        pytest.skip(reason)
    got = run(implementation, case)
    of_tiles = ON_TILES.get(case.op.name, 0.0) if implementation.name.startswith("cpu.amx") else 0.0
    assert difference(got, expected(case.id)) <= max(case.tolerance, of_tiles)


@pytest.mark.parametrize(
    ("implementation", "case"), [pair for pair in PAIRS if pair.values[1].op in (ops.linear_w4a8, ops.linear_w8a8)]
)
def test_quantized_products_have_the_same_bits_on_every_level(implementation: Implementation, case: Case) -> None:
    """Sums and zeros are integers, and the rest is computed in the same order."""
    if (reason := implementation.accepts(**case.traits)) is not None:
        pytest.skip(reason)
    here = case.op.named(f"cpu.{isa.host().name}")
    assert all(map(torch.equal, run(implementation, case), run(here, case)))


def test_every_op_has_a_reference_and_cases() -> None:
    for op in (*vars(ops).values(), *vars(recurrent_ops).values(), *vars(index_ops).values()):
        if isinstance(op, Op):
            assert op.named("reference").priority == 0
            # No CPU's step has unknown tokens: cuda/test_tokens.py. Experts have tests of their own: test_experts.py
            experts = ops.route, ops.expert_places, ops.sum_places, ops.add_rows, ops.add_shared
            if op not in (ops.known_tokens, *experts):
                assert any(case.op is op for case in CASES), op.name


def test_a_cpu_kernel_is_chosen_for_every_case() -> None:
    for case in CASES:
        if case.op is not ops.linear_fp8_a8:  # a CPU multiplies float8 weights by exact activations
            assert case.op.select("cpu", **case.traits).name.startswith("cpu"), case.id
