"""`lmkit quantize`: one decoder layer in memory at a time, in a single pass over the model.

A layer is loaded in float32, run on the calibration rows with observers, rewritten by the recipe's steps, run again
with its quantized weights, which gives the next layer's input, and written. So each layer is calibrated on what it will
see.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor

import lmkit
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.base import get_format
from lmkit.formats.checkpoint import CheckpointWriter, atomic_directory
from lmkit.formats.kv_config import save_kv_config
from lmkit.models import roles
from lmkit.models.decoder import DecoderLayer
from lmkit.models.loader import ModelSource
from lmkit.models.spec import ModelSpec
from lmkit.qtensor import QTensor
from lmkit.quant.calib import CalibrationData, load_calibration
from lmkit.quant.evaluate import EvalResult, Progress, evaluate
from lmkit.quant.kv import KVStats, make_kv_config
from lmkit.quant.layer import CalibratedLayer, Geometry, relative_error
from lmkit.quant.observe import INPUT_OF, InputStats, Observer, sample_rows, sample_tokens
from lmkit.quant.plan import BATCH_TOKENS, Plan, make_plan
from lmkit.quant.recipe import AwqClip, AwqScale, Recipe
from lmkit.quant.report import ClipReport, LayerReport, LinearReport, QuantReport, ScaleReport
from lmkit.quant.rounders.awq_clip import ClipSearch, clip_layer
from lmkit.quant.rounders.rtn import round_to_nearest
from lmkit.quant.transforms.awq_scale import ScaleSearch, scale_layer
from lmkit.text import Tokenizer

SEARCH_PREFIX = 512  # tokens of a row on which attention is compared
EVAL_TOKENS = 8192
STAGES = 4  # of a layer, for the progress bar: observe, scale, clip, round and run again


@dataclass
class Quantizer:
    """A checked recipe on an open checkpoint with its calibration data; `run` does the work."""

    source: ModelSource
    recipe: Recipe
    tokenizer: Tokenizer
    data: CalibrationData
    plan: Plan

    @torch.inference_mode()
    def run(
        self, output: str | Path, *, eval_ids: list[int] | None = None, progress: Progress = lambda *state: None
    ) -> QuantReport:
        """Write the quantized checkpoint to `output`, whole or not at all.

        `eval_ids`: a text; EVAL_TOKENS of it compare the result with the source before it is put in place. Raises
        ConfigError if `output` is occupied, CheckpointError or UnsupportedError for weights that cannot be quantized.
        """
        start = time.perf_counter()
        with atomic_directory(output) as folder:
            layers = self._write(folder, progress)
            evaluation = None if eval_ids is None else self._evaluate(folder, eval_ids, Path(output), progress)
            report = QuantReport(
                lmkit_version=lmkit.__version__,
                model=str(self.source.reader.path),
                recipe=msgspec.to_builtins(self.recipe, str_keys=True),
                calibration={
                    "dataset": self.data.dataset, "rows": len(self.data.rows), "seq_len": self.data.rows.shape[1],
                    "sha256": self.data.sha256,
                },
                layers=tuple(layers),
                bytes_before=self.source.reader.nbytes(),
                bytes_after=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
                evaluation=evaluation,
                seconds=round(time.perf_counter() - start, 2),
            )  # fmt: skip
            report.save(folder)
        return report

    def _write(self, folder: Path, progress: Progress) -> list[LayerReport]:
        """The whole checkpoint but report.json."""
        source, spec, writer, weight_format = self.source, self.source.spec, CheckpointWriter(folder), get_format("awq")
        for name in _other_tensors(source):
            writer.add(name, source.reader.tensor(name))
        stream = _Stream.embedded(source, self.data.rows)
        reports, kv_stats = [], []
        for index in range(spec.num_layers):
            layer = source.layer(index, torch.float32)
            seen = KVStats.empty(spec.num_kv_heads, spec.head_dim)
            done = functools.partial(_stage_done, progress, index, spec.num_layers)
            reports.append(self._quantize_layer(layer, stream, seen, done))
            kv_stats.append(seen)
            for role, weight in layer.weights.items():
                module, kind = _tensor_name(index, role)
                if role in roles.LINEARS and isinstance(weight, QTensor):
                    weight_format.write_linear(writer, module, weight)
                else:
                    assert isinstance(weight, Tensor)
                    writer.add(module + kind, weight.to(source.reader.tensor(module + kind).dtype))
        entry = weight_format.config_entry(self.recipe.scheme.scheme(), list(self.plan.dense))
        writer.finish(source.config | {"quantization_config": entry}, source.reader.path)
        save_kv_config(make_kv_config(self.recipe.kv, spec, kv_stats), folder)
        return reports

    def _quantize_layer(
        self, layer: DecoderLayer, stream: _Stream, seen: KVStats, done: Callable[[int], None]
    ) -> LayerReport:
        """Rewrite `layer.weights` as they will be stored, fill `seen`, and move `stream` behind the layer."""
        start = time.perf_counter()
        done(0)
        calibrated, first_output = self._observe(layer, stream, seen)
        done(1)
        rtn_errors = {
            role: relative_error(weight, round_to_nearest(weight, calibrated.scheme), calibrated.input(role).sample)
            for role in calibrated.roles
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
        for role in calibrated.roles:
            weight = calibrated.weight(role)
            rounded = calibrated.rounded(role, weight)
            errors[role] = relative_error(weight, rounded, calibrated.input(role).sample)
            layer.weights[role] = rounded
        self._round_dense(layer)
        linears = [
            LinearReport(
                module=(module := roles.module_name(layer.index, role)),
                format="dense" if module in self.plan.dense else "awq",
                reason=self.plan.dense.get(module),
                clip=_clip_report(clips.get(role)),
                rtn_error=rtn_errors.get(role),
                error=errors.get(role),
            )
            for role in roles.LINEARS
        ]
        return LayerReport(
            index=layer.index,
            linears=tuple(linears),
            scales=tuple(_scale_report(found) for found in scales),
            error=stream.advance(layer, first_output),
            seconds=round(time.perf_counter() - start, 2),
        )

    def _observe(self, layer: DecoderLayer, stream: _Stream, seen: KVStats) -> tuple[CalibratedLayer, Tensor]:
        """Run the layer as it is: (what was seen of it, its output for the first batch of rows)."""
        spec, recipe = self.source.spec, self.recipe
        num_rows, seq_len = self.data.rows.shape
        count = (recipe.step(AwqScale) or AwqScale()).tokens
        row_ids, length = sample_rows(num_rows, seq_len, count, SEARCH_PREFIX)
        token_ids = sample_tokens(num_rows * seq_len, count, recipe.calibration.seed)
        quantized = self.plan.quantized_roles(layer.index)
        inputs = {
            role: InputStats.empty(
                spec.linear_shape(role)[1], recipe.scheme.group_size, row_ids if role == "attn.q" else token_ids
            )
            for role in dict.fromkeys(INPUT_OF[role] for role in quantized)
        }
        layer.observe(Observer(inputs))
        first_output = stream.output(layer, 0, seen)
        for number in range(1, len(stream.hidden)):
            stream.output(layer, number, seen)
        layer.observe(None)
        calibrated = CalibratedLayer(
            layer=layer,
            inputs=inputs,
            sequences=stream.geometry(len(row_ids) // length, length),
            scheme=recipe.scheme.scheme(),
            roles=quantized,
            norm_dtype=self._stored_dtype(layer.index, "norm.attn"),
        )
        calibrated.check_finite()
        return calibrated, first_output

    def _round_dense(self, layer: DecoderLayer) -> None:
        """Tensors that are not quantized take the values they will have in the file."""
        for role, weight in layer.weights.items():
            if isinstance(weight, Tensor):
                stored = weight.to(self._stored_dtype(layer.index, role))
                if not bool(stored.isfinite().all()):
                    raise UnsupportedError(f"layer {layer.index}: {role} is beyond {stored.dtype} once scaled")
                layer.weights[role] = stored.float()

    def _stored_dtype(self, index: int, role: str) -> torch.dtype:
        return self.source.reader.tensor("".join(_tensor_name(index, role))).dtype

    def _evaluate(self, folder: Path, ids: list[int], output: Path, progress: Progress) -> EvalResult:
        result = evaluate(
            folder,
            ids,
            against=self.source.reader.path,
            seq_len=min(512, self.source.spec.max_position),
            limit=EVAL_TOKENS,
            progress=progress,
        )
        return msgspec.structs.replace(result, model=str(output))


def prepare(model: str | Path, recipe: Recipe) -> Quantizer:
    """Open the checkpoint, read the calibration data and check that all fit together.

    Raises CheckpointError, ConfigError or UnsupportedError; nothing is written.
    """
    source = ModelSource(model)
    plan = make_plan(source, recipe)
    tokenizer = Tokenizer.from_pretrained(source.reader.path)
    data = load_calibration(recipe.calibration, tokenizer)
    largest, vocab_size = int(data.rows.max()), source.spec.vocab_size
    if largest >= vocab_size:
        raise CheckpointError(f"{source.reader.path}: the tokenizer gives token {largest}, the model has {vocab_size}")
    return Quantizer(source, recipe, tokenizer, data, plan)


@dataclass
class _Stream:
    """Hidden states of all calibration rows in front of a layer: float32 [rows * seq_len, hidden] for each batch."""

    spec: ModelSpec
    seq_len: int
    hidden: list[Tensor]
    geometries: dict[tuple[int, int], Geometry] = field(default_factory=dict)

    @classmethod
    def embedded(cls, source: ModelSource, rows: Tensor) -> _Stream:
        table = source.embed_tokens()
        seq_len = rows.shape[1]
        return cls(source.spec, seq_len, [table[part.flatten()].float() for part in rows.split(_batch_rows(seq_len))])

    def geometry(self, num_rows: int, seq_len: int) -> Geometry:
        key = num_rows, seq_len
        if key not in self.geometries:
            self.geometries[key] = Geometry.of(self.spec, num_rows, seq_len)
        return self.geometries[key]

    def output(self, layer: DecoderLayer, number: int, seen: KVStats | None = None) -> Tensor:
        """The layer's output for one batch; `seen` takes in its keys and values."""
        hidden = self.hidden[number]
        geometry = self.geometry(len(hidden) // self.seq_len, self.seq_len)
        # An op may write into the residual it is given.
        delta, residual = layer(hidden.clone(), None, geometry.batch, geometry.rope, geometry.kv)
        if seen is not None:
            seen.add(*geometry.keys_and_values())
        return delta + residual

    def advance(self, layer: DecoderLayer, exact: Tensor) -> float:
        """Every batch through the layer. Returns the relative squared error of what the layer adds to the first batch,
        whose output before quantization was `exact`."""
        contribution = (exact - self.hidden[0]).square().sum(dtype=torch.float64)
        for number in range(len(self.hidden)):
            self.hidden[number] = self.output(layer, number)
        error = (self.hidden[0] - exact).square().sum(dtype=torch.float64)
        return float(error / contribution) if contribution > 0 else 0.0


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


def _stage_done(progress: Progress, layer: int, num_layers: int, stage: int) -> None:
    progress("layers", layer * STAGES + stage, num_layers * STAGES)


def _batch_rows(seq_len: int) -> int:
    return max(1, BATCH_TOKENS // seq_len)


def _tensor_name(index: int, role: str) -> tuple[str, str]:
    """`attn.q.bias` of layer 3 -> ("model.layers.3.self_attn.q_proj", ".bias")."""
    kind = ".bias" if role.endswith(".bias") else ".weight"
    return roles.module_name(index, role.removesuffix(".bias")), kind


def _other_tensors(source: ModelSource) -> list[str]:
    """Every tensor outside what the layers read: embedding, final norm, head, and what else the file holds."""
    read = {
        roles.module_name(index, role) + kind
        for index in range(source.spec.num_layers)
        for role in roles.LAYER_NAMES
        for kind in (".weight", ".bias")
    }
    return [name for name in source.reader.names() if name not in read]
