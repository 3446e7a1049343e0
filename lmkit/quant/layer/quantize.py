"""What a recipe's steps do to one decoder layer: observe, transform, round, and run it again as it will be stored."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.errors import UnsupportedError
from lmkit.models.decoder import DecoderLayer
from lmkit.models.source import ModelSource
from lmkit.qtensor import QTensor
from lmkit.quant.data.hidden_states import Stream
from lmkit.quant.kv.config import KVStats
from lmkit.quant.kv.fit import fit_cache
from lmkit.quant.layer.experts import empty_inputs, experts_report
from lmkit.quant.layer.layer import CalibratedLayer, relative_error
from lmkit.quant.layer.observe import Observer, sample_rows, sample_tokens
from lmkit.quant.layer.rounding import Rounding, compare_held_out, round_gptq, round_plain, tune_layer
from lmkit.quant.plan import Plan
from lmkit.quant.recipe import AwqClip, AwqScale, Gptq, Recipe, SignRound, SmoothQuant
from lmkit.quant.report.report import ClipReport, LayerReport, LinearReport, ScaleReport, stored_bits
from lmkit.quant.steps.awq_clip import ClipSearch, clip_layer
from lmkit.quant.steps.awq_scale import ScaleSearch, expand, scale_layer
from lmkit.quant.steps.rtn import round_to_nearest
from lmkit.quant.steps.smooth_quant import smooth_layer

SEARCH_PREFIX = 512  # tokens of a row on which attention is compared
STAGES = 4  # of a layer, for the progress bar: observe, scale, clip, round and run again


@dataclass
class LayerQuantizer:
    """Applies the steps of a recipe to the layers of a checkpoint, in order."""

    source: ModelSource
    recipe: Recipe
    plan: Plan
    stream: Stream

    def quantize(self, layer: DecoderLayer, seen: KVStats, done: Callable[[int], None]) -> LayerReport:
        """Rewrite `layer.weights` (float32) as they will be stored, fill `seen`, move the stream behind the layer.

        `done(stage)` is told the progress. Raises CheckpointError or UnsupportedError naming the layer and the linear.
        """
        start = time.perf_counter()
        done(0)
        calibrated, first_output = self._observe(layer, seen)
        fit_cache(calibrated, seen, self.recipe.kv, first_output)
        original = DecoderLayer(layer.spec, layer.index, dict(layer.weights), layer.device)
        done(1)
        rtn = {role: round_to_nearest(calibrated.weight(role), scheme) for role, scheme in calibrated.schemes.items()}
        rtn_errors = _sample_errors(calibrated, {role: calibrated.weight(role) for role in rtn}, rtn)
        scale, clip = self.recipe.step(AwqScale), self.recipe.step(AwqClip)
        scales = [] if scale is None else scale_layer(calibrated, scale)
        if (smooth := self.recipe.step(SmoothQuant)) is not None:
            scales = smooth_layer(calibrated, smooth, self.recipe.activations)
        done(2)
        clips = {} if clip is None else clip_layer(calibrated, clip)
        done(3)
        weights = {role: calibrated.weight(role) for role in rtn}
        roundings = self._round(calibrated, original, scales)
        self._round_dense(layer)
        held_out = None if self.recipe.is_plain else compare_held_out(self.stream, layer, original, rtn)
        if held_out is not None and held_out.fallback:
            layer.weights.update({**original.weights, **rtn})
            roundings = {role: Rounding(q, "rtn", held_out.fallback) for role, q in rtn.items()}
            scales, clips, weights = [], {}, {role: w for role, w in original.weights.items() if isinstance(w, Tensor)}
        errors = _sample_errors(calibrated, weights, {role: rounding.weight for role, rounding in roundings.items()})
        return LayerReport(
            index=layer.index,
            linears=tuple(
                self._linear_report(role, layer, roundings.get(role), clips.get(role), rtn_errors, errors)
                for role in layer.spec.linears
            ),
            scales=tuple(_scale_report(found) for found in scales),
            error=self._advance(layer, original, first_output),
            seconds=round(time.perf_counter() - start, 2),
            experts=experts_report(calibrated),
            held_out=held_out,
        )

    def _round(
        self, calibrated: CalibratedLayer, original: DecoderLayer, scales: list[ScaleSearch]
    ) -> dict[str, Rounding]:
        """Codes for every linear that is quantized; they stand in the layer then."""
        layer, step = calibrated.layer, self.recipe.step(Gptq)
        weights = {role: calibrated.weight(role) for role in calibrated.schemes}
        if step is None:
            roundings = round_plain(calibrated)
        else:
            columns = {role: expand(found.best.scale, role, layer.spec) for found in scales for role in found.consumers}
            exact = original if self.stream.has_exact else None
            roundings = round_gptq(calibrated, step, self.stream, exact, columns)
        if (tuner := self.recipe.step(SignRound)) is not None:
            with torch.inference_mode(False):
                weights = {role: weight.clone() for role, weight in weights.items()}
                roundings = tune_layer(
                    layer, weights, roundings, tuner, self.stream, original, self.recipe.calibration.seed
                )
        layer.weights.update({role: rounding.weight for role, rounding in roundings.items()})
        return roundings

    def _linear_report(
        self,
        role: str,
        layer: DecoderLayer,
        rounding: Rounding | None,
        clip: ClipSearch | None,
        rtn_errors: dict[str, float],
        errors: dict[str, float],
    ) -> LinearReport:
        module = layer.spec.module_name(layer.index, role)
        return LinearReport(
            module=module,
            format="dense" if rounding is None else self.recipe.format,
            reason=self.plan.dense.get(module),
            clip=_clip_report(clip),
            rtn_error=rtn_errors.get(role),
            error=errors.get(role),
            method=None if rounding is None else rounding.method,
            fallback=None if rounding is None else rounding.fallback,
            damping=None if rounding is None else rounding.damping,
            held_out_error=None if rounding is None else rounding.error,
            held_out_rtn_error=None if rounding is None else rounding.rtn_error,
            bits=stored_bits(layer.weights[role], 8 * self.source.stored_dtype(layer.index, role).itemsize),
        )

    def _observe(self, layer: DecoderLayer, seen: KVStats) -> tuple[CalibratedLayer, Tensor]:
        """Run the layer as it is: (what was seen of it, its output for the first batch of rows)."""
        recipe, stream = self.recipe, self.stream
        count = (recipe.step(AwqScale) or AwqScale()).tokens
        row_ids, length = sample_rows(stream.num_rows, stream.seq_len, count, SEARCH_PREFIX)
        token_ids = sample_tokens(stream.num_rows * stream.seq_len, count, recipe.calibration.seed)
        schemes = self.plan.schemes(layer.index)
        inputs = empty_inputs(layer.spec, schemes, row_ids, token_ids, recipe.calibration.seed)
        layer.shows_all_tokens = recipe.calibration.all_experts
        outputs = stream.outputs(layer, observer=Observer(inputs), seen=seen)
        for number, output in outputs:
            if number == 0:
                first_output = output
        calibrated = CalibratedLayer(
            layer=layer,
            inputs=inputs,
            sequences=stream.geometry(len(row_ids) // length, length),
            schemes=schemes,
            read_back=functools.partial(self.source.read_back, layer.index),
        )
        calibrated.check_finite()
        return calibrated, first_output

    def _advance(self, layer: DecoderLayer, original: DecoderLayer, first_output: Tensor) -> float:
        """Every batch through the layer, and the original stream through the original layer. Returns the relative
        squared error of what the layer adds to the first batch, whose output before quantization was `first_output`."""
        stream = self.stream
        contribution = (first_output - stream.hidden(0)).square().sum(dtype=torch.float64)
        for number, output in stream.outputs(layer):
            if number == 0:
                error = (output - first_output).square().sum(dtype=torch.float64)
            stream.put(number, output)
        if stream.has_exact:
            for number, output in stream.outputs(original, exact=True):
                stream.put(number, output, exact=True)
        stream.advance()
        return float(error / contribution) if contribution > 0 else 0.0

    def _round_dense(self, layer: DecoderLayer) -> None:
        """Tensors that are not quantized take the values they will have in the file."""
        source = self.source
        for role, weight in layer.weights.items():
            if isinstance(weight, Tensor):
                read_back = source.read_back(layer.index, role, weight)
                if not bool(read_back.isfinite().all()):
                    dtype = source.stored_dtype(layer.index, role)
                    raise UnsupportedError(f"layer {layer.index}: {role} is beyond {dtype} once scaled")
                layer.weights[role] = read_back


def _sample_errors(
    calibrated: CalibratedLayer, weights: dict[str, Tensor], rounded: dict[str, QTensor]
) -> dict[str, float]:
    return {role: relative_error(weights[role], q, calibrated.input(role).sample) for role, q in rounded.items()}


def _scale_report(found: ScaleSearch) -> ScaleReport:
    return ScaleReport(
        source=found.source,
        consumers=found.consumers,
        chosen=found.best.name,
        loss=found.losses[found.best.name],
        identity_loss=found.losses["identity"],
        losses={name: loss if math.isfinite(loss) else None for name, loss in found.losses.items()},
    )


def _clip_report(found: ClipSearch | None) -> ClipReport | None:
    if found is None:
        return None
    return ClipReport(
        loss=float(found.loss.sum()),
        unclipped_loss=float(found.unclipped.sum()),
        clipped_share=found.clipped_share,
    )
