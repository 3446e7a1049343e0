"""The one decoder: embedding, layers (models.decoder_layer), head. It calibrates and it serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cuda.module import tensor_device
from lmkit.kernels.ops import Norm
from lmkit.layers.adapters import StepAdapters
from lmkit.layers.batch import BatchInputs, KVLayer
from lmkit.layers.block import NO_ANGLES, Forward
from lmkit.layers.linear import MergedLinear
from lmkit.layers.per_layer import PerLayerVectors, PerLayerWeights
from lmkit.layers.ranks import Ranks
from lmkit.layers.rope import Rope
from lmkit.models.decoder_layer import DecoderLayer, joined
from lmkit.models.spec import ModelSpec
from lmkit.models.stage_link import Kept, StageLink


class Decoder:
    """A whole model, or a stage of it (models.stage). `embed_tokens` [vocab, hidden] and `final_norm` [hidden] are
    plain; `lm_head` is a linear. `embed_tokens` may be a packed head, whose rows are the embeddings then. A final
    LayerNorm has a `final_bias`. `positions` [max_position, hidden], if there are any, are added to embeddings.
    """

    captures = True  # whether steps may be captured
    computes_with_torch = False  # between kernels, which is then recorded; a step may be computed twice
    other_names: Mapping[str, str] = {}  # of linears in adapters -> those of `spec`

    def __init__(
        self,
        spec: ModelSpec,
        embed_tokens: Tensor | MergedLinear,
        layers: list[DecoderLayer],
        final_norm: Tensor | None,
        lm_head: MergedLinear,
        dtype: torch.dtype = torch.float32,
        *,
        final_bias: Tensor | None = None,
        positions: Tensor | None = None,
        per_layer: PerLayerWeights | None = None,
        embed_norm: Norm | None = None,
    ) -> None:
        self.spec = spec
        self.embed_tokens = embed_tokens
        self.final_bias, self.positions, self.embed_norm = final_bias, positions, embed_norm
        self.layers = layers
        self.final_norm = final_norm
        self.lm_head = lm_head
        self.dtype = dtype
        self.ranks: Ranks | None = None
        self.link: StageLink | None = None
        self.kept: Kept = {}
        self.after_layer: Callable[[int], None] | None = None  # called after each layer with its place among `layers`
        device = lm_head.device
        self.per_layer: Callable[[Tensor, Tensor], Tensor] | None = None  # of token ids and embeddings
        if per_layer is not None:
            self.per_layer = PerLayerVectors(per_layer, spec.norm_eps, device, dtype)
        elif spec.reads_embeddings:
            self.per_layer = lambda _, embedded: embedded.clone()
        turned = dict.fromkeys(layer.rope for layer in spec.layers if layer.kv is not None)
        self.ropes = {rope: Rope(rope, device) for rope in turned}
        self._angles_of = [list(turned).index(layer.rope) if layer.kv else -1 for layer in spec.layers]
        self.embedding = ops.embedding.select(device)
        self.add_positions = ops.add_positions.select(device)
        self.rms_norm = ops.rms_norm.select(device)
        self.keep = ops.keep.select(device)
        self.softcap = ops.softcap.select(device) if spec.final_softcap else None
        self.step_adapters = StepAdapters(device)  # see models.adapters

    def remember(self, states: Tensor, slot: int, kv: list[KVLayer]) -> None:
        """Give the sequence that enters a slot its memory: an encoder's states float32 [length, hidden]."""
        for own, layer in zip(self.layers, kv, strict=True):
            for each in own.blocks:
                each.block.remember(states, slot, layer)

    @property
    def at(self) -> torch.device:
        """The device of tensors."""
        return torch.device(tensor_device(self.lm_head.device))

    @property
    def blocks(self) -> tuple[Forward, ...]:
        """What computes the blocks of all layers."""
        return tuple(each.block for layer in self.layers for each in layer.blocks)

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return *(linear for layer in self.layers for linear in layer.linears), self.lm_head

    def adaptable(self) -> Iterator[tuple[int, MergedLinear]]:
        """The linears of layers, each with its layer's number. Adapters may add to those that compute every token."""
        return ((layer.index, linear) for layer in self.layers for linear in layer.linears)

    def join(self, ranks: Ranks, *, split: bool) -> None:
        """Compute together with other ranks from now on. `split`: each has a part of attention and dense MLPs."""
        self.ranks = ranks
        for layer in self.layers:
            layer.join(ranks, ranks if split else None)

    @torch.inference_mode()
    def __call__(self, batch: BatchInputs, kv: list[KVLayer]) -> Tensor:
        """Logits float32 [R, vocab] of `batch.logit_rows`; appends the batch's keys and values to `kv`.

        A stage gives none: the first one computes them from what it receives (`logits`).
        """
        delta, residual = self.hidden(batch, kv, logits_only=True)
        if self.link is not None:
            return torch.empty(0, self.spec.vocab_size)
        return self.logits(delta, residual, batch.logit_rows)

    def logits(self, delta: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
        """Logits float32 [R, vocab] of `rows` of the residual stream's pair. If `rows` are all, it is overwritten."""
        if not len(rows):  # a chunk that ends before its prompt does
            return torch.empty(0, self.spec.vocab_size, device=delta.device)
        return self.head(*self._rows_of(delta, residual, rows) if len(rows) < len(delta) else (delta, residual))

    def _rows_of(self, delta: Tensor, residual: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Some rows of the residual stream's pair."""
        return self.embedding(delta, rows), None if residual is None else self.embedding(residual, rows)

    def final_states(self, delta: Tensor, residual: Tensor | None) -> Tensor:
        """The residual stream's pair [R, hidden] -> the final norm's result float32 [R, hidden]. Keeps the pair."""
        states = joined(delta, residual)
        if self.final_norm is None:
            states = states.float()
        else:
            norm = Norm(self.final_norm, self.spec.norm_eps, None, torch.float32, self.final_bias)
            states = self.rms_norm(states, norm)
        return states if self.spec.logit_scale == 1 else states / self.spec.logit_scale

    def hidden(
        self, batch: BatchInputs, kv: list[KVLayer], *, logits_only: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream's pair [T, hidden] after the last layer; appends the batch's keys and values to `kv`.

        With `logits_only` it is the pair [R, hidden] of the batch's logit rows (see DecoderLayer). A stage begins with
        the stream that it receives, and sends its own.
        """
        self.step_adapters.set(batch.adapters, batch.logit_adapters)
        angles = [*(rope(batch) for rope in self.ropes.values()), NO_ANGLES]
        if self.spec.sees_all:
            batch, logits_only = batch.seeing_all(), False
        delta, batch = self._stream_in(batch)
        last, kept = self.spec.num_layers, self.kept
        residual: Tensor | None = None
        for place, (layer, kv_layer) in enumerate(zip(self.layers, kv, strict=True)):
            of_rows = logits_only and layer.index == last - 1 and last not in kept and self.spec.deep_layers < last
            of_rows = of_rows and not batch.together and batch.memory is None
            if layer.index in kept:
                self.keep(delta, residual, kept[layer.index][: len(delta)])
            delta, residual = layer(
                delta, residual, batch, angles[self._angles_of[layer.index]], kv_layer, logits_only=of_rows
            )
            if layer.index < self.spec.deep_layers and batch.image_rows is not None and batch.image_values is not None:
                delta[batch.image_rows] += batch.image_values.chunk(self.spec.deep_layers + 1, -1)[layer.index + 1]
            if self.after_layer is not None:
                self.after_layer(place)
        if last in kept:
            self.keep(delta, residual, kept[last][: len(delta)])
        if self.link is not None:
            is_last = self.layers[-1].index == last - 1
            if logits_only and is_last and len(delta) > len(batch.logit_rows):
                delta, residual = self._rows_of(delta, residual, batch.logit_rows)
            self._send(self.link, delta, residual, None if is_last else batch.per_layer)
        return delta, residual

    def _send(self, link: StageLink, delta: Tensor, residual: Tensor | None, embedded: Tensor | None) -> None:
        """Send the stream to the next stage and, after its rows, the embeddings that layers there read."""
        count = len(delta) if embedded is None else 2 * len(delta)
        if len(delta):
            self.keep(delta, residual, link.place(count)[: len(delta)])
        if embedded is not None:
            self.keep(embedded, None, link.place(count)[len(delta) :])
        link.send(count)

    def _stream_in(self, batch: BatchInputs) -> tuple[Tensor, BatchInputs]:
        """The residual stream float32 [T, hidden] before the first layer, and the batch with what layers read beside
        it."""
        if self.link is None or self.link.is_first:
            delta = self._first_stream(batch)
            beside = None if self.per_layer is None else self.per_layer(batch.token_ids, delta)
        else:
            count = len(batch.token_ids)
            rows = self.link.receive(count * self.spec.rows_sent)
            delta, beside = rows[:count], rows[count:] if self.spec.reads_embeddings else None
        return delta, batch if beside is None else replace(batch, per_layer=beside)

    def _first_stream(self, batch: BatchInputs) -> Tensor:
        delta = self.embed(batch.token_ids)
        if batch.image_rows is not None and batch.image_values is not None:
            delta[batch.image_rows] = batch.image_values[:, : self.spec.hidden_size]
        if self.positions is not None:
            self.add_positions(delta, self.positions, batch.positions)
        return delta if self.embed_norm is None else self.rms_norm(delta, self.embed_norm)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids int64 [T] -> float32 [T, hidden]."""
        table, factor = self.embed_tokens, self.spec.embedding_scale
        x: Tensor = (
            table.rows(token_ids, factor)
            if isinstance(table, MergedLinear)
            else self.embedding(table, token_ids, factor)
        )
        return x

    def embed_rows(self, rows: Tensor) -> Tensor:
        """Token ids int64 [N, T] of N sequences from their first positions on -> float32 [N * T, hidden]."""
        x = self.embed(rows.flatten())
        if self.positions is not None:
            places = torch.arange(rows.shape[1], dtype=torch.int32, device=x.device)
            self.add_positions(x, self.positions, places.repeat(len(rows)))
        return x

    def head_part(self, delta: Tensor, residual: Tensor | None, rows: slice) -> Tensor:
        """`head` of some rows. Those rows are overwritten."""
        return self.head(delta[rows], None if residual is None else residual[rows])

    def head(self, delta: Tensor, residual: Tensor | None) -> Tensor:
        """The residual stream's pair [R, hidden] -> logits float32 [R, vocab]; `residual` is overwritten."""
        if self.final_norm is None:
            logits = self.lm_head.float32(joined(delta, residual))
        else:
            norm = Norm(self.final_norm, self.spec.norm_eps, residual, self.dtype, self.final_bias)
            logits = self.lm_head.float32(delta, norm)
        if self.ranks is not None:
            logits = self.ranks.side_by_side(logits)
        return logits if self.softcap is None else self.softcap(logits, self.spec.final_softcap)
