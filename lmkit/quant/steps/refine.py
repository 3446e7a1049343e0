"""Refining: after the last layer, scales, norms and biases are tuned against the original model's logits.

The steps before keep each layer's output. What they miss adds up over the layers, and it does not count alike: this
step lowers the KL divergence itself, on the rows that statistics saw. The result is kept if the divergence on the
held-out rows is lower with it. Codes and zeros stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar

import torch
from msgspec import Meta

from lmkit.config import PositiveInt
from lmkit.formats.names import Activations
from lmkit.models.spec import ModelSpec
from lmkit.option import Note
from lmkit.qtensor import QuantScheme
from lmkit.quant.refine.tuning import Tuning
from lmkit.quant.refine.whole import Finished, WholeModel
from lmkit.quant.steps.base import LayerCost, Speed, Stage, Step

PASSES = 5  # the time of a step in forward passes: forward, once more with gradients, and backward


class Refine(Step, frozen=True, tag="refine"):
    """Tune scales, norms and biases of all layers together, against the original's logits."""

    stage: ClassVar = Stage.MODEL

    epochs: Annotated[PositiveInt, Note("How often each row is used.")] = 1
    batch: Annotated[PositiveInt, Note("Rows of a step.")] = 4
    rate: Annotated[float, Meta(gt=0, le=0.1), Note("The relative change of a scale in one of the first steps.")] = (
        0.001
    )

    @property
    def rows(self) -> int:
        return self.batch

    @property
    def needs_exact(self) -> bool:
        return True

    def refuses(self, scheme: QuantScheme, activations: Activations) -> str | None:
        return self.needs_integers(scheme)

    def refuses_model(self, spec: ModelSpec) -> str | None:
        return self.needs_states_alone(spec)

    def finish(self, model: WholeModel, done: Callable[[int, int], None]) -> Finished:
        with torch.inference_mode(False):
            return Tuning(model, self.epochs, self.batch, self.rate).finish(done)

    def seconds(self, cost: LayerCost, speed: Speed) -> float:
        steps = self.epochs * cost.num_tokens / (self.batch * cost.seq_len)
        passes = cost.forward_seconds(self.epochs * PASSES * cost.num_tokens, speed.short, speed)
        return passes + 2 * steps * cost.layer.num_weights / speed.rounding

    def seconds_of_head(self, spec: ModelSpec, num_tokens: int, speed: Speed) -> float:
        return self.epochs * 4 * 2.0 * num_tokens * spec.vocab_size * spec.hidden_size / speed.short

    def working_numbers(self, cost: LayerCost) -> int:
        # The layer, its gradients and a copy in other numbers; what autograd keeps of a batch of tokens.
        return 3 * cost.layer.num_weights + 3 * cost.batch_tokens * cost.token_width

    def whole_numbers(self, spec: ModelSpec, group_size: int) -> int:
        groups = sum(layer.num_weights // max(group_size, 1) for layer in spec.layers)
        return 3 * groups + 2 * spec.vocab_size * spec.hidden_size
