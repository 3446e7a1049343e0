"""What a recipe's steps do to one decoder layer: observe, transform, round, and run it again as it will be stored."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.errors import UnsupportedError
from lmkit.models import roles
from lmkit.models.decoder import DecoderLayer
from lmkit.models.loader import ModelSource
from lmkit.quant.kv import KVStats
from lmkit.quant.layer import CalibratedLayer, relative_error
from lmkit.quant.observe import InputStats, Observer, sample_rows, sample_tokens
from lmkit.quant.plan import Plan
from lmkit.quant.recipe import AwqClip, AwqScale, Recipe
from lmkit.quant.report import ClipReport, LayerReport, LinearReport, ScaleReport
from lmkit.quant.rounders.awq_clip import ClipSearch, clip_layer
from lmkit.quant.rounders.rtn import round_to_nearest
from lmkit.quant.stream import Stream
from lmkit.quant.transforms.awq_scale import ScaleSearch, scale_layer

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
        done(1)
        rtn_errors = {
            role: relative_error(weight, round_to_nearest(weight, scheme), calibrated.input(role).sample)
            for role, scheme in calibrated.schemes.items()
            for weight in [calibrated.weight(role)]
        }
        scale, clip = self.recipe.step(AwqScale), self.recipe.step(AwqClip)
        if scale is not None and clip is not None:
            clip_layer(calibrated, clip)  # so that scales are compared on grids like those that will be stored
        scales = [] if scale is None else scale_layer(calibrated, scale)
        done(2)
        clips = {} if clip is None else clip_layer(calibrated, clip)
        done(3)
        errors = {}
        for role in calibrated.schemes:
            weight = calibrated.weight(role)
            rounded = calibrated.rounded(role, weight)
            errors[role] = relative_error(weight, rounded, calibrated.input(role).sample)
            layer.weights[role] = rounded
        self._round_dense(layer)
        linears = [
            LinearReport(
                module=(module := roles.module_name(layer.index, role)),
                format="dense" if module in self.plan.dense else self.recipe.format,
                reason=self.plan.dense.get(module),
                clip=_clip_report(clips.get(role)),
                rtn_error=rtn_errors.get(role),
                error=errors.get(role),
            )
            for role in roles.linears(layer.spec, layer.index)
        ]
        return LayerReport(
            index=layer.index,
            linears=tuple(linears),
            scales=tuple(_scale_report(found) for found in scales),
            error=self._advance(layer, first_output),
            seconds=round(time.perf_counter() - start, 2),
        )

    def _observe(self, layer: DecoderLayer, seen: KVStats) -> tuple[CalibratedLayer, Tensor]:
        """Run the layer as it is: (what was seen of it, its output for the first batch of rows)."""
        spec, recipe, stream = self.source.spec, self.recipe, self.stream
        count = (recipe.step(AwqScale) or AwqScale()).tokens
        row_ids, length = sample_rows(stream.num_rows, stream.seq_len, count, SEARCH_PREFIX)
        token_ids = sample_tokens(stream.num_rows * stream.seq_len, count, recipe.calibration.seed)
        schemes = self.plan.schemes(layer.index)
        input_of = roles.input_of(spec, layer.index)
        inputs = {
            first: InputStats.empty(
                spec.linear_shape(first)[1], schemes[role].group_size, row_ids if first == "attn.q" else token_ids
            )
            for role in reversed(schemes)
            for first in [input_of[role]]
        }
        for number, output in stream.outputs(layer, observer=Observer(inputs), seen=seen):
            if number == 0:
                first_output = output
        calibrated = CalibratedLayer(
            layer=layer,
            inputs=inputs,
            sequences=stream.geometry(len(row_ids) // length, length),
            schemes=schemes,
            norm_dtype=self._stored_dtype(layer.index, "norm.attn"),
        )
        calibrated.check_finite()
        return calibrated, first_output

    def _advance(self, layer: DecoderLayer, exact: Tensor) -> float:
        """Every batch through the layer. Returns the relative squared error of what the layer adds to the first batch,
        whose output before quantization was `exact`."""
        stream = self.stream
        contribution = (exact - stream.hidden(0)).square().sum(dtype=torch.float64)
        for number, output in stream.outputs(layer):
            if number == 0:
                error = (output - exact).square().sum(dtype=torch.float64)
            stream.put(number, output)
        stream.advance()
        return float(error / contribution) if contribution > 0 else 0.0

    def _round_dense(self, layer: DecoderLayer) -> None:
        """Tensors that are not quantized take the values they will have in the file."""
        for role, weight in layer.weights.items():
            if isinstance(weight, Tensor):
                stored = weight.to(self._stored_dtype(layer.index, role))
                if not bool(stored.isfinite().all()):
                    raise UnsupportedError(f"layer {layer.index}: {role} is beyond {stored.dtype} once scaled")
                layer.weights[role] = stored.float()

    def _stored_dtype(self, index: int, role: str) -> torch.dtype:
        return self.source.reader.tensor("".join(tensor_name(index, role))).dtype


def tensor_name(index: int, role: str) -> tuple[str, str]:
    """`attn.q.bias` of layer 3 -> ("model.layers.3.self_attn.q_proj", ".bias")."""
    kind = ".bias" if role.endswith(".bias") else ".weight"
    return roles.module_name(index, role.removesuffix(".bias")), kind


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
