"""Round to the nearest point of the grid."""

from __future__ import annotations

from typing import ClassVar

from lmkit.quant.layer.work import LayerWork, Rounding
from lmkit.quant.steps.base import Stage, Step


class Rtn(Step, frozen=True, tag="rtn"):
    """Round to the nearest point of the grid."""

    stage: ClassVar = Stage.ROUNDER
    is_plain: ClassVar = True

    def apply(self, work: LayerWork) -> None:
        layer = work.calibrated
        work.store({role: Rounding(layer.rounded(role, layer.weight(role)), "rtn") for role in layer.schemes})
