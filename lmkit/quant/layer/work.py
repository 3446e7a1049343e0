"""A layer while the steps of a recipe rewrite it one after the other, and their entries of the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from lmkit.formats.names import Activations
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.qtensor import QTensor
from lmkit.quant.data.hidden_states import Stream
from lmkit.quant.layer.layer import CalibratedLayer
from lmkit.quant.layer.passes import LayerPass
from lmkit.quant.report.layer_report import ClipReport, ScaleReport


@dataclass(frozen=True)
class Rounding:
    """A rounded weight. `method` gave it; `fallback` says why this is not the recipe's method.

    The errors are squared and relative to the output, on held-out rows: `error` of the recipe's rounder, `rtn_error` of
    plain rounding on the same grid.
    """

    weight: QTensor
    method: str
    fallback: str | None = None
    damping: float | None = None
    error: float | None = None
    rtn_error: float | None = None


@dataclass
class LayerWork:
    """The steps rewrite `calibrated`. `original` is the layer before the first step. A transform fills `rows`,
    `columns` and `scales`, clipping fills `clips`, and a rounder or tuner fills `roundings`."""

    calibrated: CalibratedLayer
    original: DecoderLayer
    stream: Stream
    activations: Activations  # how engines will round the inputs of linears
    seed: int
    curvature: Mapping[str, Tensor] = field(default_factory=dict)  # of the layer's outputs, if a step wants it
    rows: dict[str, Tensor] = field(default_factory=dict)  # by role, the factors on a weight's rows
    columns: dict[str, Tensor] = field(default_factory=dict)  # by role, the factors on a weight's columns
    scales: list[ScaleReport] = field(default_factory=list)
    clips: dict[str, ClipReport] = field(default_factory=dict)
    roundings: dict[str, Rounding] = field(default_factory=dict)
    unrounded: dict[str, Tensor] = field(default_factory=dict)  # by role, the weights before their rounding
    passes: tuple[LayerPass, LayerPass | None] = field(init=False)  # the layer's hidden states and the original's

    def __post_init__(self) -> None:
        self.start_passes()

    def start_passes(self) -> None:
        """Send both streams through the layer from its beginning, as weights that they have passed were rewritten."""
        exact = LayerPass(self.stream, self.original, exact=True) if self.stream.has_exact else None
        self.passes = LayerPass(self.stream, self.calibrated.layer), exact

    def store(self, roundings: dict[str, Rounding]) -> None:
        """Put rounded weights into the layer. A weight that is rounded for the first time is kept in `unrounded`."""
        new = [role for role in roundings if role not in self.roundings]
        self.unrounded |= {role: self.calibrated.weight(role) for role in new}
        self.roundings |= roundings
        self.calibrated.layer.weights.update({role: rounding.weight for role, rounding in roundings.items()})
