"""The canonical quantized tensor: methods make it, formats store it, kernels pack it.

Integers are unsigned codes on a uniform affine grid, w = (code - zero) * scale, per output row and group of
`group_size` inputs. A symmetric scheme has zero = 2**(bits-1). Floats are float8 e4m3 codes, w = code * scale.
`quantize` and `dequantize` are the oracle for everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lmkit.errors import CheckpointError, UnsupportedError

Range = tuple[Tensor, Tensor]  # (lower, upper), each [out, groups]

PIECE = 1 << 18  # weights that are rounded at a time

SMALLEST_SCALE = torch.finfo(torch.float16).smallest_normal  # of integers
LARGEST_SCALE = torch.finfo(torch.float16).max
_FP8 = torch.finfo(torch.float8_e4m3fn)


@dataclass(frozen=True)
class QuantScheme:
    """How a weight is quantized. `rows` outputs and `group_size` inputs share a scale; -1 = all of them.

    For integers, `rows` is 1, and `values` are the only codes that occur, if that is known. `kind` "float" is float8
    e4m3, symmetric: per output channel (rows 1, group_size -1), per tensor (-1, -1) or in blocks (128, 128).
    """

    bits: int  # 2, 3, 4 or 8
    group_size: int
    symmetric: bool = False
    kind: Literal["int", "float"] = "int"
    rows: int = 1
    act_order: bool = False  # inputs of a group lie apart: see QTensor.order
    values: tuple[int, ...] = ()  # at most 16: a kernel may keep their numbers, in 4 bits

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    def num_groups(self, in_features: int) -> int:
        return 1 if self.group_size == -1 else -(-in_features // self.group_size)

    def num_row_groups(self, out_features: int) -> int:
        return 1 if self.rows == -1 else -(-out_features // self.rows)


Linears = Mapping[str, QuantScheme | None]  # every linear's module and its scheme; None = it stays dense


@dataclass(frozen=True)
class QTensor:
    """codes uint8 [out, in] (one code a byte), scales float16/bfloat16/float32 and zeros uint8 [out, groups].

    kind "float": codes float8_e4m3fn [out, in], scales [row groups, groups], zeros empty [0].

    Codes stand by group. With `act_order` of the scheme, column j of the codes belongs to input order[j].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    scheme: QuantScheme
    order: torch.Tensor | None = None  # int32 [in]; there if the scheme has act_order

    def __post_init__(self) -> None:
        assert (self.order is not None) == self.scheme.act_order

    def to(self, device: str) -> QTensor:
        """The same weight on that device."""
        order = None if self.order is None else self.order.to(device)
        return QTensor(self.codes.to(device), self.scales.to(device), self.zeros.to(device), self.scheme, order)

    def of_gathered(self) -> QTensor:
        """The weight whose inputs come in `order`."""
        return replace(self, scheme=replace(self.scheme, act_order=False), order=None)


def quantize(weight: Tensor, scheme: QuantScheme, *, clip: Range | None = None) -> QTensor:
    """Round `weight` [out, in], of any float dtype, to the nearest points of its grid.

    See `grid` for `clip` and errors.
    """
    if scheme.kind == "float":
        return _quantize_float8(weight, scheme)
    scales, zeros = grid(weight, scheme, clip)
    return QTensor(codes_for(weight, scales, zeros, scheme), scales, zeros, scheme)


def dequantize(q: QTensor) -> Tensor:
    """The weight of `q`, float32 [out, in]."""
    in_features = q.codes.shape[-1]
    if q.scheme.kind == "float":
        return q.codes.float() * _spread(q.scales.float(), q.codes.shape[-2], in_features, q.scheme)
    values = torch.empty(q.codes.shape, device=q.codes.device)
    for rows in _pieces(q.codes):
        codes = _grouped(q.codes[..., rows, :], q.scheme).float()
        codes.sub_(q.zeros[..., rows, :].float().unsqueeze(-1)).mul_(q.scales[..., rows, :].float().unsqueeze(-1))
        values[..., rows, :] = codes.flatten(-2)[..., :in_features]
    return values if q.order is None else values[..., q.order.argsort()]


def per_row(q: QTensor) -> QTensor:
    """The same weight with separate scales for each output."""
    if q.scheme.rows == 1:
        return q
    out_features = q.codes.shape[0]
    rows = out_features if q.scheme.rows == -1 else q.scheme.rows
    scales = q.scales.repeat_interleave(rows, 0)[:out_features].contiguous()
    return QTensor(q.codes, scales, q.zeros, replace(q.scheme, rows=1))


def grid(weight: Tensor, scheme: QuantScheme, clip: Range | None = None) -> tuple[Tensor, Tensor]:
    """(scales float16, zeros uint8), each [..., out, groups], of a weight [..., out, in].

    The grid spans each group's minimum to its maximum, or `clip`'s lower to upper. It is widened to contain 0, so that
    0 is exact and groups of one sign do not saturate. A scale is at least float16's smallest normal number. It is
    rounded to float16 before anything is derived from it, so that the search uses the same numbers as the file.

    Raises CheckpointError if the weight is not finite, and UnsupportedError if a group is too wide for a float16
    scale.
    """
    low, high = _range(weight, scheme)
    if clip is not None:
        low, high = clip[0].float().clamp(max=0), clip[1].float().clamp(min=0)
    return grid_between(low, high, scheme)


def grid_between(low: Tensor, high: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    """(scales float16, zeros uint8) of grids from `low` <= 0 to `high` >= 0, both float32 of any shape. See `grid`."""
    if scheme.symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scales = ((high - low) / scheme.max_code).to(torch.float16).clamp(min=SMALLEST_SCALE)
    if not bool(scales.isfinite().all()):
        widest = float(torch.maximum(-low, high).max())
        raise UnsupportedError(f"a weight of magnitude {widest:.3g} is beyond what a float16 scale can reach")
    if scheme.symmetric:
        return scales, torch.full_like(scales, 1 << (scheme.bits - 1), dtype=torch.uint8)
    return scales, torch.round(-low / scales.float()).clamp(0, scheme.max_code).to(torch.uint8)


def codes_for(weight: Tensor, scales: Tensor, zeros: Tensor, scheme: QuantScheme) -> Tensor:
    """The nearest codes uint8 [..., out, in] of `weight` on a given grid, saturated. Leading dimensions broadcast."""
    in_features = weight.shape[-1]
    # torch.broadcast_shapes needs torch._refs, which a process of turbo.transport.deferred does not have.
    lead = torch.broadcast_tensors(weight[..., :1], scales[..., :1])[0].shape[:-1]
    codes = torch.empty((*lead, in_features), dtype=torch.uint8, device=weight.device)
    for rows in _pieces(weight):
        values = _grouped(weight[..., rows, :].float(), scheme) / scales[..., rows, :].float().unsqueeze(-1)
        values.round_().add_(zeros[..., rows, :].float().unsqueeze(-1)).clamp_(0, scheme.max_code)
        codes[..., rows, :] = values.flatten(-2)[..., :in_features]
    return codes


def _quantize_float8(weight: Tensor, scheme: QuantScheme) -> QTensor:
    """Round to float8 e4m3.

    Each block's largest magnitude becomes 448, the largest float8 number. Scales are float32.
    """
    weight = weight.float()
    _range(weight, scheme)  # refuses values that are not finite
    out_features, in_features = weight.shape
    rows = out_features if scheme.rows == -1 else scheme.rows
    missing = -out_features % rows
    padded = torch.nn.functional.pad(weight, (0, 0, 0, missing))
    blocks = _grouped(padded, scheme).view(
        scheme.num_row_groups(out_features), rows, scheme.num_groups(in_features), -1
    )
    scales = (blocks.abs().amax((1, 3)) / _FP8.max).clamp(min=torch.finfo(torch.float32).smallest_normal)
    codes = weight / _spread(scales, out_features, in_features, scheme)
    codes = codes.clamp(_FP8.min, _FP8.max).to(torch.float8_e4m3fn)
    return QTensor(codes, scales, torch.zeros(0, dtype=torch.uint8), scheme)


def _spread(scales: Tensor, out_features: int, in_features: int, scheme: QuantScheme) -> Tensor:
    """Scales [row groups, groups] repeated to [out, in]."""
    rows = out_features if scheme.rows == -1 else scheme.rows
    columns = in_features if scheme.group_size == -1 else scheme.group_size
    return scales.repeat_interleave(rows, 0)[:out_features].repeat_interleave(columns, 1)[:, :in_features]


def _range(weight: Tensor, scheme: QuantScheme) -> Range:
    """Each group's (minimum or 0, maximum or 0), float32."""
    groups = _grouped(weight.float(), scheme)
    low, high = groups.amin(-1), groups.amax(-1)
    if not bool(low.isfinite().all() and high.isfinite().all()):
        where = (~weight.isfinite()).nonzero()[0].tolist()
        raise CheckpointError(f"the weight at {where} is {float(weight[tuple(where)])}, not a finite number")
    return low.clamp(max=0), high.clamp(min=0)


def _pieces(x: Tensor) -> list[slice]:
    """Rows of [..., out, in], so few at a time that what is computed from them stays in the cache."""
    step = max(1, PIECE // x.shape[-1])
    return [slice(begin, begin + step) for begin in range(0, x.shape[-2], step)]


def _grouped(x: Tensor, scheme: QuantScheme) -> Tensor:
    """[..., in] -> [..., groups, group_size]. A short last group is filled with 0, which changes no range."""
    in_features = x.shape[-1]
    num_groups = scheme.num_groups(in_features)
    size = in_features if scheme.group_size == -1 else scheme.group_size
    if missing := num_groups * size - in_features:
        x = torch.nn.functional.pad(x, (0, missing))
    return x.reshape(*x.shape[:-1], num_groups, size)
