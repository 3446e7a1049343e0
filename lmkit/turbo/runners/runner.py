"""Carries out step plans: tensors in, sampled tokens out. This part is the same on every device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lmkit.config import EngineConfig
from lmkit.layers.batch import BatchInputs, KVLayer
from lmkit.models.decoder import Decoder
from lmkit.turbo.changes import Change
from lmkit.turbo.kv.blocks import KVBlocks
from lmkit.turbo.kv.tiers.store import TierStore
from lmkit.turbo.plan import Chunk, NewSequence, Sampled, SampledToken, StepPlan
from lmkit.turbo.request import TokenLogprobs
from lmkit.turbo.runners.batch import PersistentBatch, StepRows
from lmkit.turbo.runners.guides import Guides
from lmkit.turbo.runners.images import EncodedImages
from lmkit.turbo.runners.pooling import PooledText
from lmkit.turbo.runners.sampler import token_logprobs
from lmkit.turbo.runners.streams import Streams

SCORED_BYTES = 16 << 20  # the most bytes of prompt token logits held at a time, however long the prompt


class StepResult(NamedTuple):
    """The result of a step that has run."""

    sampled: list[Sampled]
    seconds: float
    kernels: float  # the part of `seconds` in the model
    elsewhere: float = 0.0  # in the model's other stages


@dataclass
class Flight:
    """A plan under way whose last layers are computed elsewhere: what is left to do when their rows come back."""

    plan: StepPlan
    chunks: list[Chunk] = field(default_factory=list)  # those to compute
    rows: StepRows | None = None
    logit_rows: Tensor | None = None  # a copy, if more than logits is wanted
    num_rows: int = 0  # that come back

    def expect(self, inputs: BatchInputs, rows: StepRows | None) -> None:
        """Note which rows of these inputs come back: those of logits, or all if more is wanted."""
        self.rows, self.num_rows = rows, len(inputs.logit_rows)
        if rows is not None and rows.wants_hidden:
            self.logit_rows, self.num_rows = inputs.logit_rows.clone(), len(inputs.token_ids)


Ticket = Callable[[], StepResult]  # stands for a launched plan; only its runner calls it


class Runner(Protocol):
    """Carries out plans on one device, in the order in which they are launched."""

    decoder: Decoder
    batch: PersistentBatch
    runs_ahead: bool  # `launch` returns before the step has run, and later launches may follow at once

    def warm_up(self) -> str:
        """Compile and capture everything that steps need, before the first plan. Returns which steps are captured, or
        why none is; an empty text where that is decided step by step."""

    def launch(self, plan: StepPlan) -> Ticket:
        """Begin a plan. It may raise the errors of `collect`; the plan counts as launched all the same."""

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a plan. Raises the plan's error, or EngineLostError if no other plan can run either."""

    def tell(self, change: Change) -> None:
        """Have the model's other processes, if there are any, carry out a change between the plans before it and those
        after it."""

    def forced(self, slot: int) -> list[int]:
        """The next tokens of the slot's sequence, as far as its grammar leaves no choice. None if that is unknown."""

    def resume(self, num_outputs: dict[int, int]) -> None:
        """Sample the next tokens of these slots as if so many had been sampled, see Sampler."""

    def call(self, work: Callable[[], Any]) -> Any:
        """Carry out `work` where steps run, after those under way, and wait for it."""

    def keep_streams(self, streams: Streams) -> None:
        """Keep residual streams from now on. Called before the first step."""

    def close(self) -> None:
        """Wait for plans under way and end the threads."""


@dataclass(frozen=True)
class RunnerParts:
    """The parts of a runner of any device. `config` is the device's configuration."""

    config: EngineConfig
    decoder: Decoder
    kv: list[KVLayer]
    blocks: KVBlocks
    tiers: TierStore | None
    guides: Guides
    max_model_len: int
    workspace_bytes: int  # on a CPU: activations and logits of the largest step
    num_groups: int = 1  # of KV blocks, each with tables of its own
    encoded: EncodedImages = field(default_factory=lambda: EncodedImages(0))


class Shown(NamedTuple):
    """What a step shows of a chunk besides tokens, on request. See Sampled."""

    prompt_logprobs: list[TokenLogprobs] = []
    embedding: bytes = b""


class SlotStates(Protocol):
    """The part of a sampler that plans change."""

    def set(self, slot: int, new: NewSequence) -> None: ...
    def clear(self, slot: int) -> None: ...


class PlanRunner:
    """The part of a plan that every device's runner carries out alike: blocks move, sequences enter and leave.

    A runner has one model, its KV blocks, the persistent batch and the sampler's per-slot state.
    """

    runs_ahead = False

    def __init__(self, parts: RunnerParts, states: SlotStates) -> None:
        config = parts.config
        self.decoder = parts.decoder
        self.kv = parts.kv
        self.batch = PersistentBatch(
            config.sequences_per_step, parts.max_model_len, config.tokens_per_block, config.tokens_per_step,
            parts.num_groups, has_states=parts.decoder.spec.is_recurrent, memory=parts.decoder.spec.memory,
        )  # fmt: skip
        self.batch.encoded = parts.encoded
        self.batch.second_row = parts.decoder.spec.second_row
        self._states = states
        self.streams: Streams | None = None
        self._blocks = parts.blocks
        self._tiers = parts.tiers
        self._pooled: dict[int, PooledText] = {}  # by slot: the hidden states of a text so far
        self._failed: set[int] = set()  # slots of a step that raised: a later plan's chunks for them are void

    def tell(self, change: Change) -> None:
        """See Runner."""

    def forced(self, slot: int) -> list[int]:
        """See Runner."""
        return []

    def keep_streams(self, streams: Streams) -> None:
        """See Runner."""
        self.streams, self.decoder.kept = streams, streams.places

    @contextmanager
    def _begun(self, plan: StepPlan) -> Iterator[list[Chunk]]:
        """Apply the parts of a plan before its chunks, and yield the chunks to compute.

        If anything raises, the plan's slots become void.
        """
        try:
            self._move(plan)
            for slot in plan.freed:
                self._states.clear(slot)
                self._pooled.pop(slot, None)
            for new in plan.new:
                self._failed.discard(new.slot)
                self.batch.enter(new)
                if new.images and self.batch.memory is not None:
                    self.decoder.remember(self.batch.encoded.rows(new.images[0].digest), new.slot, self.kv)
                if self.streams is not None:
                    self.streams.enter(new.slot)
                self._states.set(new.slot, new)
            yield [chunk for chunk in plan.chunks if chunk.slot not in self._failed] if self._failed else plan.chunks
        except Exception:
            self._failed.update(chunk.slot for chunk in plan.chunks)
            raise

    def append(self, chunks: list[Chunk], tokens: list[list[SampledToken]]) -> None:
        """Append the sampled tokens to the batch, except failed ones."""
        for chunk, new in zip(chunks, tokens, strict=True):
            for token in new:
                if token.token_id >= 0:
                    self.batch.append(chunk.slot, token.token_id)

    @staticmethod
    def for_all(plan: StepPlan, chunks: list[Chunk], sampled: list[Sampled]) -> list[Sampled]:
        """One result for each of the plan's chunks, in order. Chunks that were not computed get an empty result."""
        if len(chunks) == len(plan.chunks):
            return sampled
        by_slot = {chunk.slot: result for chunk, result in zip(chunks, sampled, strict=True)}
        return [by_slot.get(chunk.slot, Sampled()) for chunk in plan.chunks]

    def _move(self, plan: StepPlan) -> None:
        """Do saves before copies before loads: one plan may save a block, give it away and write to it."""
        try:
            if self._tiers is not None:
                self._tiers.save(plan.saves)
            self._blocks.copy(plan.copies)
        finally:  # loads do not belong to the step: without this, a sequence would wait for its load for ever
            if self._tiers is not None:
                for load in plan.loads:
                    self._tiers.load(load)

    def _with_hidden(self, chunks: list[Chunk], rows: StepRows, inputs: BatchInputs) -> tuple[Tensor, list[Shown]]:
        """Logits float32 [R, vocab] of a step, and what else is wanted of each chunk.

        The logits come last: if they need every row, the head overwrites the residual stream. Embeddings come first,
        because the scores overwrite it, too.
        """
        return self._shown(chunks, rows, *self.decoder.hidden(inputs, self.kv), inputs.logit_rows)

    def _shown(
        self, chunks: list[Chunk], rows: StepRows, delta: Tensor, residual: Tensor | None, logit_rows: Tensor
    ) -> tuple[Tensor, list[Shown]]:
        """See `_with_hidden`. (delta, residual) [T, hidden] is the residual stream's pair after the last layer."""
        pooled = zip(chunks, rows.pooled_rows, strict=True)
        embeddings = [self._embed(chunk, span, delta, residual) if span else b"" for chunk, span in pooled]
        shown = list(map(Shown, self._scores(chunks, rows.prompt_rows, delta, residual), embeddings))
        return self.decoder.logits(delta, residual, logit_rows), shown

    def _shown_by_logits(self, chunks: list[Chunk], rows: StepRows | None, logits: Tensor) -> list[Shown]:
        """What the step's logits show of each chunk besides tokens."""
        if rows is None or not any(rows.scored_rows):
            return [Shown()] * len(chunks)
        scored = logits[[row for span in rows.scored_rows for row in span if row < len(logits)]]
        return list(map(Shown, self._scores_of(chunks, rows.scored_rows, [scored])))

    def _shown_of(self, flight: Flight, stream: Tensor) -> tuple[Tensor, list[Shown]]:
        """See `_with_hidden`. `stream` float32 [flight.num_rows, hidden] came back from the last layer."""
        if flight.rows is not None and flight.logit_rows is not None:
            return self._shown(flight.chunks, flight.rows, stream, None, flight.logit_rows.to(stream.device))
        logits = self.decoder.logits(stream, None, torch.arange(flight.num_rows))
        return logits, self._shown_by_logits(flight.chunks, flight.rows, logits)

    @np.errstate(over="ignore", invalid="ignore")  # the result is checked
    def _embed(self, chunk: Chunk, span: range, delta: Tensor, residual: Tensor | None) -> bytes:
        """Take in the hidden states of the step's tokens `span`. Returns the embedding if the chunk ends its text."""
        part = slice(span.start, span.stop)
        states = self.decoder.final_states(delta[part], None if residual is None else residual[part]).cpu().numpy()
        kind = self.batch.pooling[chunk.slot]
        if kind == "last":
            pooled = states[-1]
        else:
            if chunk.start == 0:
                self._pooled[chunk.slot] = PooledText(kind, states.shape[1])
            self._pooled[chunk.slot].add(states)
            pooled = self._pooled[chunk.slot].result()
        return pooled.tobytes() if chunk.num_sampled and np.isfinite(pooled).all() else b""

    def _scores(
        self, chunks: list[Chunk], spans: list[range], delta: Tensor, residual: Tensor | None
    ) -> list[list[TokenLogprobs]]:
        """The scores that the step's tokens `spans` of each chunk give to the prompt tokens after them.

        Logits are computed for a part of them at a time, whatever their chunks: the head is read once for a part.
        """
        scored = [row for span in spans for row in span]
        size = max(1, SCORED_BYTES // (4 * self.decoder.spec.vocab_size))
        parts = (torch.tensor(scored[i : i + size], device=delta.device) for i in range(0, len(scored), size))
        return self._scores_of(chunks, spans, (self.decoder.logits(delta, residual, part).cpu() for part in parts))

    def _scores_of(
        self, chunks: list[Chunk], spans: list[range], logits: Iterable[Tensor]
    ) -> list[list[TokenLogprobs]]:
        """The scores that rows of logits float32 [.., vocab] give. Each chunk has as many as its span, one after the
        other. On other ranks than the first there are no rows.
        """
        scores: list[list[TokenLogprobs]] = [[] for _ in chunks]
        rows = (row for part in logits for row in part.numpy())
        for chunk, span, found in zip(chunks, spans, scores, strict=True):
            num_top, shown = int(self.batch.prompt_top[chunk.slot]), self.batch.prompt_shown[chunk.slot]
            targets = self.batch.prompt_targets(chunk, len(span)) if span else []
            found += [token_logprobs(row, token, num_top, shown) for token, row in zip(targets, rows, strict=False)]
        return scores


def rows_of(logits: Tensor, rows: list[int]) -> Tensor:
    """These rows, ascending."""
    return logits if len(rows) == len(logits) else logits[rows]


def sample_chunks(
    sample: Callable[[list[int], list[int]], list[SampledToken]], chunks: list[Chunk], rows: StepRows
) -> list[list[SampledToken]]:
    """Sample the tokens of each chunk. `sample` takes numbers of logit rows with their slots, and waits.

    A draft is sampled one token at a time, up to the first token that it did not draft, because a drawn token depends
    on the tokens before it.
    """
    tokens: list[list[SampledToken]] = [[] for _ in chunks]
    going_on = [idx for idx, chunk in enumerate(chunks) if chunk.num_sampled]
    step = 0
    while going_on:
        wanted = [rows.sample_rows[idx][step] for idx in going_on]
        drawn = sample(wanted, [chunks[i].slot for i in going_on])
        for idx, token in zip(going_on, drawn, strict=True):
            tokens[idx].append(token)
        going_on = [
            idx
            for idx in going_on
            if step < len(chunks[idx].draft) and tokens[idx][step].token_id == chunks[idx].draft[step]
        ]
        step += 1
    return tokens
