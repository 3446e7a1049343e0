"""The report on one layer: its transforms, its linears, and the whole layer's error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from lmkit.config import StrictStruct
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.spec import ModelSpec


class ScaleReport(StrictStruct, frozen=True):
    """One searched pair: block losses (summed squared error) of the chosen scale, of identity and of all candidates."""

    source: str
    consumers: tuple[str, ...]
    chosen: str
    loss: float
    identity_loss: float
    losses: dict[str, float | None]  # by candidate; None = not finite


class ClipReport(StrictStruct, frozen=True):
    """Squared output error with the chosen ranges and with full ranges, and the share of groups that were narrowed."""

    loss: float
    unclipped_loss: float
    clipped_share: float


class LinearReport(StrictStruct, frozen=True):
    """One linear. Errors are |x (W^ - W)^T|^2 / |x W^T|^2 on sampled tokens: `rtn_error` of the original weight rounded
    to nearest, `error` of the weight as it is stored."""

    module: str
    format: str  # "awq" or "dense"
    reason: str | None = None  # why it is dense
    clip: ClipReport | None = None
    rtn_error: float | None = None
    error: float | None = None
    bits: float | None = None  # of a weight in the file (models.weight_bits)
    method: str | None = None  # the method that gave the codes: "rtn", "gptq", "signround"
    fallback: str | None = None  # why this is not the recipe's method
    damping: float | None = None  # of the Hessian, as much as was needed
    held_out_error: float | None = None  # of the recipe's rounder on held-out rows, relative to the original output
    held_out_rtn_error: float | None = None  # the same of plain rounding on the same grid


class ExpertsReport(StrictStruct, frozen=True):
    """A mixture of experts: how many calibration tokens each expert saw, and which experts saw too few.

    Experts that saw too few were rounded to nearest. They were neither scaled nor clipped by these tokens. In a layer
    whose experts are held one at a time, `borrowed` names for each of them the expert whose tokens it had beside its
    own: the nearest one by the router's weights. `all`: no expert had enough, so it had every token.
    """

    tokens: dict[str, int]  # by expert
    without_statistics: tuple[int, ...]
    borrowed: dict[str, str] = {}


class HeldOutReport(StrictStruct, frozen=True):
    """Squared error of a layer's output on rows that no statistics saw, relative to the original layer's contribution.

    `error` is of the result of the recipe's steps, `rtn_error` of plain rounding of the original weights.
    """

    tokens: int
    error: float
    rtn_error: float
    fallback: str | None = None  # why plain rounding was taken


class LayerReport(StrictStruct, frozen=True):
    """`error`: relative error of the layer's contribution to the residual stream, on the first calibration rows. None:
    there are none."""

    index: int
    linears: tuple[LinearReport, ...]
    scales: tuple[ScaleReport, ...]
    error: float | None
    seconds: float
    experts: ExpertsReport | None = None
    held_out: HeldOutReport | None = None
    bits: float | None = None  # mean of all weights of the linears, in the file


def with_bits(reports: Iterable[LayerReport], spec: ModelSpec, stored: Mapping[str, int]) -> tuple[LayerReport, ...]:
    """The reports with the bits of a weight. `stored`: the bits of each linear's module (models.weight_bits)."""
    return tuple(_with_bits(report, spec.layers[report.index], stored) for report in reports)


def _with_bits(report: LayerReport, layer: LayerSpec, stored: Mapping[str, int]) -> LayerReport:
    sizes = {layer.module_name(report.index, role): math.prod(shape) for role, shape in layer.linears.items()}
    linears = tuple(
        msgspec.structs.replace(linear, bits=stored[linear.module] / sizes[linear.module]) for linear in report.linears
    )
    return msgspec.structs.replace(
        report, linears=linears, bits=sum(stored[m] for m in sizes) / max(layer.num_weights, 1)
    )
