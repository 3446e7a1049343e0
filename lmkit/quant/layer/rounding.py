"""From a layer's weights, scaled and with their ranges chosen, to codes: by the recipe's rounder, and by plain rounding
for each linear that does better with it on calibration rows that were held out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmkit.models.decoder import DecoderLayer
from lmkit.qtensor import QTensor, QuantScheme, dequantize
from lmkit.quant.data.hidden_states import Stream
from lmkit.quant.layer.layer import CalibratedLayer
from lmkit.quant.layer.moments import Moments, batches, collect, run
from lmkit.quant.recipe import Gptq, SignRound
from lmkit.quant.report.report import HeldOutReport
from lmkit.quant.steps import gptq, signround

MIN_TOKENS = 128  # that an input must have seen


@dataclass(frozen=True)
class Rounding:
    """`method` that gave `weight` ("rtn" or "gptq"), and why it is not the recipe's. Errors are squared and relative to
    the output, on held-out rows, of the recipe's rounder and of plain rounding on the same grid."""

    weight: QTensor
    method: str
    fallback: str | None = None
    damping: float | None = None
    error: float | None = None
    rtn_error: float | None = None


def round_plain(calibrated: CalibratedLayer) -> dict[str, Rounding]:
    """To the nearest points of the grids chosen so far."""
    return {role: Rounding(calibrated.rounded(role, calibrated.weight(role)), "rtn") for role in calibrated.schemes}


def round_gptq(
    calibrated: CalibratedLayer,
    step: Gptq,
    stream: Stream,
    original: DecoderLayer | None,
    scales: dict[str, Tensor],
) -> dict[str, Rounding]:
    """Inputs in the order of the layer. `original` is the layer before any step, for exact targets; `scales` by role
    what the columns of a weight were multiplied by.

    The rounded weights stand in the layer, so that the linears behind are rounded on what they give.
    """
    layer = calibrated.layer
    found: dict[str, Rounding] = {}
    stages = _stages(calibrated)
    early = {} if step.sequential else _collect_each(stream, layer, original, stages)
    for stage in stages:
        moments = early or collect(stream, layer, original, tuple(group[0] for group in stage))
        for group in stage:
            inputs = moments[group[0]]
            if group[0] in scales:
                inputs.divide_exact(scales[group[0]])
            found |= _round_group(calibrated, step, group, inputs)
        layer.weights.update({role: found[role].weight for group in stage for role in group})
    return found


def _collect_each(
    stream: Stream, layer: DecoderLayer, original: DecoderLayer | None, stages: list[list[tuple[str, ...]]]
) -> dict[str, Moments]:
    return collect(stream, layer, original, tuple(group[0] for stage in stages for group in stage))


def _stages(calibrated: CalibratedLayer) -> list[list[tuple[str, ...]]]:
    """Roles that read one input with one grid, and of these groups those that stand side by side in the layer: q k v,
    o, all gates and ups, all downs."""
    layer = calibrated.layer
    input_of = layer.spec.input_of
    groups: dict[tuple[str, QuantScheme], list[str]] = {}
    for role, scheme in calibrated.schemes.items():
        groups.setdefault((input_of[role], scheme), []).append(role)
    stages: dict[str, list[tuple[str, ...]]] = {}
    for group in groups.values():
        depth = {"q": "q", "k": "q", "v": "q", "up": "gate"}
        last = group[0].split(".")[-1]
        stages.setdefault(depth.get(last, last), []).append(tuple(group))
    return list(stages.values())


def _round_group(
    calibrated: CalibratedLayer, step: Gptq, group: tuple[str, ...], moments: Moments
) -> dict[str, Rounding]:
    """Linears that read one input, as rows of one weight."""
    weights, size = [calibrated.weight(role) for role in group], calibrated.schemes[group[0]].group_size
    plain = [calibrated.rounded(role, weight) for role, weight in zip(group, weights, strict=True)]
    factor = None
    if moments.num_tokens < MIN_TOKENS:
        reason = f"its input saw {moments.num_tokens} calibration tokens, fewer than {MIN_TOKENS}"
    else:
        reason = "the Hessian of its input has no Cholesky factor, even damped"
        factor = gptq.factorize(moments.hessian, gptq.column_order(moments.hessian, step.order, size), step.damping)
    if factor is None:
        return {role: Rounding(q, "rtn", reason) for role, q in zip(group, plain, strict=True)}
    weight = torch.cat(weights)
    if moments.cross is not None and step.targets == "exact":
        weight = gptq.regress(weight, moments.cross, moments.hessian, factor.damping, step.strength)
    rounded = gptq.round_columns(weight, _stack(plain), factor)
    rounded = gptq.refine(weight, rounded, moments.hessian, step.refine)
    parts = _split(rounded, [len(w) for w in weights])
    return {
        role: _judge(w, q, p, moments, factor.damping)
        for role, w, q, p in zip(group, weights, parts, plain, strict=True)
    }


def _judge(weight: Tensor, rounded: QTensor, plain: QTensor, moments: Moments, damping: float) -> Rounding:
    """`rounded`, or `plain` where it comes nearer to what the original linear gives for the held-out rows."""
    target = moments.held_exact @ weight.T
    signal = _squared(target)
    if signal <= 0:
        return Rounding(rounded, "gptq", damping=damping)
    error, plain_error = (_squared(moments.held @ dequantize(q).T - target) / signal for q in (rounded, plain))
    if error <= plain_error:
        return Rounding(rounded, "gptq", None, damping, error, plain_error)
    return Rounding(plain, "rtn", "plain rounding errs less on held-out rows", damping, error, plain_error)


def compare_held_out(
    stream: Stream, layer: DecoderLayer, original: DecoderLayer, rtn: dict[str, QTensor]
) -> HeldOutReport | None:
    """The layer as it will be stored, and with plain rounding of its original weights, against what the original model
    gives for the held-out rows; None if there are none."""
    plain = DecoderLayer(layer.spec, layer.index, {**original.weights, **rtn}, layer.device)
    error = plain_error = signal = 0.0
    num_tokens = 0
    for hidden, exact, held in batches(stream):
        if held:
            start = hidden if exact is None else exact
            target = run(original, stream, start)
            num_tokens += len(hidden)
            signal += _squared(target - start)
            error += _squared(run(layer, stream, hidden) - target)
            plain_error += _squared(run(plain, stream, hidden) - target)
    if num_tokens == 0 or signal == 0:
        return None
    reason = "with plain rounding the whole layer errs less on held-out rows" if error > plain_error else None
    return HeldOutReport(num_tokens, error / signal, plain_error / signal, reason)


def _squared(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))


def _stack(parts: list[QTensor]) -> QTensor:
    return QTensor(
        torch.cat([q.codes for q in parts]),
        torch.cat([q.scales for q in parts]),
        torch.cat([q.zeros for q in parts]),
        parts[0].scheme,
    )


def _split(q: QTensor, sizes: list[int]) -> list[QTensor]:
    """The rows of `q` in pieces; the inverse of `_stack`."""
    parts = zip(q.codes.split(sizes), q.scales.split(sizes), q.zeros.split(sizes), strict=True)
    return [
        QTensor(codes.contiguous(), scales.contiguous(), zeros.contiguous(), q.scheme) for codes, scales, zeros in parts
    ]


def tune_layer(
    layer: DecoderLayer,
    weights: dict[str, Tensor],
    roundings: dict[str, Rounding],
    step: SignRound,
    stream: Stream,
    original: DecoderLayer,
    seed: int,
) -> dict[str, Rounding]:
    """The linears of a dense layer tuned together from `roundings`; `weights` are what these rounded.

    Batches are rows that statistics saw, drawn anew each time; the best is chosen on the held-out rows.
    """
    shape = (-1, stream.seq_len, layer.spec.hidden_size)
    rows: list[tuple[Tensor, Tensor]] = []  # (hidden, original hidden) of each row
    kept_aside: list[tuple[Tensor, Tensor]] = []
    for hidden, exact, held in batches(stream):
        pairs = zip(hidden.view(shape), (hidden if exact is None else exact).view(shape), strict=True)
        (kept_aside if held else rows).extend(pairs)
    rope = stream.geometry(1, stream.seq_len).rope
    rope = rope[0].clone(), rope[1].clone()
    rest = {role: w.clone() for role, w in layer.weights.items() if isinstance(w, Tensor) and role not in roundings}
    generator = torch.Generator().manual_seed(seed)

    def batch(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        starts = torch.cat([exact for _, exact in pairs])
        return torch.stack([hidden for hidden, _ in pairs]), run(original, stream, starts).view(shape)

    def drawn(_: int) -> tuple[Tensor, Tensor]:
        return batch([rows[i] for i in torch.randperm(len(rows), generator=generator)[: step.batch].tolist()])

    tuned = signround.tune(
        lambda tensors, hidden: signround.layer_output(layer.spec, {**rest, **tensors}, rope, hidden),
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
