"""Codes and scales answer for themselves: each kind against its definition, one weight at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkit.codes import E2M1, FLOAT8, Codebook, Codes, Integers
from lmkit.errors import CheckpointError
from lmkit.formats.mxfp4 import MXFP4
from lmkit.formats.nvfp4 import NVFP4, NVFP4_MODELOPT
from lmkit.qtensor import QTensor, QuantScheme, dequantize, float8_scheme, int_scheme, plain, quantize
from lmkit.scales import EXPONENTS, Scales

NF4 = Codebook("levels4", tuple(range(-120, 120, 15)), 1 / 120)  # 16 levels that lie too far apart to be looked up
SCHEMES = [int_scheme(4, 16), int_scheme(8, -1, True), float8_scheme(), float8_scheme(16, 4), MXFP4, NVFP4,
           NVFP4_MODELOPT, QuantScheme(NF4, 16), QuantScheme(E2M1, 16)]  # fmt: skip
OUTPUTS, INPUTS = 6, 64


def random_weight(scheme: QuantScheme, seed: int) -> QTensor:
    """A weight with any codes and scales."""
    torch.manual_seed(seed)
    codes = torch.randint(0, 1 << scheme.bits, (OUTPUTS, INPUTS), dtype=torch.uint8)
    groups = scheme.num_row_groups(OUTPUTS), scheme.num_groups(INPUTS)
    scales, factor = torch.rand(groups) + 0.01, None
    if not scheme.codes.uniform and scheme.codes == FLOAT8:
        codes[codes & 0x7F == 0x7F] = 0
    if scheme.scales == EXPONENTS:
        scales = torch.randint(100, 140, groups, dtype=torch.uint8)
    elif scheme.scales.bits == 8:
        scales, factor = (scales * 400).to(torch.float8_e4m3fn), torch.tensor([3.7])
    zeros = scheme.codes.zeros(groups)
    if scheme.codes.uniform and not scheme.symmetric:
        zeros = torch.randint(0, 1 << scheme.bits, groups, dtype=torch.uint8)
    return QTensor(codes.view(scheme.codes.element), scales, zeros, scheme, factor=factor)


def scale_of(q: QTensor, row_group: int, group: int) -> float:
    stored = q.scales[row_group, group]
    if q.scheme.scales == EXPONENTS:
        return math.ldexp(1.0, int(stored) - 127)
    if q.factor is None:
        return float(stored)
    one, factor = stored.float(), q.factor[0]
    return float(one / factor if q.scheme.scales == NVFP4.scales else one * factor)


def number_of(q: QTensor, row: int, column: int, group: int) -> float:
    codes = q.scheme.codes
    if isinstance(codes, Integers):
        return int(q.codes[row, column]) - int(q.zeros[row, group])
    if isinstance(codes, Codebook):
        return codes.integers[int(q.codes[row, column])] * codes.unit
    return float(q.codes[row, column])


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_a_weight_is_what_its_definition_says_one_by_one(scheme: QuantScheme, seed: int) -> None:
    q = random_weight(scheme, seed)
    values = dequantize(q)
    size, rows = (n if n != -1 else OUTPUTS * INPUTS for n in (scheme.group_size, scheme.rows))
    for row in range(OUTPUTS):
        for column in range(INPUTS):
            group = column // size
            wanted = number_of(q, row, column, group) * scale_of(q, row // rows, group)
            assert float(values[row, column]) == pytest.approx(wanted, rel=3e-7, abs=0), (row, column)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_kernels_see_the_same_weight_in_plain_codes(scheme: QuantScheme) -> None:
    q = random_weight(scheme, 1)
    seen = plain(q)
    assert seen.scheme == scheme.plain == scheme.plain.plain
    assert (seen.scheme.rows, seen.factor) == (1, None)
    assert seen.scheme.codes.bits in (4, 8)
    torch.testing.assert_close(dequantize(seen), dequantize(q), rtol=3e-7, atol=0)
    if scheme.codes == E2M1:  # halves are exact
        assert torch.equal(dequantize(seen), dequantize(q))
        assert {*seen.codes.unique().tolist()} <= {*seen.scheme.codes.values}


@pytest.mark.parametrize("scheme", [MXFP4, NVFP4, NVFP4_MODELOPT, QuantScheme(E2M1, 16)], ids=repr)
def test_rounding_to_float4_errs_by_half_a_step_at_most(scheme: QuantScheme) -> None:
    torch.manual_seed(5)
    weight = torch.randn(OUTPUTS, INPUTS) * torch.logspace(-6, 2, OUTPUTS)[:, None]
    weight[2] = 0
    q = quantize(weight, scheme)
    for row in range(OUTPUTS):
        for group, part in enumerate((dequantize(q) - weight)[row].split(scheme.group_size)):
            assert float(part.abs().max()) <= scale_of(q, row, group) * 1.001  # the widest step is from 4 to 6
    assert not dequantize(q)[2].any()
    with pytest.raises(CheckpointError, match="not a finite number"):
        quantize(torch.tensor([[math.nan] * 32]), scheme)


def test_a_scheme_accounts_for_its_bits() -> None:
    bits = {scheme: scheme.num_bytes((64, 64)) * 8 / 64 / 64 for scheme in (int_scheme(4, 32), int_scheme(8, -1))}
    assert bits == {int_scheme(4, 32): 4 + 24 / 32, int_scheme(8, -1): 8 + 24 / 64}
    assert float8_scheme().num_bytes((64, 64)) == 64 * 64 + 64 * 4
    in_files = {MXFP4: 4 + 8 / 32, NVFP4: 4 + 8 / 16, int_scheme(4, 32): 4 + 20 / 32, int_scheme(4, 32, True): 4.5}
    for scheme, wanted in in_files.items():
        assert scheme.bits + scheme.group_bits / scheme.group_size == wanted


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_scheme_survives_json(scheme: QuantScheme) -> None:
    """The file of packed weights keeps it so."""
    assert msgspec.json.decode(msgspec.json.encode(scheme), type=QuantScheme) == scheme


def test_values_of_a_kind_are_equal_and_tell_themselves_apart() -> None:
    codes: list[Codes] = [Integers(4), Integers(4, True), Integers(8), FLOAT8, E2M1, NF4]
    scales: list[Scales] = [scheme.scales for scheme in (int_scheme(4, 32), MXFP4, NVFP4, NVFP4_MODELOPT)]
    for values in (codes, scales):
        assert len({*values}) == len(values)
    assert [str(replace(scheme, group_size=32)) for scheme in SCHEMES[:1]] == ["int4 g32"]
    assert [*map(str, codes)] == ["int4", "int4", "int8", "float8", "e2m1", "levels4"]
