"""What a report says of one layer: its transforms, its linears, and the whole layer's error."""

from __future__ import annotations

from torch import Tensor

from lmkit.config import StrictStruct
from lmkit.qtensor import QTensor


class ScaleReport(StrictStruct, frozen=True):
    """One searched pair: block losses (summed squared error) of the chosen scale and of identity, and all of them."""

    source: str
    consumers: tuple[str, ...]
    chosen: str
    loss: float
    identity_loss: float
    losses: dict[str, float | None]  # by candidate; None = not finite


class ClipReport(StrictStruct, frozen=True):
    """Squared output error with the chosen ranges and with full ranges; the share of groups that were narrowed."""

    loss: float
    unclipped_loss: float
    clipped_share: float


class LinearReport(StrictStruct, frozen=True):
    """One linear. Errors are |x (W^ - W)^T|^2 / |x W^T|^2 on sampled tokens: rounded as it was given, and as stored."""

    module: str
    format: str  # "awq" or "dense"
    reason: str | None = None  # why it is dense
    clip: ClipReport | None = None
    rtn_error: float | None = None
    error: float | None = None
    bits: float | None = None  # of a weight as it is stored, with its share of scales and zeros
    method: str | None = None  # that gave the codes: "rtn", "gptq", "signround"
    fallback: str | None = None  # why that is not the recipe's
    damping: float | None = None  # of the Hessian, as it was needed
    held_out_error: float | None = None  # of the recipe's rounder on held-out rows, relative to the original output
    held_out_rtn_error: float | None = None  # the same of plain rounding on the same grid


class ExpertsReport(StrictStruct, frozen=True):
    """A mixture of experts: how many calibration tokens each expert saw, and which saw too few: these were rounded to
    nearest, neither scaled nor clipped by what they saw."""

    tokens: dict[str, int]  # by expert
    without_statistics: tuple[int, ...]


class HeldOutReport(StrictStruct, frozen=True):
    """Squared error of a layer's output on rows that no statistics saw, relative to what the original layer adds there:
    of what the recipe's steps gave, and of plain rounding of the original weights."""

    tokens: int
    error: float
    rtn_error: float
    fallback: str | None = None  # why plain rounding was taken


class LayerReport(StrictStruct, frozen=True):
    """`error`: of the layer's contribution to the residual stream, relative, on the first calibration rows."""

    index: int
    linears: tuple[LinearReport, ...]
    scales: tuple[ScaleReport, ...]
    error: float
    seconds: float
    experts: ExpertsReport | None = None
    held_out: HeldOutReport | None = None


def stored_bits(weight: Tensor | QTensor, dense_bits: int) -> float:
    """Bits of one weight in the file: of its code and its share of scales and zeros; `dense_bits` if it has none."""
    if isinstance(weight, Tensor):
        return float(dense_bits)
    bits = weight.scheme.bits
    return bits + (8 * weight.scales.nbytes + bits * weight.zeros.numel()) / weight.codes.numel()
