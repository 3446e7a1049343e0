"""SignRound (arXiv 2309.05516): the signs of gradients tune the rounding of a whole layer's weights.

The tuned parameters are an offset of each weight before it is rounded and a factor on each end of each group's range.
The loss is the squared error of the layer's output. Tuning starts from codes that another rounder chose. The loss of
the result is at most the loss of these codes, on rows that were not tuned on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor
from torch.nn import functional

from lmkit.config import PositiveInt
from lmkit.formats.names import Activations
from lmkit.models.spec import ModelSpec
from lmkit.option import Note
from lmkit.qtensor import SMALLEST_SCALE, QTensor, QuantScheme, dequantize
from lmkit.quant.layer.gradients import layer_output
from lmkit.quant.layer.moments import batches, run
from lmkit.quant.layer.work import LayerWork, Rounding
from lmkit.quant.steps.base import LayerCost, Speed, Stage, Step

CHECKS = 10  # how often the loss on the rows kept aside is computed
MARGIN = 0.49  # largest distance of a weight from its code at the start, in steps
RANGE = (0.5, 1.5)  # of the factors on the ends of a group's range

Batch = tuple[Tensor, Tensor]  # (hidden states, targets) float32 [rows, seq_len, hidden]


class SignRound(Step, frozen=True, tag="signround"):
    """Tune the rounding and the ranges of a whole layer by gradient signs."""

    stage: ClassVar = Stage.TUNER

    iters: Annotated[int, Meta(ge=1), Note("Iterations for a layer.")] = 200
    batch: Annotated[PositiveInt, Note("Rows of the text in one iteration.")] = 8

    @property
    def needs_exact(self) -> bool:
        return True

    def refuses(self, scheme: QuantScheme, activations: Activations) -> str | None:
        return self.needs_integers(scheme)

    def refuses_model(self, spec: ModelSpec) -> str | None:
        if any(layer.is_sparse for layer in spec.kinds):
            return "signround tunes dense layers only, and this model has others"
        return self.needs_states_alone(spec)

    def apply(self, work: LayerWork) -> None:
        with torch.inference_mode(False):
            weights = {role: weight.clone() for role, weight in work.unrounded.items()}
            work.store(tune_layer(work, weights, self))
        work.start_passes()

    def seconds(self, cost: LayerCost, speed: Speed) -> float:
        tuning = cost.forward_seconds(3 * self.iters * self.batch * cost.seq_len, speed.full, speed)
        return tuning + self.iters * 3 * cost.layer.num_weights / speed.rounding

    def working_numbers(self, cost: LayerCost) -> int:
        layers = cost.layer.num_weights * cost.num_streams
        return 8 * layers + cost.seq_len * (cost.layer.num_heads * cost.seq_len + 8 * cost.token_width)


def tune_layer(work: LayerWork, weights: dict[str, Tensor], step: SignRound) -> dict[str, Rounding]:
    """Tune the linears of a dense layer together, from their roundings. `weights` are the weights before rounding.

    A batch is drawn anew each time from the rows that statistics saw. The best result is chosen on the held-out rows.
    """
    layer, stream, original, roundings = work.calibrated.layer, work.stream, work.original, work.roundings
    shape = (-1, stream.seq_len, layer.spec.hidden_size)
    rows: list[tuple[Tensor, Tensor]] = []  # (hidden, original hidden) of each row
    kept_aside: list[tuple[Tensor, Tensor]] = []
    for hidden, exact, held in batches(stream):
        pairs = zip(hidden.cpu().view(shape), (hidden if exact is None else exact).cpu().view(shape), strict=True)
        (kept_aside if held else rows).extend(pairs)
    rest = {role: w.clone() for role, w in layer.weights.items() if isinstance(w, Tensor) and role not in roundings}
    generator = torch.Generator().manual_seed(work.seed)

    def batch(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        starts = stream.here(torch.cat([exact for _, exact in pairs]))
        hidden = stream.here(torch.stack([hidden for hidden, _ in pairs]))
        return hidden, run(original, stream, starts).view(shape)

    def drawn(_: int) -> tuple[Tensor, Tensor]:
        return batch([rows[i] for i in torch.randperm(len(rows), generator=generator)[: step.batch].tolist()])

    tuned = tune(
        lambda tensors, hidden: layer_output(layer, {**rest, **tensors}, hidden),
        weights,
        {role: rounding.weight for role, rounding in roundings.items()},
        drawn,
        batch(kept_aside or rows[: step.batch]),
        step.iters,
    )
    if tuned.losses[1] >= tuned.losses[0]:
        reason = "tuning found nothing better for the held-out rows"
        return {role: replace(rounding, fallback=rounding.fallback or reason) for role, rounding in roundings.items()}
    return {role: replace(roundings[role], weight=q, method="signround") for role, q in tuned.weights.items()}


@dataclass
class Tuned:
    """`losses`: mean squared error on the rows kept aside, before tuning and with `weights`."""

    weights: dict[str, QTensor]
    losses: tuple[float, float]


class TunedWeight:
    """One linear's parameters. `values` float32 [out, groups, group_size] are weights in steps of the first scales."""

    def __init__(self, weight: Tensor, start: QTensor) -> None:
        self.scheme = start.scheme
        grouped = (*start.scales.shape, -1)
        self.scales, self.zeros = start.scales.float().unsqueeze(-1), start.zeros.float().unsqueeze(-1)
        steps = start.codes.float().view(grouped) - self.zeros
        values = weight.view(grouped) / self.scales
        self.values = steps + (values - steps).clamp(-MARGIN, MARGIN)
        self.offset = torch.zeros_like(steps, requires_grad=True)
        self.low = torch.ones_like(self.scales, requires_grad=True)
        self.high = torch.ones_like(self.scales, requires_grad=True)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self.offset, self.low, self.high

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """(codes [out, groups, group_size], scales, zeros [out, groups, 1]), float32 with gradients, as stored."""
        top = self.scheme.max_code
        if self.scheme.symmetric:
            scales, zeros = self.scales * self.high, self.zeros
        else:
            below = self.zeros * self.low
            scales = self.scales * ((top - self.zeros) * self.high + below) / top
        scales = _straight(scales, scales.to(torch.float16).float()).clamp_min(SMALLEST_SCALE)
        if not self.scheme.symmetric:
            zeros = below * self.scales / scales
            zeros = _straight(zeros, zeros.round()).clamp(0, top)
        codes = self.values * self.scales / scales + self.offset
        return (_straight(codes, codes.round()) + zeros).clamp(0, top), scales, zeros

    def dense(self) -> Tensor:
        codes, scales, zeros = self.parts()
        return ((codes - zeros) * scales).flatten(1)

    def stored(self) -> QTensor:
        codes, scales, zeros = (part.detach() for part in self.parts())
        return QTensor(
            codes.flatten(1).to(torch.uint8),
            scales[..., 0].to(torch.float16),
            zeros[..., 0].to(torch.uint8),
            self.scheme,
        )

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter -= rate * parameter.grad.sign()
                parameter.grad = None
        for factor in (self.low, self.high):
            factor.clamp_(*RANGE)


def tune(
    forward: Callable[[Mapping[str, Tensor], Tensor], Tensor],
    weights: dict[str, Tensor],
    start: dict[str, QTensor],
    batch: Callable[[int], Batch],
    kept_aside: Batch,
    iters: int,
) -> Tuned:
    """Tune the linears from `start`. `weights` are their unrounded float32 weights.

    `forward(weights by role, hidden)` computes the layer; `batch(i)` gives the rows of iteration i.
    """
    with torch.inference_mode(False), torch.enable_grad():
        linears = {role: TunedWeight(weights[role].clone(), _cloned(q)) for role, q in start.items()}
        best, first = dict(start), _loss(forward, start, kept_aside)
        lowest = first
        for i in range(iters):
            hidden, target = (part.clone() for part in batch(i))
            output = forward({role: linear.dense() for role, linear in linears.items()}, hidden)
            functional.mse_loss(output, target).backward()
            for linear in linears.values():
                linear.step((1 - i / iters) / iters)
            if (i + 1) % max(1, iters // CHECKS) == 0 or i + 1 == iters:
                stored = {role: linear.stored() for role, linear in linears.items()}
                if (loss := _loss(forward, stored, kept_aside)) < lowest:
                    best, lowest = stored, loss
    return Tuned(best, (first, lowest))


@torch.no_grad()
def _loss(
    forward: Callable[[Mapping[str, Tensor], Tensor], Tensor], weights: Mapping[str, QTensor], batch: Batch
) -> float:
    output = forward({role: dequantize(q) for role, q in weights.items()}, batch[0].clone())
    return float(functional.mse_loss(output, batch[1]))


def _cloned(q: QTensor) -> QTensor:
    """A copy that is made outside inference mode, where gradients are allowed."""
    return QTensor(q.codes.clone(), q.scales.clone(), q.zeros.clone(), q.scheme)


def _straight(x: Tensor, value: Tensor) -> Tensor:
    """`value` with the gradient of x."""
    return x + (value - x).detach()
