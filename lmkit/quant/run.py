"""`lmkit quantize`: one decoder layer in memory at a time, in a single pass over the model.

A layer is loaded in float32, run on the calibration rows with observers, rewritten by the recipe's steps, run again
with its quantized weights, which gives the next layer's input, and written. So each layer is calibrated on what it will
see.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

import lmkit
from lmkit.errors import CheckpointError
from lmkit.formats.base import get_format
from lmkit.formats.checkpoint import CheckpointWriter, atomic_directory
from lmkit.formats.kv_config import save_kv_config
from lmkit.models import roles
from lmkit.models.loader import ModelSource
from lmkit.qtensor import QTensor
from lmkit.quant.calib import CalibrationData, load_calibration
from lmkit.quant.evaluate import EvalResult, Progress, evaluate
from lmkit.quant.kv import KVStats, make_kv_config, write_static
from lmkit.quant.plan import Plan, make_plan
from lmkit.quant.quantize_layer import STAGES, LayerQuantizer, tensor_name
from lmkit.quant.recipe import Recipe
from lmkit.quant.report import LayerReport, QuantReport, peak_memory
from lmkit.quant.report_html import save_html
from lmkit.quant.sensitivity import choose_schemes
from lmkit.quant.stream import Stream
from lmkit.text import Tokenizer

EVAL_TOKENS = 8192


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
        start, mixed = time.perf_counter(), None
        with atomic_directory(output) as folder:
            if self.recipe.bits is not None:
                self.plan, mixed = choose_schemes(self.source, self.recipe, self.plan, self.data.rows, progress)
            layers = self._write(folder, progress)
            evaluation = None if eval_ids is None else self._evaluate(folder, eval_ids, Path(output), progress)
            report = QuantReport(
                lmkit_version=lmkit.__version__,
                model=str(self.source.reader.path),
                recipe=msgspec.to_builtins(self.recipe, str_keys=True),
                calibration=self.data.report(),
                layers=tuple(layers),
                bytes_before=self.source.reader.nbytes(),
                bytes_after=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
                evaluation=evaluation,
                seconds=round(time.perf_counter() - start, 2),
                mixed_precision=mixed,
                peak_bytes=peak_memory(),
            )  # fmt: skip
            report.save(folder)
            save_html(report, folder)
        return report

    def _write(self, folder: Path, progress: Progress) -> list[LayerReport]:
        """The whole checkpoint but report.json."""
        source, spec, writer, weight_format = (
            self.source,
            self.source.spec,
            CheckpointWriter(folder),
            get_format(self.recipe.format),
        )
        for name in _other_tensors(source):
            writer.add(name, source.reader.tensor(name))
        stream = Stream.embedded(source, self.data.rows, exact=self.recipe.needs_exact)
        quantizer = LayerQuantizer(source, self.recipe, self.plan, stream)
        reports, kv_stats = [], []
        for index in range(spec.num_layers):
            layer = source.layer(index, torch.float32)
            seen = KVStats.empty(spec.num_kv_heads, spec.head_dim)
            done = functools.partial(_stage_done, progress, index, spec.num_layers)
            reports.append(quantizer.quantize(layer, seen, done))
            kv_stats.append(seen)
            for role, weight in layer.weights.items():
                module, kind = tensor_name(spec, index, role)
                if isinstance(weight, QTensor):
                    weight_format.write_linear(writer, module, weight, activations=self.recipe.activations)
                else:
                    assert isinstance(weight, Tensor)
                    writer.add(module + kind, weight.to(source.reader.tensor(module + kind).dtype))
        entry = weight_format.config_entry(self.plan.linears, activations=self.recipe.activations)
        entry = write_static(writer, entry, self.recipe.kv, spec, kv_stats)
        writer.finish(source.config | {"quantization_config": entry}, source.reader.path)
        if self.recipe.kv.scheme == "online":
            save_kv_config(make_kv_config(self.recipe.kv, spec, kv_stats), folder)
        return reports

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


def _stage_done(progress: Progress, layer: int, num_layers: int, stage: int) -> None:
    progress("layers", layer * STAGES + stage, num_layers * STAGES)


def _other_tensors(source: ModelSource) -> list[str]:
    """Every tensor outside what the layers read: embedding, final norm, head, and what else the file holds."""
    read = {
        roles.module_name(source.spec, index, role) + kind
        for index in range(source.spec.num_layers)
        for role in (*roles.LAYER_NAMES, *roles.linears(source.spec, index), *roles.routers(source.spec, index))
        for kind in (".weight", ".bias")
    }
    return [name for name in source.reader.names() if name not in read]
