"""report.json: what a quantization did, to be read by people and programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from lmkit.config import StrictStruct
from lmkit.quant.report.evaluate import EvalResult
from lmkit.quant.report.layer_report import LayerReport

FILE_NAME = "report.json"


class MixedPrecisionGroup(StrictStruct, frozen=True):
    """Linears that share a scheme: the chosen one; of each candidate the mean KL in nats per token of the model's
    output when these linears alone are rounded by it, and the bits of a weight."""

    modules: tuple[str, ...]
    chosen: str
    kl: dict[str, float]
    bits: dict[str, float]


class MixedPrecisionReport(StrictStruct, frozen=True):
    """Mixed precision: average bits of a weight, asked for and reached; `kl` the sum over the chosen candidates."""

    bits: float
    reached: float
    kl: float
    num_tokens: int  # on which KL was measured
    groups: tuple[MixedPrecisionGroup, ...]
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
    mixed_precision: MixedPrecisionReport | None = None
    peak_bytes: int | None = None  # of memory, of the whole process

    def save(self, folder: Path) -> None:
        data = msgspec.json.format(msgspec.json.encode(self), indent=2)
        (folder / FILE_NAME).write_bytes(data + b"\n")
