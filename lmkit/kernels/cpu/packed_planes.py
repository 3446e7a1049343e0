"""Quantized weights in planes of bits, as GGUF's types have them, in panels of `width` outputs:

    codes    uint8 [panels, K/32, bits, width * 4]: of each unit of 32 inputs, the rows of its planes
    sides    uint8 [panels, K/32 or K/256, bytes]: scales and offsets, see plane_tiles.Planes.side_bytes

A code of 6 bits is 4 in one plane and 2 in the next. A row of a plane of p bits holds 8 / p quads of inputs of all
outputs; a quad is four inputs of an output side by side. A super-group has the factors of its scales and offsets first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.packed_weight import PackedWeight, numbers_of
from lmkit.kernels.cpu.panels import to_panels
from lmkit.kernels.cpu.plane_tiles import QUADS, SUPER, UNIT, Planes, planes_of
from lmkit.qtensor import QTensor, QuantScheme


def form_of(scheme: QuantScheme) -> Planes:
    """What kernels have for a scheme that is `in_planes`."""
    scales = scheme.scales
    return Planes(
        scheme.number_bits, scheme.group_size, scales.bits == 8, not scheme.symmetric, scheme.codes.values, scales.shift
    )


def accepts(*, scheme: QuantScheme, scales: torch.dtype, in_features: int, **traits: Any) -> str | None:
    """`scales` is their dtype."""
    form = form_of(scheme)
    if not form.factors and scales != torch.float16:
        return f"scales of {scales}, not float16"
    if form.group not in (16, 32):
        return f"groups of {form.group}, not of 16 or 32"
    if in_features % (UNIT * form.side_units):
        return f"{in_features} inputs are not a multiple of {UNIT * form.side_units}"
    return None


def pack(isa: Isa, weight: QTensor, activation: str | None = None) -> PackedWeight:
    """Rearrange a weight that `accepts` takes into panels of `isa.int_tile` outputs."""
    form, gated, width = form_of(weight.scheme), activation is not None, isa.int_tile
    out_features, in_features = weight.codes.shape
    codes = numbers_of(weight.codes, form.values) if form.values else weight.codes
    quads = to_panels(codes.contiguous().view(torch.int32), width, gated).view(torch.uint8)
    units = quads.unflatten(1, (-1, QUADS))  # [panels, units, quads, width * 4]
    rows, place = list[Tensor](), 0
    for plane in planes_of(form.bits):
        in_row = 8 // plane
        parts = (units >> place & (1 << plane) - 1).unflatten(2, (-1, in_row))
        row = parts[:, :, :, 0]
        for number in range(1, in_row):
            row = row | parts[:, :, :, number] << number * plane
        rows, place = [*rows, row], place + plane
    sides = _sides(weight, form, width, gated)
    return PackedWeight(
        torch.cat(rows, 2), sides, torch.empty(0, dtype=torch.uint8), out_features, in_features, form.group, False,
        form.values, activation, form, in_features // form.group, width,
    )  # fmt: skip


def _sides(weight: QTensor, form: Planes, width: int, gated: bool) -> Tensor:
    """uint8 [panels, units or super-groups, bytes]."""
    kept = [weight.scales, weight.zeros] if form.shifted else [weight.scales]
    if not form.factors:
        numbers = [to_panels(part.to(torch.float16).contiguous(), width, gated) for part in kept]
        sides = torch.stack([part.unflatten(1, (-1, form.groups)) for part in numbers], 2)
        return sides.contiguous().view(torch.uint8).flatten(2)
    assert weight.factor is not None
    factors = [to_panels(weight.factor[..., part].contiguous(), width, gated) for part in range(form.parts)]
    heads = torch.stack(factors, 2).contiguous().view(torch.uint8).flatten(2)  # [panels, super-groups, bytes]
    numbers = [to_panels(part.contiguous(), width, gated) for part in kept]
    by_unit = torch.stack([part.unflatten(1, (-1, SUPER, form.groups)) for part in numbers], 3)
    return torch.cat([heads, by_unit.contiguous().view(torch.uint8).flatten(2)], 2)
