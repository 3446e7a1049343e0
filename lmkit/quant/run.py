"""`lmkit quantize`: one decoder layer in memory at a time, in a single pass over the model.

A layer is loaded in float32 and run on the calibration rows with observers. The recipe's steps rewrite it. It is run
again with its quantized weights, which gives the input of the next layer, and then it is written. So each layer is
calibrated on the inputs that it will see. A finished layer stays in a work folder. A run that was killed resumes after
the last finished layer.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

import lmkit
from lmkit.devices import named
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.base import get_format
from lmkit.formats.checkpoint import CheckpointWriter
from lmkit.formats.kv_config import save_kv_config
from lmkit.formats.safetensors_file import SafetensorsFile
from lmkit.formats.verify import verify
from lmkit.layers.linear import Weights
from lmkit.log import get_logger
from lmkit.models.engines import open_source
from lmkit.models.loader import trim_heap
from lmkit.models.source import ModelSource
from lmkit.models.weight_bits import stored_bits
from lmkit.qtensor import QuantScheme
from lmkit.quant.budget import Budget, check_evaluation, fit, peak_bytes, size
from lmkit.quant.data.calibration import CalibrationData, TooLittleTextError, load_calibration
from lmkit.quant.data.comm import Comm
from lmkit.quant.data.hidden_states import Stream
from lmkit.quant.data.workdir import WorkFolder, open_work
from lmkit.quant.kv.config import KVFit, KVStats, describable, make_kv_config, write_static
from lmkit.quant.layer.curvature import Curvature
from lmkit.quant.layer.quantize import LayerQuantizer, round_plainly
from lmkit.quant.layer.split_layer import SplitLayer
from lmkit.quant.layer.sweep import CurvatureFiles, Sweep
from lmkit.quant.plan import Plan, make_plan, rows_within
from lmkit.quant.recipe import Recipe
from lmkit.quant.refine.whole import Finished, WholeModel
from lmkit.quant.report.evaluate import EVAL_TOKENS, EvalResult, Progress, evaluate
from lmkit.quant.report.head_storage import HeadReport, choose_head
from lmkit.quant.report.html import save_html
from lmkit.quant.report.layer_report import LayerReport, with_bits
from lmkit.quant.report.report import MixedPrecisionReport, QuantReport
from lmkit.quant.report.selfcheck import check_logits, check_weights
from lmkit.quant.report.sensitivity import choose_schemes
from lmkit.quant.split import is_split
from lmkit.quant.stored import digests_of, stored_tensors
from lmkit.text import Tokenizer

log = get_logger(__name__)

SCHEMES = "schemes.json"


class LayerRecord(msgspec.Struct, frozen=True):
    """The data that is kept of a finished layer besides its tensors.

    `digests` maps the modules of its quantized linears to the digests of their weights.
    """

    report: LayerReport
    kv_fit: KVFit
    digests: dict[str, str]


class ChosenSchemes(msgspec.Struct, frozen=True):
    """The linears of a Plan after schemes were chosen within a budget of bits."""

    linears: dict[str, QuantScheme | None]
    dense: dict[str, str]
    report: MixedPrecisionReport


@dataclass
class Quantizer:
    """A checked recipe on an open checkpoint with its calibration data; `run` does the work."""

    source: ModelSource
    recipe: Recipe
    tokenizer: Tokenizer
    data: CalibrationData
    plan: Plan
    budget: Budget
    comm: Comm = field(default_factory=Comm)
    device: str = "cpu"  # as quant.device.resolve_device names it

    @torch.inference_mode()
    def run(
        self,
        output: str | Path,
        *,
        eval_ids: list[int] | None = None,
        restart: bool = False,
        progress: Progress = lambda *state: None,
    ) -> QuantReport:
        """Write the quantized checkpoint to `output`, whole or not at all. An interrupted run is resumed.

        Finished layers are kept in a work folder beside `output` (data/workdir.py) until it is complete; `restart`
        drops them. `eval_ids` is a text: EVAL_TOKENS of it compare the result with the source before the result is put
        in place. Raises ConfigError if `output` is occupied or the work folder belongs to another run. Raises
        CheckpointError or UnsupportedError for weights that cannot be quantized and files that cannot be written.
        """
        start = time.perf_counter()
        if not self.comm.is_first:
            return self._assist(WorkFolder.beside(output))
        if eval_ids is not None:
            check_evaluation(self.source, self.budget)
        with open_work(output, self._identity(), num_layers=self.source.spec.num_layers, restart=restart) as work:
            mixed = self._choose_schemes(work, progress)
            stream = self._quantize_layers(work, progress)
            folder = work.new_checkpoint()
            records = [work.record(index, LayerRecord) for index in range(self.source.spec.num_layers)]
            last = None if stream is None else stream.hidden(len(stream) - 1)[-stream.seq_len :]
            head = choose_head(self.source, self.recipe.asked_head, last)
            self._assemble(work, folder, records, head)
            finished = self._finish(work, folder, stream, progress)
            if finished is not None and finished.layer is not None:
                folder, last = work.new_checkpoint(), finished.hidden
                records = self._assemble(work, folder, records, head, finished.layer)
            self._check(folder, last, records)
            stored = stored_bits(self.source.spec, open_source(folder, "auto").reader)
            evaluation = None if eval_ids is None else self._evaluate(folder, eval_ids, Path(output), progress)
            report = QuantReport(
                lmkit_version=lmkit.__version__,
                model=str(self.source.reader.path),
                recipe=msgspec.to_builtins(self.recipe, str_keys=True),
                calibration=self.data.report(),
                layers=with_bits((record.report for record in records), self.source.spec, stored),
                bytes_before=self.source.reader.nbytes(),
                bytes_after=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
                evaluation=evaluation,
                seconds=round(time.perf_counter() - start, 2),
                mixed_precision=mixed,
                refined=None if finished is None else finished.report,
                head=head,
                groups=self.plan.groups,
                bits=sum(stored.values()) / self.source.spec.num_weights,
                peak_bytes=peak_bytes(),
            )  # fmt: skip
            report.save(folder)
            save_html(report, folder)
            work.publish()
        if self.budget.max_memory is not None and peak_bytes() > self.budget.max_memory:
            log.warning("memory was %s at its peak, more than --max-memory", size(peak_bytes()))
        self.comm.broadcast_bytes(msgspec.json.encode(report))
        return report

    def _assist(self, work: WorkFolder) -> QuantReport:
        """The part of every process but the first. Only the first process writes."""
        self._choose_schemes(work, lambda *state: None)
        self._quantize_layers(work, lambda *state: None)
        report = msgspec.json.decode(self.comm.broadcast_bytes(b""), type=QuantReport)
        work.remove_states(self.comm.rank)
        return report

    def _identity(self) -> dict[str, Any]:
        """Everything that the bytes of the result depend on."""
        return {
            "lmkit": lmkit.__version__,
            "model": self.source.reader.content_digest(),
            "recipe": msgspec.to_builtins(self.recipe, str_keys=True),
            "calibration data": self.data.sha256,
            "tokens of a batch": self.budget.batch_tokens,
            "processes": self.comm.world_size,
            "device": named(self.device).name,
        }

    def _quantize_layers(self, work: WorkFolder, progress: Progress) -> Stream | None:
        """Quantize the layers that are not finished yet and keep each in the work folder.

        Returns the stream after the last layer. None: without calibration text there is no stream.
        """
        source, spec, comm, curvatures = self.source, self.source.spec, self.comm, CurvatureFiles(work, self.comm)
        first = int(comm.broadcast_bytes(str(work.num_done).encode()))
        if first:
            log.info("going on in %s: %d of %d layers are finished", work.path, first, spec.num_layers)
        elif comm.is_first:
            check_weights(source, progress)
            if self.recipe.needs_curvature:
                curvatures.fill(self._sweep(), functools.partial(progress, "curvature"))
        stream = self._stream(work, first) if self.recipe.calibration.has_text else None
        for index in range(first, spec.num_layers):
            seen = KVStats.of(spec.layers[index].kv)
            done = functools.partial(self._stage_done, progress, index)
            if is_split(spec.layers[index]):
                split = SplitLayer(source, self.recipe, self.plan, work, stream, index, self.device)
                report, tensors, digests = split.quantize(seen, done)
                release = split.release
            else:
                curvature = curvatures.load(index) if self.recipe.needs_curvature else {}
                report, weights = self._quantize_whole(index, stream, curvature, seen, done)
                tensors = stored_tensors(source, self.recipe, self.plan.linears, index, weights)
                digests, release = digests_of(spec, index, weights), source.reader.release
            # From here on, every process has its hidden states after the layer on the disk, and none writes to them.
            comm.wait()
            if comm.is_first:
                record = LayerRecord(report, seen.fit, digests)
                work.commit(index, tensors, seen, msgspec.json.encode(record), release)
                work.drop_parts(index)
            # Until the layer is committed, no process writes to the hidden states before it: they are still needed.
            comm.wait()
            del tensors
            source.reader.release()
        return stream

    def _quantize_whole(
        self, index: int, stream: Stream | None, curvature: Curvature, seen: KVStats, done: Callable[[int], None]
    ) -> tuple[LayerReport, Weights]:
        """A layer that is held as a whole: its report, and its weights on the CPU as they will be stored."""
        layer = self.source.layer(index, torch.float32, self.device)
        self.source.reader.release()
        if stream is None:
            report = round_plainly(self.source, self.recipe, self.plan, layer, done)
        else:
            report = LayerQuantizer(self.source, self.recipe, self.plan, stream, curvature).quantize(layer, seen, done)
        return report, {role: weight.to("cpu") for role, weight in layer.weights.items()}

    def _sweep(self) -> Sweep:
        dtype, seed = self.recipe.product_dtype(self.device), self.recipe.calibration.seed
        return Sweep(self.source, self.data.rows, self.budget.batch_tokens, dtype, seed, self.device)

    def _stream(self, work: WorkFolder, layer: int) -> Stream:
        """The calibration rows before a layer."""
        return Stream.embedded(
            self.source,
            self.data.rows,
            batch_tokens=self.budget.batch_tokens,
            folder=work.states(self.comm.rank),
            layer=layer,
            exact=self.recipe.needs_exact,
            comm=self.comm,
            device=self.device,
        )

    def _stage_done(self, progress: Progress, layer: int, stage: int) -> None:
        """Report the progress between two stages, and give memory that the last one read or freed to the system."""
        self.source.reader.release()
        trim_heap()
        stages = 1 + len(self.recipe.layer_steps)  # a layer is observed, then every step is done
        progress("layers", layer * stages + stage, self.source.spec.num_layers * stages)

    def _choose_schemes(self, work: WorkFolder, progress: Progress) -> MixedPrecisionReport | None:
        """With a budget of bits, choose the schemes and put them into the plan. They are measured once per run."""
        if self.recipe.average_bits is None:
            return None
        data = b""
        if self.comm.is_first and not (data := work.kept(SCHEMES)):
            chosen, report = choose_schemes(self.source, self.recipe, self.plan, self.data.rows, progress, self.device)
            data = msgspec.json.encode(ChosenSchemes(chosen.linears, chosen.dense, report))
            work.keep(SCHEMES, data)
        schemes = msgspec.json.decode(self.comm.broadcast_bytes(data), type=ChosenSchemes)
        self.plan = dataclasses.replace(self.plan, linears=schemes.linears, dense=schemes.dense)
        return schemes.report

    def _finish(self, work: WorkFolder, folder: Path, stream: Stream | None, progress: Progress) -> Finished | None:
        """What the step after the last layer makes of the checkpoint in `folder`, if the recipe has one."""
        step = self.recipe.model_step
        if step is None or stream is None:
            return None
        dtype, seed = self.recipe.product_dtype(self.device), self.recipe.calibration.seed
        model = WholeModel(self.source, ModelSource(folder), stream, self.data.rows, dtype, seed, work)
        return step.finish(model, functools.partial(progress, step.name()))

    def _assemble(
        self, work: WorkFolder, folder: Path, records: list[LayerRecord], head: HeadReport,
        changed: Callable[[int], Weights] | None = None,
    ) -> list[LayerRecord]:  # fmt: skip
        """Write the whole checkpoint except report.json, from the source and the finished layers. `changed` gives the
        layers' weights in their place. Returns the records of the written layers."""
        source, spec = self.source, self.source.spec
        files = [SafetensorsFile(work.layer_file(index)) for index in range(spec.num_layers)]

        def release() -> None:
            source.reader.release()
            for file in files:
                file.release()

        writer = CheckpointWriter(folder, self.budget.shard_bytes, written=release)
        for name in _other_tensors(source):
            writer.add(name, source.reader.tensor(name))
        kv_stats = [KVStats.of(layer.kv) for layer in spec.layers]
        written = []
        for index, (seen, record) in enumerate(zip(kv_stats, records, strict=True)):
            if changed is None:
                tensors = {name: files[index].tensor(name) for name in files[index].infos}
            else:
                weights = {role: weight.to("cpu") for role, weight in changed(index).items()}
                tensors = stored_tensors(source, self.recipe, self.plan.linears, index, weights)
                record = msgspec.structs.replace(record, digests=digests_of(spec, index, weights))
            written.append(record)
            for name, tensor in tensors.items():
                writer.add(name, tensor)
            work.restore(index, seen)
            seen.fit = record.kv_fit
        linears = dict.fromkeys(_unread_linears(source)) | self.plan.linears
        entry = None
        if any(linears.values()):
            entry = get_format(self.recipe.format).config_entry(linears, activations=self.recipe.activations)
        entry = write_static(writer, entry, self.recipe.kv, spec, kv_stats)
        quantized = {} if entry is None else {"quantization_config": entry}
        writer.finish(source.config | quantized | head.config, source.reader.path)
        if self.recipe.kv.scheme == "online" and self.recipe.calibration.has_text and describable(spec):
            save_kv_config(make_kv_config(self.recipe.kv, spec, kv_stats), folder)
        return written

    def _check(self, folder: Path, expected: Tensor | None, records: list[LayerRecord]) -> None:
        """Check that a second reader finds the intended weights in the written files, and that these give the logits
        of the run, from the states of the last row after the last layer."""
        verify(folder, {module: value for record in records for module, value in record.digests.items()})
        if expected is None:
            return
        dtype = self.recipe.product_dtype(self.device)
        difference = check_logits(folder, self.source, self.data.rows[-1], expected, dtype, self.device)
        log.info("read back: logits differ by at most %.1e of the largest", difference)

    def _evaluate(self, folder: Path, ids: list[int], output: Path, progress: Progress) -> EvalResult:
        path, seq_len = self.source.reader.path, min(512, self.source.spec.max_position)
        options: dict[str, Any] = {"against": path, "prefix": self.tokenizer.start, "decode": self.tokenizer.decode}
        result = evaluate(folder, ids, seq_len=seq_len, limit=EVAL_TOKENS, progress=progress, **options)
        return msgspec.structs.replace(result, model=str(output))


def prepare(
    model: str | Path,
    recipe: Recipe,
    *,
    max_memory: int | None = None,
    time_budget: float | None = None,
    comm: Comm = Comm(),
    device: str = "cpu",
) -> Quantizer:
    """Open the checkpoint, read the calibration data, and check that all fit together and into `max_memory` bytes.

    `comm` is this process among those that share the work; all of them make the same calls. `device` is a name that
    quant.device.resolve_device gives. With a `time_budget` in seconds, the recipe gets as many rows of text as its
    estimate allows, and as there are. Nothing is written. Raises CheckpointError, ConfigError or UnsupportedError.
    """
    source = open_source(model, "auto", floats=True)
    recipe = recipe.for_model(source.spec)
    source = recipe.opened(source)
    if comm.world_size > 1 and any(is_split(layer) for layer in source.spec.kinds):
        raise UnsupportedError(f"{source.reader.path}: experts that are held one at a time need a single process")
    plan = make_plan(source, recipe, device)
    tokenizer = Tokenizer.from_pretrained(source.reader.path)
    if time_budget is not None and recipe.calibration.has_text:
        rows = rows_within(source, recipe, time_budget, device) if comm.is_first else []
        recipe = _with_text(recipe, msgspec.json.decode(comm.broadcast_bytes(msgspec.json.encode(rows))), tokenizer)
        plan = make_plan(source, recipe, device)
    data = load_calibration(recipe.calibration, tokenizer)
    largest, vocab_size = int(data.rows.max()) if len(data.rows) else 0, source.spec.vocab_size
    if largest >= vocab_size:
        raise CheckpointError(f"{source.reader.path}: the tokenizer gives token {largest}, the model has {vocab_size}")
    budget = fit(source, recipe, max_memory)
    return Quantizer(source, budget.recipe, tokenizer, data, plan, budget, comm, device)


def _with_text(recipe: Recipe, counts: list[int], tokenizer: Tokenizer) -> Recipe:
    """The recipe with the first of these numbers of rows for which there is enough text."""
    for count in counts:
        with suppress(TooLittleTextError):
            load_calibration(recipe.with_rows(count).calibration, tokenizer)
            return recipe.with_rows(count)
    return recipe.with_rows(counts[-1])


def _other_tensors(source: ModelSource) -> list[str]:
    """Every tensor that no layer reads: embedding, final norm, head, and other tensors of the file."""
    read = {
        layer.module_name(index, role.removesuffix(".bias")) + kind
        for index, layer in enumerate(source.spec.layers)
        for role in (*layer.vectors, *layer.linears, *layer.routers, *layer.matrices)
        for kind in (".weight", ".bias")
    }
    return [name for name in source.reader.names() if name not in read]


def _unread_linears(source: ModelSource) -> list[str]:
    """The modules with a matrix in parts of the model that stay as they are, as a vision tower."""
    reader, prefixes = source.reader, "" if source.spec.foreign else source.spec.unread
    names = (name for name in reader.names() if name.startswith(prefixes) and name.endswith(".weight"))
    return [name.removesuffix(".weight") for name in names if len(reader.info(name).shape) == 2]
