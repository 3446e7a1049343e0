"""Packs weights for csrc/gemm.cuh, which describes the layout, and dequantizes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from lmkit.codes import E2M1, Integers, Shifted
from lmkit.kernels.cuda.gpus import gpu_of
from lmkit.kernels.cuda.module import Kernel, backend
from lmkit.kernels.cuda.switches import switches
from lmkit.qtensor import QTensor, QuantScheme
from lmkit.scales import NUMBERS, SuperGroups

TILE = 16  # outputs
STAGE = 128  # inputs
WARPS = 8  # of a block of dequantize.cu
WIDTHS = 4, 6, 8  # bits that codes take
E2M1_GROUP = 16  # inputs, the smallest group; other codes have 32 and more, or super-groups
# Kernels take e2m1 as numbers 2^-14 times as large (gemm.cuh), and plain scales are those of integers.
E2M1_SCALE = 2.0**14 / E2M1.unit


@dataclass(frozen=True)
class PackedWeight:
    """W [out_features, in_features]. The data of one tile of outputs are contiguous."""

    codes: Tensor  # uint8 [tiles, stages, bytes]
    params: Tensor  # uint8 [tiles, groups, bytes]: scales, then zeros or offsets; those of a stage side by side
    out_features: int  # including gates
    in_features: int
    group_size: int
    bits: int  # 4, 6 or 8, that codes take
    float8: bool
    wide: bool  # scales are float32, not float16
    activation: str | None  # not None: a tile is 8 gates and the 8 outputs that they multiply
    rounds: bool = False  # x is rounded, to int8 or to float8, before it is multiplied (coded_rows.py)
    float4: bool = False  # codes of 4 bits are e2m1
    offsets: bool = False  # w = code * scale - offset
    factors: int = 0  # that make 1, if scales are whole numbers times factors (scales.SuperGroups); else 0
    zero: int = 0  # of all codes, if there are factors
    copy: Tensor | None = None  # W in 16 bits, which the library multiplies with many tokens (turbo/engine/copies.py)

    @property
    def gated(self) -> bool:
        return self.activation is not None

    @property
    def int8(self) -> bool:
        """Whether products are of integers. Codes of 8 bits minus zeros have 9 bits: x's values are multiplied. So they
        are by float4, and by codes with offsets or factors."""
        return self.rounds and self.bits == 4 and not (self.float4 or self.offsets or self.factors)

    @property
    def float8_x(self) -> bool:
        """Whether products are of float8 numbers. Otherwise x's values are multiplied, rounded or not."""
        if not (self.rounds and self.float8 and switches().float8):
            return False
        return gpu_of(backend(self.codes.device.type).capability()).float8

    @property
    def coded_x(self) -> bool:
        """Whether x has codes of 8 bits and scales when it is multiplied."""
        return self.int8 or self.float8_x

    @property
    def width(self) -> int:
        """Neighbouring rows that are gates, before so many that they multiply."""
        return TILE // 2

    @property
    def num_tiles(self) -> int:
        return self.codes.shape[0]

    @property
    def num_stages(self) -> int:
        return self.codes.shape[1]

    @property
    def num_results(self) -> int:
        """Features of the product."""
        return self.out_features // 2 if self.gated else self.out_features

    @property
    def scales_per_stage(self) -> int:
        """Scales of an output in a stage. 0: a group is longer than a stage."""
        return STAGE // self.group_size if 0 < self.group_size <= STAGE else 0

    @property
    def stages_per_group(self) -> int:
        return self.num_stages if self.group_size == -1 else max(1, self.group_size // STAGE)

    @property
    def defines(self) -> dict[str, int]:
        """The defines of gemm.cuh."""
        given = {"FLOAT4": int(self.float4), "OFFSETS": int(self.offsets), "FACTORS": self.factors, "ZERO": self.zero}
        return {
            "CODE_BITS": self.bits,
            "FLOAT8": int(self.float8),
            "WIDE": int(self.wide),
            "SCALES": self.scales_per_stage,
            **{name: value for name, value in given.items() if value},
        }

    def slice(self, first: int, last: int) -> PackedWeight:
        """Tiles first .. last - 1. Their results begin at first * (results of a tile)."""
        per_tile = TILE // 2 if self.gated else TILE
        results = min(self.num_results, last * per_tile) - first * per_tile
        rows = 2 * results if self.gated else results
        return replace(self, codes=self.codes[first:last], params=self.params[first:last], out_features=rows)


def is_float4(values: tuple[int, ...]) -> bool:
    """Whether codes with these values (codes.Integers) are kept in 4 bits, which kernels take apart in registers."""
    return values == E2M1.plain.values


def group_problem(group_size: int, values: tuple[int, ...] = (), scheme: QuantScheme | None = None) -> str | None:
    """Why groups of this size cannot be packed, or None."""
    fits = group_size in (-1, 32, 64) or (group_size > 0 and group_size % STAGE == 0)
    if scheme is not None and isinstance(scheme.scales, SuperGroups):
        fits = group_size in (16, 32) and scheme.scales.groups * group_size % STAGE == 0
    elif scheme is not None and isinstance(scheme.codes, Shifted):
        fits = group_size == 32
    fits = fits or (group_size == E2M1_GROUP and is_float4(values))
    return None if fits else f"group_size {group_size} is not 32, 64, -1 or a multiple of {STAGE}"


@cache
def _float4_codes(device: torch.device) -> Tensor:
    """uint8 [256]: the e2m1 code of each plain code that occurs."""
    places = torch.zeros(256, dtype=torch.uint8)
    for place, value in reversed([*enumerate(E2M1.plain.values)]):
        places[value] = place
    return places.to(device)


def pack(weight: QTensor, activation: str | None = None, *, rounds: bool = False) -> PackedWeight:
    """Pack a weight with scales per output (qtensor.plain). float16 scales stay, whole numbers, too, and others are
    stored as float32. Codes of 2 and 3 bits take 4, those of 5 take 6, those of 7 take 8.

    `rounds`: the inputs of its products are rounded to int8, or to float8 if it is.
    """
    scheme = weight.scheme
    out_features, in_features = weight.codes.shape
    float8, gated = weight.codes.is_floating_point(), activation is not None
    float4 = not float8 and is_float4(scheme.codes.values)
    stages = -(-in_features // STAGE)
    codes = weight.codes.view(torch.uint8) if float8 else weight.codes
    codes = _float4_codes(codes.device)[codes.int()] if float4 else codes
    codes = _tiles(torch.nn.functional.pad(codes, (0, stages * STAGE - in_features)), gated)
    bits = 4 if float4 else next(width for width in WIDTHS if width >= scheme.bits)
    wide = float4 or weight.scales.dtype not in (torch.float16, torch.int8)
    fragments = _fragments(codes, bits, split=scheme.group_size == E2M1_GROUP)
    return PackedWeight(
        fragments, _params(weight, gated, wide=wide, stages=stages), out_features, in_features, scheme.group_size, bits,
        float8, wide, activation, rounds, float4, isinstance(scheme.codes, Shifted), *_factors(scheme),
    )  # fmt: skip


def _factors(scheme: QuantScheme) -> tuple[int, int]:
    """PackedWeight.factors and .zero."""
    if scheme.scales == NUMBERS:
        return 0, 0
    return 1 << scheme.scales.shift, scheme.codes.middle if isinstance(scheme.codes, Integers) else 0


def _params(weight: QTensor, gated: bool, *, wide: bool, stages: int) -> Tensor:
    """uint8 [tiles, groups, bytes]."""
    scheme = weight.scheme
    float4, per_stage = is_float4(scheme.codes.values), STAGE // scheme.group_size
    shifted = isinstance(scheme.codes, Shifted)
    if weight.factor is not None:
        columns = [weight.scales.view(torch.uint8) ^ 128, *([weight.zeros.view(torch.uint8) ^ 128] if shifted else [])]
    else:
        scales = weight.scales.float() * (E2M1_SCALE if float4 else 1) if wide else weight.scales
        columns = [scales, *([weight.zeros.to(scales.dtype)] if shifted else [])]
        if isinstance(scheme.codes, Integers) and not float4:
            columns.append(weight.zeros)
    params = torch.cat([_by_group(column, gated).view(torch.uint8) for column in columns], dim=-1)
    if 0 < scheme.group_size < STAGE:  # all groups of a stage exist
        params = torch.nn.functional.pad(params, (0, 0, 0, stages * per_stage - params.shape[1]))
    if weight.factor is not None:
        factors = [_by_group(factor.contiguous(), gated).view(torch.uint8) for factor in weight.factor.unbind(-1)]
        of_stages = torch.cat(factors, dim=-1).repeat_interleave(_stages_of_factor(scheme), 1)[:, :stages]
        whole = torch.cat([params.reshape(len(params), stages, -1), of_stages], dim=-1)
        params = whole.reshape(len(params), stages * per_stage, -1)
    return params.contiguous()


def _stages_of_factor(scheme: QuantScheme) -> int:
    assert isinstance(scheme.scales, SuperGroups)
    return scheme.scales.groups * scheme.group_size // STAGE


def _tiles(rows: Tensor, gated: bool) -> Tensor:
    """[N, ...] -> [tiles, 2, 8, ...], filled up with zero rows. Gated: a tile has 8 rows of each half of the weight."""
    halves = rows.view(2, -1, *rows.shape[1:]) if gated else rows.unsqueeze(0)
    per_tile = TILE // 2 if gated else TILE
    missing = -halves.shape[1] % per_tile
    if missing:
        halves = torch.cat([halves, halves.new_zeros(halves.shape[0], missing, *halves.shape[2:])], dim=1)
    if gated:
        return halves.reshape(2, -1, 8, *rows.shape[1:]).transpose(0, 1)
    return halves.reshape(-1, 2, 8, *rows.shape[1:])


def _by_group(x: Tensor, gated: bool) -> Tensor:
    """[N, groups] -> [tiles, groups, 16], rows g and g + 8 side by side."""
    return _tiles(x, gated).permute(0, 3, 2, 1).flatten(2).contiguous()


def _fragments(codes: Tensor, bits: int, *, split: bool) -> Tensor:
    """[tiles, 2 (r), 8 (g), K] -> [tiles, stages, bytes]; the letters are gemm.cuh's. `split`: groups of 16."""
    if split:
        parts = codes.reshape(*codes.shape[:3], -1, 2, 2, 2, 4, 2, 2).transpose(6, 7)
    else:
        parts = codes.reshape(*codes.shape[:3], -1, 2, 2, 4, 2, 2, 2)  # tile, r, g, stage, h / 2, h % 2, t, i, e, l
    if bits == 8:
        return parts.permute(0, 3, 4, 5, 2, 6, 7, 8, 1, 9).flatten(2).contiguous()
    low = (parts & 15)[:, 0] | parts[:, 1] << 4  # without r
    low = low.permute(0, 2, 3, 1, 5, 4, 6, 8, 7).flatten(2)
    if bits == 4:
        return low.contiguous()
    # tile, stage, g, t, h / 2, h % 2, l, then what shares a byte: r, i, e
    high = (parts >> 4).permute(0, 3, 2, 6, 4, 5, 9, 1, 7, 8).flatten(7)
    halves = torch.zeros(high.shape[:-1], dtype=torch.int16, device=codes.device)
    for place, field in enumerate(high.unbind(-1)):
        halves |= field.to(torch.int16) << 2 * place
    return torch.cat([low, halves.flatten(2).view(torch.uint8)], dim=-1)


@cache
def _dequantize(defines: tuple[tuple[str, int], ...]) -> Kernel:
    return Kernel("dequantize.cu", "dequantize", **dict(defines))


def dequantize(packed: PackedWeight, dtype: torch.dtype) -> Tensor:
    """W [out_features, in_features] in float16, bfloat16 or float32, rounded once; rows in their original order."""
    out = torch.empty(packed.out_features, packed.in_features, dtype=dtype, device=packed.codes.device)
    defines = packed.defines | {"OUT32": int(dtype == torch.float32)}
    if dtype == torch.bfloat16:
        defines["LM_BF16"] = 1
    tiles, stages = packed.num_tiles, packed.num_stages
    _dequantize(tuple(defines.items()))(
        -(-tiles * stages // WARPS), 32 * WARPS,
        [packed.codes, packed.params, out, tiles, stages, packed.params.shape[1], packed.stages_per_group,
         packed.out_features, packed.in_features, int(packed.gated)],
    )  # fmt: skip
    return out
