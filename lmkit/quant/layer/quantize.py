"""Quantize one decoder layer by a recipe: observe it, transform it, round it, and run it again as it will be stored."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.kernels.cuda.module import tensor_device
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.source import ModelSource
from lmkit.qtensor import QTensor
from lmkit.quant.data.hidden_states import Stream
from lmkit.quant.kv.config import KVStats
from lmkit.quant.kv.fit import fit_cache, fit_first, prepare_cache
from lmkit.quant.layer.experts import empty_inputs, experts_report
from lmkit.quant.layer.grid import largest_together, round_to_nearest
from lmkit.quant.layer.held_out import compare_held_out
from lmkit.quant.layer.layer import CalibratedLayer, relative_error
from lmkit.quant.layer.observe import InputStats, Observer, sample_rows, sample_tokens
from lmkit.quant.layer.passes import LayerPass
from lmkit.quant.layer.work import LayerWork, Rounding
from lmkit.quant.plan import Plan
from lmkit.quant.recipe import Recipe
from lmkit.quant.report.layer_report import LayerReport, LinearReport
from lmkit.quant.steps.base import Stage

SEARCH_PREFIX = 512  # attention is compared on at most so many tokens of a row
REPORTED_TOKENS = 256  # of a linear's sample, on which the report's errors are measured, or a few more


@dataclass
class LayerQuantizer:
    """Applies the steps of a recipe to the layers of a checkpoint, in order."""

    source: ModelSource
    recipe: Recipe
    plan: Plan
    stream: Stream
    curvature: Mapping[str, Tensor]  # of the layer's outputs, if a step wants it (layer.curvature)

    def quantize(self, layer: DecoderLayer, seen: KVStats, done: Callable[[int], None]) -> LayerReport:
        """Rewrite `layer.weights` (float32) as they will be stored, fill `seen`, and move the stream after the layer.

        `done(stage)` reports the progress. Raises CheckpointError or UnsupportedError; the error names the layer and
        the linear.
        """
        start = time.perf_counter()
        layer.multiply_in(self.recipe.product_dtype(layer.device))
        prepare_cache(layer, seen, self.recipe.kv)
        done(0)
        calibrated, first_output = self._observe(layer, seen)
        rows = fit_cache(calibrated, seen, self.recipe.kv, first_output)
        original = layer.with_weights(dict(layer.weights))
        rtn = {role: calibrated.rounded(role) for role in calibrated.schemes}
        rtn_errors = _sample_errors(calibrated, {role: calibrated.weight(role) for role in rtn}, rtn)
        work = LayerWork(
            calibrated,
            original,
            self.stream,
            self.recipe.activations,
            self.recipe.calibration.seed,
            self.curvature,
            rows,
        )
        for stage, step in enumerate(self.recipe.layer_steps, 1):
            done(stage)
            if step.stage is Stage.ROUNDER:
                self._round_dense(calibrated)
            step.apply(work)
        for each in work.passes:
            if each is not None:
                self._finish(each)
        held_out = None if self.recipe.is_plain else compare_held_out(self.stream, original, rtn)
        if held_out is not None and held_out.fallback:
            work = self._start_over(work, rtn, held_out.fallback)
            self._finish(work.passes[0])
        for each in work.passes:
            if each is not None:
                self.stream.keep(each.layer, exact=each.exact)
        starts = (self.stream.hidden(number)[:: self.stream.seq_len] for number in range(len(self.stream)))
        fit_first(layer, seen, self.recipe.kv, starts)
        if self.recipe.activations == "float4":
            calibrated.tell_inputs()
        roundings = {role: rounding.weight for role, rounding in work.roundings.items()}
        errors = _sample_errors(calibrated, work.unrounded, roundings)
        return LayerReport(
            index=layer.index,
            linears=tuple(self._linear_report(role, work, rtn_errors, errors) for role in layer.spec.linears),
            scales=tuple(work.scales),
            error=self._advance(first_output),
            seconds=round(time.perf_counter() - start, 2),
            experts=experts_report(calibrated),
            held_out=held_out,
        )

    def _start_over(self, work: LayerWork, rtn: dict[str, QTensor], reason: str) -> LayerWork:
        """Restore the original weights and round them plainly."""
        work.calibrated.layer.weights.update(work.original.weights)
        plain = LayerWork(work.calibrated, work.original, work.stream, work.activations, work.seed)
        plain.store({role: Rounding(q, "rtn", reason) for role, q in rtn.items()})
        return plain

    def _linear_report(
        self, role: str, work: LayerWork, rtn_errors: dict[str, float], errors: dict[str, float]
    ) -> LinearReport:
        rounding = work.roundings.get(role)
        report = linear_report(self.source, self.recipe, self.plan, work.calibrated.layer, role, errors.get(role))
        return msgspec.structs.replace(
            report,
            clip=work.clips.get(role),
            rtn_error=rtn_errors.get(role),
            method=None if rounding is None else rounding.method,
            fallback=None if rounding is None else rounding.fallback,
            damping=None if rounding is None else rounding.damping,
            held_out_error=None if rounding is None else rounding.error,
            held_out_rtn_error=None if rounding is None else rounding.rtn_error,
        )

    def _observe(self, layer: DecoderLayer, seen: KVStats) -> tuple[CalibratedLayer, Tensor]:
        """Run the layer as it is, on as many rows as its statistics need. Returns (the layer with its statistics, its
        output for the first batch of rows)."""
        recipe, stream = self.recipe, self.stream
        count, every = recipe.sample_tokens, recipe.observed_share(layer.spec)
        num_rows = stream.rows_of(every)
        row_ids, length = sample_rows(num_rows, stream.seq_len, count, SEARCH_PREFIX)
        token_ids = sample_tokens(num_rows * stream.seq_len, count, recipe.calibration.seed)
        schemes = self.plan.schemes(layer.index, layer.spec)
        at = tensor_device(layer.device)
        inputs = empty_inputs(layer.spec, schemes, row_ids, token_ids, recipe.calibration.seed, at)
        if recipe.kv.is_fitted and "attn.q" in layer.spec.linears and "attn.q" not in inputs:  # it stays dense
            inputs["attn.q"] = InputStats.empty(layer.spec.hidden_size, -1, row_ids, at)
        layer.shows_all_tokens = recipe.calibration.all_experts
        outputs = stream.outputs(layer, observer=Observer(inputs), seen=seen, every=every)
        for number, output in outputs:
            if number == 0:
                first_output = output
        calibrated = CalibratedLayer(
            layer=layer,
            inputs=inputs,
            sequences=stream.sampled(row_ids, length, every),
            schemes=schemes,
            read_back=functools.partial(self.source.read_back, layer.index),
        )
        calibrated.check_finite()
        return calibrated, first_output

    def _advance(self, first_output: Tensor) -> float:
        """Move the stream on to the next layer.

        Returns the relative squared error of the layer's contribution to the first batch. `first_output` is the output
        of this batch before quantization.
        """
        stream = self.stream
        first = stream.hidden(0)
        contribution = (first_output - first).square().sum(dtype=torch.float64)
        stream.advance()
        error = (stream.hidden(0) - first_output).square().sum(dtype=torch.float64)
        return float(error / contribution) if contribution > 0 else 0.0

    def _finish(self, layer_pass: LayerPass) -> None:
        """Move all tokens after the layer. Processes share the work if the pass stands at the layer's beginning."""
        stream, exact = self.stream, layer_pass.exact
        if layer_pass.part == 0:
            for number, output in stream.outputs(layer_pass.layer, exact=exact):
                stream.put(number, output, exact=exact)
            return
        for number in range(len(stream)):
            for tokens in stream.slices(number):
                layer_pass.move(tokens, layer_pass.end)
            stream.release()

    def _round_dense(self, calibrated: CalibratedLayer) -> None:
        """Give the tensors that are not quantized the values that they will have in the file."""
        source, layer = self.source, calibrated.layer
        for role, weight in layer.weights.items():
            if isinstance(weight, Tensor) and role not in calibrated.schemes:
                read_back = source.read_back(layer.index, role, weight)
                if not bool(read_back.isfinite().all()):
                    dtype = source.stored_dtype(layer.index, role)
                    raise UnsupportedError(f"layer {layer.index}: {role} is beyond {dtype} once scaled")
                layer.weights[role] = read_back


def linear_report(
    source: ModelSource, recipe: Recipe, plan: Plan, layer: DecoderLayer, role: str, error: float | None
) -> LinearReport:
    """What is known of every linear."""
    module, weight = layer.spec.module_name(layer.index, role), layer.weights[role]
    return LinearReport(
        module=module,
        format=recipe.format if isinstance(weight, QTensor) else "dense",
        reason=plan.dense.get(module),
        error=error,
    )


def round_plainly(
    source: ModelSource, recipe: Recipe, plan: Plan, layer: DecoderLayer, done: Callable[[int], None]
) -> LayerReport:
    """Round `layer.weights` (float32) to nearest. The layer is not run, so the errors are those of the weights."""
    start, errors = time.perf_counter(), {}
    done(0)
    schemes = plan.schemes(layer.index, layer.spec)
    largest = largest_together(layer.weights, layer.spec.fused, schemes)
    for role, scheme in schemes.items():
        weight = layer.weights[role]
        assert isinstance(weight, Tensor)
        try:
            rounded = round_to_nearest(weight, scheme, largest=largest.get(role))
        except (CheckpointError, UnsupportedError) as error:
            raise type(error)(f"layer {layer.index}: {role}: {error}") from None
        errors[role] = relative_error(weight, rounded, weight[:0])
        layer.weights[role] = rounded
    return LayerReport(
        index=layer.index,
        linears=tuple(
            msgspec.structs.replace(
                linear_report(source, recipe, plan, layer, role, errors.get(role)),
                rtn_error=errors.get(role),
                method="rtn" if role in errors else None,
            )
            for role in layer.spec.linears
        ),
        scales=(),
        error=None,
        seconds=round(time.perf_counter() - start, 2),
    )


def _sample_errors(
    calibrated: CalibratedLayer, weights: dict[str, Tensor], rounded: dict[str, QTensor]
) -> dict[str, float]:
    dtype, errors = calibrated.layer.product_dtype, {}
    for role, q in rounded.items():
        sample = calibrated.input(role).sample
        errors[role] = relative_error(weights[role], q, sample[:: max(1, len(sample) // REPORTED_TOKENS)], dtype)
    return errors
