"""Quantize a split layer (quant.split): attention by the steps of a recipe, and then each expert, as a layer whose rows
are the tokens that come to it.

What experts read of all tokens is kept in a file. One expert at a time is loaded, rounded on its own tokens, run, and
written into the work folder. An interrupted layer begins anew with its attention, and takes the experts that are
there: their inputs have the same bits.

An expert that fewer than MIN_TOKENS tokens came to has, beside these, the tokens of the expert whose row of the router
is nearest to its own, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import torch
from torch import Tensor

from lmkit.formats.checkpoint import SINGLE
from lmkit.formats.safetensors_file import SafetensorsFile
from lmkit.layers.blocks.moe import SHARED
from lmkit.layers.linear import Weights
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.source import ModelSource
from lmkit.quant.data.buffer import Buffer
from lmkit.quant.data.comm import Comm
from lmkit.quant.data.hidden_states import STREAMS, Stream
from lmkit.quant.data.side_inputs import SideInputs
from lmkit.quant.data.workdir import WorkFolder
from lmkit.quant.kv.config import KVStats
from lmkit.quant.layer.mixture import Chosen, Mixture, add, load_part
from lmkit.quant.layer.quantize import LayerQuantizer, round_plainly
from lmkit.quant.layer.routed import MIN_TOKENS
from lmkit.quant.plan import Plan
from lmkit.quant.recipe import Recipe
from lmkit.quant.report.layer_report import ExpertsReport, LayerReport
from lmkit.quant.split import before_experts
from lmkit.quant.stored import digests_of, read_alone, stored_tensors, write_alone

Done = Callable[[int], None]


class ExpertRecord(msgspec.Struct, frozen=True):
    """What is kept of a finished expert besides its tensors."""

    report: LayerReport
    digests: dict[str, str]


@dataclass
class SplitLayer:
    """Layer `index` of a run. `stream`: None if the recipe needs no text."""

    source: ModelSource
    recipe: Recipe
    plan: Plan
    work: WorkFolder
    stream: Stream | None
    index: int
    device: str

    @cached_property
    def mixture(self) -> Mixture:
        return Mixture(self.source, self.index, self.recipe.product_dtype(self.device), self.device)

    def quantize(self, seen: KVStats, done: Done) -> tuple[LayerReport, dict[str, Tensor], dict[str, str]]:
        """Quantize the layer, fill `seen`, and move the stream after the layer.

        Returns (the report, the layer's tensors, the digests of its linears). Tensors of experts are views of files,
        which `release` leaves to the page cache. Raises CheckpointError or UnsupportedError.
        """
        report, tensors, digests = self._before_experts(seen, done)
        tensors |= self._stored(self.mixture.weights)
        chosen = self._chosen()
        parts, borrowed = [report], {}
        self._files = []
        for name in self.mixture.specs:
            done(len(self.recipe.layer_steps))
            tokens, lender = self._tokens(chosen[0], name) if chosen else (None, None)
            record = self._expert(name, chosen, tokens)
            if lender:
                borrowed[name.rpartition(".")[2]] = lender
            parts.append(record.report)
            digests |= record.digests
            file = SafetensorsFile(self.work.part(self.index, name) / SINGLE)
            self._files.append(file)
            tensors |= {each: file.tensor(each) for each in file.infos}
        done(len(self.recipe.layer_steps))
        if self.stream is not None:
            self.stream.seal()
        return self._whole_report(parts, chosen, borrowed), tensors, digests

    def release(self) -> None:
        """Leave the tensors of experts to the page cache."""
        for file in self._files:
            file.release()

    def _before_experts(self, seen: KVStats, done: Done) -> tuple[LayerReport, dict[str, Tensor], dict[str, str]]:
        """The layer without its experts. The stream then stands after it, before the experts."""
        spec = before_experts(self.source.spec.layers[self.index])
        layer = load_part(self.source, self.index, spec, self.device)
        report = self._rounded(layer, self.recipe, self.stream, seen, done)
        return report, self._stored(layer.weights), digests_of(self.source.spec, self.index, layer.weights)

    def _rounded(
        self, layer: DecoderLayer, recipe: Recipe, stream: Stream | None, seen: KVStats, done: Done
    ) -> LayerReport:
        if stream is None:
            return round_plainly(self.source, recipe, self.plan, layer, done)
        return LayerQuantizer(self.source, recipe, self.plan, stream, {}).quantize(layer, seen, done)

    def _stored(self, weights: Weights) -> dict[str, Tensor]:
        return stored_tensors(self.source, self.recipe, self.plan.linears, self.index, weights)

    def _chosen(self) -> list[Chosen]:
        """Who computes the tokens of each stream."""
        return [] if self.stream is None else [self._of_stream(name) for name in self.stream.buffers]

    def _of_stream(self, name: str) -> Chosen:
        stream, exact = self.stream, name == STREAMS[1]
        assert stream is not None
        states = stream.states(stream.layer, exact=exact)

        def batches() -> Iterator[Tensor]:
            for number in range(len(stream)):
                yield stream.hidden(number, exact=exact)
                stream.release()

        file = stream.folder and stream.folder / f"{name}-experts"
        return self.mixture.choose(batches(), Buffer(*_size(states), file, self.mixture.dtype).states)

    def _tokens(self, chosen: Chosen, name: str) -> tuple[Tensor, str | None]:
        """The tokens on which an expert is rounded, and the expert that lends some."""
        own = chosen.of(name)[0]
        if self.recipe.calibration.all_experts:
            return torch.arange(len(chosen.x)), None
        if len(own) >= MIN_TOKENS or name == SHARED:
            return own, None
        enough = [other for other in self.mixture.specs if other != SHARED and chosen.count(other) >= MIN_TOKENS]
        if not enough:
            return torch.arange(len(chosen.x)), None
        lender = self.mixture.nearest(name, enough)
        return torch.cat((own, chosen.of(lender)[0])).unique(), lender.rpartition(".")[2]

    def _expert(self, name: str, chosen: list[Chosen], tokens: Tensor | None) -> ExpertRecord:
        """Round an expert, or take it from the work folder, and run it."""
        folder = self.work.part(self.index, name)
        kept, original = self.work.kept_part(folder), self.mixture.expert(name)
        layer = original.with_weights(dict(original.weights))
        modules = {role: self.source.spec.module_name(self.index, role) for role in layer.spec.linears}
        if kept:
            record = msgspec.json.decode(kept, type=ExpertRecord)
            layer.weights.update(read_alone(folder, modules))
        else:
            recipe, stream = self.recipe, None
            if tokens is not None:
                recipe, stream = recipe.for_tokens(len(tokens)), self._stream_of(layer, chosen[0].x[tokens])
            report = self._rounded(layer, recipe, stream, KVStats.of(None), lambda stage: None)
            record = ExpertRecord(report, digests_of(self.source.spec, self.index, layer.weights))
            linears = {module: self.plan.linears[module] for module in modules.values()}
            self.work.keep_part(
                folder,
                lambda path: write_alone(path, self._stored(layer.weights), self.recipe, linears),
                msgspec.json.encode(record),
            )
        for each, part, exact in zip((layer, original), chosen, (False, True), strict=False):
            assert self.stream is not None
            add(each, part, name, self.stream.states(self.stream.layer, exact=exact))
            self.stream.release()
        return record

    def _stream_of(self, layer: DecoderLayer, x: Tensor) -> Stream:
        """The tokens x [n, hidden] of an expert, as rows of one token."""
        assert self.stream is not None
        spec = replace(self.stream.spec, layers=(layer.spec,))
        pair = Buffer(*_size(x), None), Buffer(*_size(x), None)
        pair[0].states.copy_(x)
        sides = SideInputs.of(spec, len(x), STREAMS[:1], None, self.device)
        batch = self.stream.batch_rows * self.stream.seq_len
        return Stream(spec, len(x), 1, batch, 0, {STREAMS[0]: pair}, sides, Comm(), None, self.device)

    def _whole_report(self, parts: list[LayerReport], chosen: list[Chosen], borrowed: dict[str, str]) -> LayerReport:
        """The reports of attention and of all experts as one."""
        counts = {name.rpartition(".")[2]: chosen[0].count(name) for name in self.mixture.specs} if chosen else {}
        counts.pop("shared", None)
        few = tuple(int(number) for number, count in counts.items() if count < MIN_TOKENS and number not in borrowed)
        return LayerReport(
            index=self.index,
            linears=tuple(linear for part in parts for linear in part.linears),
            scales=tuple(scale for part in parts for scale in part.scales),
            error=None,
            seconds=round(sum(part.seconds for part in parts), 2),
            experts=ExpertsReport(counts, few, borrowed) if chosen else None,
            held_out=parts[0].held_out,
        )


def _size(states: Tensor) -> tuple[int, int]:
    num_tokens, width = states.shape
    return num_tokens, width
