"""Turn the residual stream and the values of attention in the weights, before the first layer (quant.rotation)."""

from __future__ import annotations

from typing import Annotated, ClassVar

from lmkit.errors import UnsupportedError
from lmkit.models.source import ModelSource
from lmkit.models.spec import ModelSpec
from lmkit.option import Note
from lmkit.quant.layer.work import LayerWork
from lmkit.quant.rotation import problem, stream_problem, turned
from lmkit.quant.steps.base import Stage, Step


class Rotate(Step, frozen=True, tag="rotate"):
    """Spread large channels over all, by rotations that leave the function alone."""

    stage: ClassVar = Stage.ROTATION
    is_plain: ClassVar = True  # it needs no text

    residual: Annotated[bool, Note("The residual stream (R1); tied embeddings get a head of their own.")] = True
    values: Annotated[bool, Note("Each head of values (R2).")] = True

    def __post_init__(self) -> None:
        if not (self.residual or self.values):
            raise ValueError("rotate turns nothing without `residual` and `values`")

    def refuses_model(self, spec: ModelSpec) -> str | None:
        reason = problem(spec)
        return None if reason is None else f"rotate does not go with {reason}"

    def opened(self, source: ModelSource) -> ModelSource:
        if reason := self.refuses_model(source.spec):
            raise UnsupportedError(f"{source.reader.path}: {reason}")
        if self.residual and (reason := stream_problem(source)):
            what = f"rotate does not turn the stream of {reason}; `residual: false` turns values alone"
            raise UnsupportedError(f"{source.reader.path}: {what}")
        return turned(source, residual=self.residual, values=self.values)

    def whole_numbers(self, spec: ModelSpec, group_size: int) -> int:
        return 2 * spec.vocab_size * spec.hidden_size * self.residual  # embeddings and head, turned

    def apply(self, work: LayerWork) -> None:
        """The layer was read turned."""
