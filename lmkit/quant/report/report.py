"""report.json: the report on a quantization, for people and programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from lmkit.config import StrictStruct
from lmkit.quant.report.evaluate import EvalResult
from lmkit.quant.report.head_storage import HeadReport
from lmkit.quant.report.layer_report import LayerReport

FILE_NAME = "report.json"


class MixedPrecisionGroup(StrictStruct, frozen=True):
    """Linears that share a scheme: the chosen scheme, and for each candidate `kl` and the bits of a weight.

    `kl` is the mean KL in nats per token of the model's output when these linears alone are rounded by the candidate.
    """

    modules: tuple[str, ...]
    chosen: str
    kl: dict[str, float]
    bits: dict[str, float]


class MixedPrecisionReport(StrictStruct, frozen=True):
    """Mixed precision: average bits of a weight, as asked for and as reached. `kl` is the sum over the chosen
    candidates."""

    bits: float
    reached: float
    kl: float
    num_tokens: int  # KL was measured on these
    groups: tuple[MixedPrecisionGroup, ...]
    seconds: float


class RefineReport(StrictStruct, frozen=True):
    """Tuning against the original's logits: the mean KL in nats per token on held-out rows, before and after."""

    steps: int
    rows: int  # that it was tuned on
    held_out_tokens: int
    kl_before: float
    kl: float
    seconds: float
    fallback: str | None = None  # why the layers stayed as they were


class QuantReport(StrictStruct, frozen=True):
    """The report on a whole run."""

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
    refined: RefineReport | None = None
    head: HeadReport | None = None
    groups: str | None = None  # the sizes of groups, and why
    bits: float | None = None  # of a weight in linears, in the file (models.weight_bits)
    peak_bytes: int | None = None  # memory of the whole process

    def save(self, folder: Path) -> None:
        data = msgspec.json.format(msgspec.json.encode(self), indent=2)
        (folder / FILE_NAME).write_bytes(data + b"\n")
