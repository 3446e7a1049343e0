"""report.json: what a quantization did, to be read by people and programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from lmkit.config import StrictStruct
from lmkit.quant.evaluate import EvalResult

FILE_NAME = "report.json"


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


class LayerReport(StrictStruct, frozen=True):
    """`error`: of the layer's contribution to the residual stream, relative, on the first calibration rows."""

    index: int
    linears: tuple[LinearReport, ...]
    scales: tuple[ScaleReport, ...]
    error: float
    seconds: float


class BudgetGroup(StrictStruct, frozen=True):
    """Linears that share a scheme: the chosen one; of each candidate the mean KL in nats per token of the model's
    output when these linears alone are rounded by it, and the bits of a weight."""

    modules: tuple[str, ...]
    chosen: str
    kl: dict[str, float]
    bits: dict[str, float]


class BudgetReport(StrictStruct, frozen=True):
    """Mixed precision: average bits of a weight, asked for and reached; `kl` the sum over the chosen candidates."""

    bits: float
    reached: float
    kl: float
    num_tokens: int  # on which KL was measured
    groups: tuple[BudgetGroup, ...]
    seconds: float


class QuantReport(StrictStruct, frozen=True):
    """A whole run."""

    lmkit_version: str
    model: str
    recipe: dict[str, Any]
    calibration: dict[str, Any]
    layers: tuple[LayerReport, ...]
    bytes_before: int
    bytes_after: int
    evaluation: EvalResult | None
    seconds: float
    budget: BudgetReport | None = None

    def save(self, folder: Path) -> None:
        data = msgspec.json.format(msgspec.json.encode(self), indent=2)
        (folder / FILE_NAME).write_bytes(data + b"\n")
