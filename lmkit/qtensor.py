"""The canonical quantized tensor: methods make it, formats store it, kernels pack it.

A scheme says what the codes stand for (lmkit.codes), which of them share a scale, and how scales are kept
(lmkit.scales). Integers are unsigned codes on a uniform affine grid, w = (code - zero) * scale, per output row and
group of `group_size` inputs. `quantize` and `dequantize` are the oracle for everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmkit.codes import FLOAT8, Codebook, Codes, Float8, Integers
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.scales import NUMBERS, Scales

Range = tuple[Tensor, Tensor]  # (lower, upper), each [out, groups]

PIECE = 1 << 18  # weights that are rounded at a time

SMALLEST_SCALE = torch.finfo(torch.float16).smallest_normal  # of integers
LARGEST_SCALE = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class QuantScheme:
    """How a weight is quantized: what its codes stand for, which of them share a scale, and how scales are kept.

    `rows` outputs and `group_size` inputs share one; -1 = all of them. For integers, `rows` is 1. Float8 has a scale
    per output channel (rows 1, group_size -1), per tensor (-1, -1) or in blocks (128, 128).
    """

    codes: Codes
    group_size: int
    rows: int = 1
    act_order: bool = False  # inputs of a group lie apart: see QTensor.order
    scales: Scales = NUMBERS

    def __str__(self) -> str:
        """`int4 g128`, `int8 channel`, `float8 block`"""
        wide = {(1, -1): "channel", (-1, -1): "tensor", (128, 128): "block"}
        return f"{self.codes} {wide.get((self.rows, self.group_size), f'g{self.group_size}')}"

    @property
    def bits(self) -> int:
        """Of a code."""
        return self.codes.bits

    @property
    def symmetric(self) -> bool:
        return self.codes.symmetric

    @property
    def max_code(self) -> int:
        """The largest integer."""
        return (1 << self.bits) - 1

    @property
    def group_bits(self) -> int:
        """Bits of a group's scale and zero in a file."""
        return self.scales.bits + (0 if self.symmetric else self.bits)

    def num_bytes(self, shape: tuple[int, int], widths: tuple[int, ...] = ()) -> int:
        """Bytes of a weight [out, in] in memory: its codes, and of each group a float16 and a byte, or a float32. In
        planes a group has no zero. `widths`: of a device without planes (devices.Device)."""
        out_features, in_features = shape
        stored, of_group = self.bits, 24.0 if self.codes.uniform else 32.0
        if widths:
            stored = next(width for width in widths if width >= self.bits)
            if self.scales.kept != NUMBERS:  # its factors are there twice
                of_group = (2 * self.scales.held_bits - self.scales.bits) * (1 if self.symmetric else 2)
        elif self.in_planes:
            stored = self.number_bits
            of_group = self.scales.held_bits * (1 if self.symmetric else 2)
        return int(out_features * (in_features * stored + self.num_groups(in_features) * of_group)) // 8

    @property
    def plain(self) -> QuantScheme:
        """The scheme of `plain` weights."""
        return replace(self, codes=self.codes.plain, rows=1, scales=self.scales.kept)

    @property
    def number_bits(self) -> int:
        """Of a code in planes: of its number among the codes that occur, if kernels look it up."""
        values = self.codes.values
        return (len(values) - 1).bit_length() if values else self.bits

    @property
    def in_planes(self) -> bool:
        """Whether kernels keep its codes in planes of bits (kernels.cpu.packed_planes). A GPU has other layouts."""
        return self.codes.in_planes or self.scales.kept != NUMBERS

    def num_groups(self, in_features: int) -> int:
        return 1 if self.group_size == -1 else -(-in_features // self.group_size)

    def num_row_groups(self, out_features: int) -> int:
        return 1 if self.rows == -1 else -(-out_features // self.rows)


def int_scheme(bits: int, group_size: int, symmetric: bool = False, *, act_order: bool = False) -> QuantScheme:
    """Integers of so many bits; each `group_size` inputs of an output share a scale and a zero, -1 = all of them."""
    return QuantScheme(Integers(bits, symmetric), group_size, act_order=act_order)


def float8_scheme(group_size: int = -1, rows: int = 1) -> QuantScheme:
    """float8 e4m3; `rows` outputs and `group_size` inputs share a scale, -1 = all of them."""
    return QuantScheme(FLOAT8, group_size, rows)


Linears = Mapping[str, QuantScheme | None]  # every linear's module and its scheme; None = it stays dense


@dataclass(frozen=True)
class QTensor:
    """Codes [out, in], one an element of `scheme.codes.element`; scales float16/bfloat16/float32 [row groups, groups].

    Zeros are uint8 [out, groups], or empty [0] if the codes have none. Offsets of codes.Shifted stand in their place.

    `factor` belongs to the scales, if `scheme.scales` has one. `input_factor` is that of inputs, for files which tell
    engines to round these in the same way.

    Codes stand by group. With `act_order` of the scheme, column j of the codes belongs to input order[j].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    scheme: QuantScheme
    order: torch.Tensor | None = None  # int32 [in]; there if the scheme has act_order
    factor: torch.Tensor | None = None
    input_factor: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert (self.order is not None) == self.scheme.act_order

    def to(self, device: str) -> QTensor:
        """The same weight on that device."""
        beside = self.order, self.factor, self.input_factor
        order, factor, of_inputs = (None if part is None else part.to(device) for part in beside)
        codes, scales, zeros = (part.to(device) for part in (self.codes, self.scales, self.zeros))
        return QTensor(codes, scales, zeros, self.scheme, order, factor, of_inputs)

    def of_gathered(self) -> QTensor:
        """The weight whose inputs come in `order`."""
        return replace(self, scheme=replace(self.scheme, act_order=False), order=None)


def quantize(
    weight: Tensor, scheme: QuantScheme, *, clip: Range | None = None, largest: Tensor | None = None
) -> QTensor:
    """Round `weight` [out, in], of any float dtype, to the nearest points of its grid.

    See `grid` for `clip` and errors. `largest` is the largest magnitude of the weights that share a factor of scales,
    by default that of this one.
    """
    if not scheme.codes.uniform:
        return _quantize_numbers(weight, scheme, clip, largest)
    scales, zeros = grid(weight, scheme, clip)
    return QTensor(codes_for(weight, scales, zeros, scheme), scales, zeros, scheme)


def dequantize(q: QTensor) -> Tensor:
    """The weight of `q`, float32 [out, in]."""
    codes, in_features, scales = q.scheme.codes, q.codes.shape[-1], _row_scales(q)
    stored = q.codes.view(torch.uint8)  # float8 has no padding
    values, zeros = torch.empty(q.codes.shape, device=q.codes.device), q.scheme.scales.offsets(q.zeros, q.factor)
    for rows in _pieces(stored):
        grouped, own = _grouped(stored[..., rows, :], q.scheme).view(q.codes.dtype), scales[..., rows, :].float()
        weights = codes.weights(grouped, own, zeros[..., rows, :] if zeros.numel() else zeros)
        values[..., rows, :] = weights.flatten(-2)[..., :in_features]
    return values if q.order is None else values[..., q.order.argsort()]


def plain(q: QTensor) -> QTensor:
    """The same weight as kernels have it, in `scheme.plain`: codes on a uniform grid or float8, and for each output and
    group a scale that is a number."""
    if q.scheme == q.scheme.plain:
        return q
    return QTensor(*q.scheme.codes.as_plain(q.codes, _row_scales(q), q.zeros), q.scheme.plain, q.order)


def _row_scales(q: QTensor) -> Tensor:
    """The scale of each output and group as a number, [..., out, groups]."""
    scales, rows, out_features = q.scheme.scales.plain(q.scales, q.factor), q.scheme.rows, q.codes.shape[-2]
    if rows == 1:
        return scales
    return scales.repeat_interleave(out_features if rows == -1 else rows, 0)[:out_features].contiguous()


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
        return scales, scheme.codes.zeros(tuple(scales.shape)).to(scales.device)
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


def plain_grid(low: Tensor, high: Tensor, scheme: QuantScheme, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(scales, zeros), float32, of grids of stepped codes from `low` <= 0 to `high` >= 0. `largest` as in `quantize`;
    without one it is that of these."""
    if scheme.codes.uniform:
        scales, zeros = grid_between(low, high, scheme)
        return scales.float(), zeros.float()
    fitted = _fit(torch.maximum(-low, high), scheme, largest)
    return scheme.scales.plain(*fitted), torch.zeros(())


def _fit(magnitudes: Tensor, scheme: QuantScheme, largest: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(stored scales, factor) for which these magnitudes float32 become the largest number of the codes."""
    assert isinstance(scheme.codes, Float8 | Codebook)
    scales = (magnitudes / scheme.codes.largest).clamp(min=torch.finfo(torch.float32).smallest_normal)
    return scheme.scales.fit(scales, scales.max() if largest is None else largest / scheme.codes.largest)


def _quantize_numbers(weight: Tensor, scheme: QuantScheme, clip: Range | None, largest: Tensor | None) -> QTensor:
    """Round to float8, or to a table.

    Each block's largest magnitude becomes the largest number, or that of `clip` does. Scales that are numbers are
    float32.
    """
    assert isinstance(scheme.codes, Float8 | Codebook)
    weight = weight.float()
    _range(weight, scheme)  # refuses values that are not finite
    out_features, in_features = weight.shape
    rows = out_features if scheme.rows == -1 else scheme.rows
    missing = -out_features % rows
    padded = torch.nn.functional.pad(weight, (0, 0, 0, missing))
    blocks = _grouped(padded, scheme).view(
        scheme.num_row_groups(out_features), rows, scheme.num_groups(in_features), -1
    )
    magnitudes = blocks.abs().amax((1, 3)) if clip is None else torch.maximum(-clip[0], clip[1])
    stored, factor = _fit(magnitudes, scheme, largest)
    taken = scheme.scales.plain(stored, factor)
    codes = scheme.codes.nearest(weight / _spread(taken, out_features, in_features, scheme))
    return QTensor(codes, stored, scheme.codes.zeros(tuple(stored.shape)), scheme, factor=factor)


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
