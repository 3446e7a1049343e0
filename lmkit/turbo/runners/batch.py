"""The persistent batch: sequences keep a slot while they run, and a step touches only the values that changed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from lmkit.kernels.ops import BatchGeometry
from lmkit.kernels.recurrent import ROW_FIELDS
from lmkit.layers.batch import BatchInputs
from lmkit.layers.blocks.state import Memory
from lmkit.turbo.plan import Chunk, NewSequence
from lmkit.turbo.request import Pooling
from lmkit.turbo.runners.images import EncodedImages, PlacedImages, Span, with_images

# Block tables of a step with prompt tokens have columns for so many keys, or twice as many, and so on. Shapes therefore
# recur while a context grows, and attention prepares for less than twice the number of keys.
TABLE_KEYS = 4096


class Expected(NamedTuple):
    """Tokens that a step under way will sample."""

    slots: np.ndarray  # int64 [R], as the others
    entries: np.ndarray  # each counts the sequences that had entered the slot
    positions: np.ndarray


@dataclass(frozen=True)
class StepRows:
    """The rows of the step's outputs that each chunk needs, in the plan's order."""

    sample_rows: list[range]  # among the step's logit rows: the rows of the positions that are sampled
    scored_rows: list[range]  # among the step's logit rows: the tokens that score the next prompt token, on request
    prompt_rows: list[range]  # among the step's tokens: such tokens, if they are no logit rows
    pooled_rows: list[range]  # among the step's tokens: the tokens whose hidden states are wanted, on request

    @property
    def wants_hidden(self) -> bool:
        """Whether more than the step's logits is wanted."""
        return any(self.prompt_rows) or any(self.pooled_rows)


def in_order(chunks: list[Chunk]) -> list[Chunk]:
    """The chunks in the order of their rows in a step: those that sample stand before the others."""
    return sorted(chunks, key=lambda chunk: not chunk.num_sampled)


def _state_rows(chunk: Chunk) -> tuple[int, ...]:
    """See kernels.recurrent."""
    source = chunk.source if chunk.source >= 0 or not chunk.start else chunk.slot
    return chunk.slot, source, chunk.snapshot, chunk.snapshot_after, chunk.replayed, len(chunk.draft)


class PersistentBatch:
    """Token ids and block tables of `num_slots` sequences, as arrays indexed by slot, and one set of step inputs.

    Every step writes its inputs to the same place, where a captured step finds them.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        max_step_tokens: int,
        num_groups: int = 1,
        *,
        has_states: bool = True,
        memory: Memory | None = None,
    ) -> None:
        self.has_states, self.memory = has_states, memory  # of an encoder's states, which each sequence sees
        self.block_size, self.max_step_tokens = block_size, max_step_tokens
        self.token_ids = np.zeros((num_slots, max_model_len), np.int64)
        self.num_tokens = np.zeros(num_slots, np.int64)
        self.num_prompt_tokens = np.zeros(num_slots, np.int64)
        self.block_tables = np.zeros((num_groups, num_slots, -(-max_model_len // block_size)), np.int32)
        self.num_blocks = np.zeros((num_groups, num_slots), np.int64)
        self.wants_prompt_logprobs = np.zeros(num_slots, bool)
        self.logprobs_start = np.zeros(num_slots, np.int64)
        self.prompt_top = np.zeros(num_slots, np.int64)  # most likely tokens to report at each position of a prompt
        self.prompt_shown: list[tuple[int, ...]] = [()] * num_slots  # tokens to report there instead
        self.adapters = np.full(num_slots, -1, np.int32)
        self.shifts = np.zeros(num_slots, np.int32)  # between the position of a token and its place after images
        self.images: dict[int, PlacedImages] = {}  # of slots whose sequences have some
        self.encoded = EncodedImages(0)
        self.second_starts: dict[int, int] = {}  # of slots whose sequences have two texts, see Request
        self.second_row = 0  # of position 0 of a second text in the table of positions; 0: the model has one type
        self.pooling: dict[int, Pooling] = {}  # of slots whose sequences want an embedding
        self.max_scored_rows = 0  # a step's logit rows, if those are among them that score prompt tokens
        self.keeps_tables = False  # whether the last inputs have the same block tables as the inputs before them
        self.always_adapted = False  # whether all rows are computed in the way of rows with an adapter
        self._entries = np.zeros(num_slots, np.int64)  # number of sequences that have entered
        # The values that grow by one in a decode step lie side by side.
        moving = torch.zeros(2 + num_groups, max(max_step_tokens, num_slots), dtype=torch.int32)
        self._moving = moving.numpy()
        self._inputs = {
            "token_ids": torch.zeros(max_step_tokens, dtype=torch.int64),
            "positions": moving[0],
            "slots": moving[2:],
            "query_start": torch.zeros(num_slots + 1, dtype=torch.int32),
            "context_lens": moving[1],
            "block_tables": torch.zeros(self.block_tables.shape, dtype=torch.int32),
            "rope_lens": torch.zeros(num_slots, dtype=torch.int32),
            "states": torch.zeros(num_slots, ROW_FIELDS, dtype=torch.int32),
            "logit_rows": torch.zeros(max_step_tokens, dtype=torch.int64),
            "logit_start": torch.zeros(num_slots + 1, dtype=torch.int32),
            "adapters": torch.full((max_step_tokens,), -1, dtype=torch.int32),
            "logit_adapters": torch.zeros(max_step_tokens, dtype=torch.int32),
        } | self._memory_inputs(max(max_step_tokens, num_slots), num_slots)
        self._arrays = {name: tensor.numpy() for name, tensor in self._inputs.items()}
        # By the number of sequences, and whether any has an adapter.
        self._decode_inputs: dict[tuple[int, bool], BatchInputs] = {}
        self._decode_shape = 0, False  # of the latest decode step
        # Of the tokens, if the inputs are a decode step's: their slots, the next positions, and the steps that go on in
        # the same blocks. A list is compared in less time than numpy takes for any array.
        self._decoded: list[int] = []
        self._following: list[int] = []
        self._steps_left = 0
        self._decoded_slots = np.zeros(0, np.int64)

    def _memory_inputs(self, num_tokens: int, num_slots: int) -> dict[str, torch.Tensor]:
        """Inputs of attention to what each sequence sees of an encoder's states, if the model has that. Tables alone
        differ between steps: each token has that of its slot."""
        if (memory := self.memory) is None:
            return {}
        blocks = memory.blocks(self.block_size)
        self._memory_tables = np.arange(num_slots * blocks, dtype=np.int32).reshape(num_slots, blocks)
        return {
            "memory_start": torch.arange(num_tokens + 1, dtype=torch.int32),
            "memory_lens": torch.full((num_tokens,), memory.length, dtype=torch.int32),
            "memory_tables": torch.zeros(num_tokens, blocks, dtype=torch.int32),
        }

    def _memory_of(self, num_tokens: int) -> BatchGeometry | None:
        """See BatchInputs."""
        if self.memory is None:
            return None
        start, lens, tables = (self._inputs[f"memory_{name}"] for name in ("start", "lens", "tables"))
        return BatchGeometry(start[: num_tokens + 1], lens[:num_tokens], tables[:num_tokens], start[:num_tokens])

    def enter(self, new: NewSequence) -> None:
        self._entries[new.slot] += 1
        self._decoded = []  # the next position of the slot would not be in the same blocks
        count = len(new.token_ids)
        self.token_ids[new.slot, :count] = new.token_ids
        self.num_tokens[new.slot] = count
        self.num_prompt_tokens[new.slot] = new.num_prompt_tokens
        self.num_blocks[:, new.slot] = 0
        self._extend_tables(new.slot, new.block_tables)
        self.wants_prompt_logprobs[new.slot] = new.prompt_logprobs
        self.logprobs_start[new.slot] = new.logprobs_start
        self.prompt_top[new.slot] = new.params.prompt_top
        self.prompt_shown[new.slot] = new.params.logprob_token_ids
        self.adapters[new.slot] = new.adapter
        self.images.pop(new.slot, None)
        self.shifts[new.slot] = 0
        if new.images and self.memory is None:
            placed = PlacedImages.of(new.images, new.num_prompt_tokens, self.encoded)
            self.images[new.slot], self.shifts[new.slot] = placed, placed.shift
        self.second_starts.pop(new.slot, None)
        if new.second_start is not None and self.second_row:
            self.second_starts[new.slot] = new.second_start
        self.pooling.pop(new.slot, None)
        if new.pooling is not None:
            self.pooling[new.slot] = new.pooling

    def append(self, slot: int, token_id: int) -> None:
        """Append a sampled token to the sequence. It is computed in a later step."""
        position = self.num_tokens[slot]
        if position < self.token_ids.shape[1]:
            self.token_ids[slot, position] = token_id
        self.num_tokens[slot] = position + 1

    def expect(self, slots: list[int]) -> Expected:
        """Append a token that is not known yet to each of these sequences.

        Its id is -1 - slot until `learn`. A step that computes it takes the token that was sampled last in that slot.
        """
        these = np.array(slots, np.int64)
        expected = Expected(these, self._entries[these], self.num_tokens[these])
        self._write_tokens(these, expected.positions, -1 - these)
        self.num_tokens[these] += 1
        return expected

    def learn(self, expected: Expected, token_ids: np.ndarray) -> None:
        """Fill in the expected tokens int64 [R] after their step has run. One stays unknown if its sequence has left
        the slot, or if it has no id: it is negative."""
        slots, entries, positions = expected
        known = (self._entries[slots] == entries) & (token_ids >= 0)
        self._write_tokens(slots[known], positions[known], token_ids[known])

    def _write_tokens(self, slots: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        """Write a token of each slot. The one after the longest sequence is never computed, and has no place."""
        fits = positions < self.token_ids.shape[1]
        self.token_ids[slots[fits], positions[fits]] = token_ids[fits]

    def inputs(self, chunks: list[Chunk]) -> tuple[BatchInputs, StepRows | None]:
        """Give the chunks their new blocks and gather the step's tensors, which are valid until the next step.

        The rows are None for a decode step, in which every sequence computes one token and samples the next, and none
        wants an embedding. Sequences that sample stand before the others, see BatchInputs.
        """
        for chunk in chunks:
            if chunk.new_blocks:
                self._extend_tables(chunk.slot, chunk.new_blocks)
            if chunk.draft:
                end = chunk.start + chunk.num_tokens
                self.token_ids[chunk.slot, end - len(chunk.draft) : end] = chunk.draft
        if self.has_states:
            self._arrays["states"][: len(chunks)] = [_state_rows(chunk) for chunk in in_order(chunks)]
        slots = [c.slot for c in chunks]
        if all(c.num_tokens == c.num_sampled == 1 for c in chunks) and self.pooling.keys().isdisjoint(slots):
            return self._decode(slots, [c.start for c in chunks]), None
        self._decoded, self.keeps_tables = [], False
        ordered = in_order(chunks)
        seqs = np.array([c.slot for c in ordered])
        starts = np.array([c.start for c in ordered])
        counts = np.array([c.num_tokens for c in ordered])
        query_start = np.concatenate(([0], counts.cumsum()))
        positions = np.arange(query_start[-1]) - np.repeat(query_start[:-1] - starts, counts)
        width = self._table_width(self._write(seqs, np.repeat(seqs, counts), positions, query_start, starts + counts))
        rows, spans = self._rows(chunks, dict(zip(seqs.tolist(), query_start.tolist(), strict=False)))
        logit_rows = [row for span in spans for row in span]
        self._arrays["logit_rows"][: len(logit_rows)] = logit_rows
        self._arrays["logit_adapters"][: len(logit_rows)] = self._arrays["adapters"][logit_rows]
        ends = np.cumsum([len(span) for span in spans if span], dtype=np.int32)
        self._arrays["logit_start"][1 : len(ends) + 1] = ends
        inputs = self._views(len(positions), len(seqs), width, len(logit_rows), len(ends))
        if self.images:
            placed = map(Span, seqs.tolist(), starts.tolist(), query_start.tolist(), counts.tolist())
            inputs = with_images(inputs, placed, self.images)
        return inputs, rows

    def _extend_tables(self, slot: int, by_group: list[list[int]]) -> None:
        for group, blocks in enumerate(by_group):
            first = self.num_blocks[group, slot]
            self.block_tables[group, slot, first : first + len(blocks)] = blocks
            self.num_blocks[group, slot] = first + len(blocks)

    def _decode(self, slots: list[int], starts: list[int]) -> BatchInputs:
        """One token of each sequence, by their slots and positions."""
        num_seqs = len(slots)
        self.keeps_tables = self._steps_left > 0 and slots == self._decoded and starts == self._following
        self._decoded, self._following = slots, [start + 1 for start in starts]
        if self.keeps_tables:  # every sequence moves on by one token in the same blocks
            self._steps_left -= 1
            self._moving[:, :num_seqs] += 1
            places = self._decoded_slots, self._arrays["context_lens"][:num_seqs] - 1
            self._arrays["token_ids"][:num_seqs] = self.token_ids[places]
            return self._decode_inputs[self._decode_shape]
        self._decoded_slots, positions = np.array(slots), np.array(starts)
        self._steps_left = self.block_size - 1 - int((positions % self.block_size).max())
        self._write(self._decoded_slots, self._decoded_slots, positions, np.arange(num_seqs + 1), positions + 1)
        shape = self._decode_shape = num_seqs, self._has_adapters(num_seqs)
        if shape not in self._decode_inputs:
            inputs = self._views(num_seqs, num_seqs, self.block_tables.shape[2], 0, 0)
            rows, start = torch.arange(num_seqs), inputs.geometries[0].query_start
            self._decode_inputs[shape] = replace(inputs, logit_rows=rows, logit_start=start)
        return self._decode_inputs[shape]

    def _write(
        self, slots: np.ndarray, owner: np.ndarray, positions: np.ndarray, query_start: np.ndarray, lens: np.ndarray
    ) -> int:
        """Fill in a step whose token t is at positions[t] of the sequence in slot owner[t].

        Returns the number of block table columns in use.
        """
        arrays, tokens, seqs = self._arrays, len(positions), len(slots)
        arrays["token_ids"][:tokens] = self.token_ids[owner, positions]
        arrays["positions"][:tokens] = positions + self.shifts[owner]
        for slot, start in self.second_starts.items():
            arrays["positions"][:tokens][(owner == slot) & (positions >= start)] += self.second_row
        arrays["adapters"][:tokens] = self.adapters[owner]
        if self.memory is not None:
            arrays["memory_tables"][:tokens] = self._memory_tables[owner]
        block, offset = np.divmod(positions, self.block_size)
        arrays["slots"][:, :tokens] = self.block_tables[:, owner, block] * self.block_size + offset
        arrays["query_start"][: seqs + 1] = query_start
        arrays["context_lens"][:seqs] = lens
        arrays["rope_lens"][:seqs] = self.num_prompt_tokens[slots]
        max_blocks = int(-(-lens.max() // self.block_size))
        arrays["block_tables"][:, :seqs, :max_blocks] = self.block_tables[:, slots, :max_blocks]
        return max_blocks

    def _table_width(self, num_blocks: int) -> int:
        """The columns of the block tables of a step that uses `num_blocks` of them."""
        width = -(-TABLE_KEYS // self.block_size)
        while width < num_blocks:
            width *= 2
        return min(width, self.block_tables.shape[2])

    def example(self, num_tokens: int, num_logits: int, *, widest: bool = False) -> BatchInputs:
        """A step of one sequence with so many tokens and logit rows. Its shapes are right, its tokens mean nothing.
        `widest`: its table is that of the longest sequence."""
        self._arrays["query_start"][:2], self._arrays["context_lens"][0] = (0, num_tokens), num_tokens
        self._arrays["states"][0] = (0, -1, -1, 0, 0, 0)
        width = self._inputs["block_tables"].shape[2] if widest else self._table_width(1)
        return self._views(num_tokens, 1, width, num_logits, 1)

    def _has_adapters(self, num_tokens: int) -> bool:
        """Whether any of the first tokens of the inputs belongs to a sequence with an adapter, or is computed as if."""
        return self.always_adapted or bool(self._arrays["adapters"][:num_tokens].max(initial=-1) >= 0)

    def _views(
        self, num_tokens: int, num_seqs: int, table_width: int, num_logits: int, num_sampled: int
    ) -> BatchInputs:
        whole, adapted = self._inputs, self._has_adapters(num_tokens)
        slots, tables = whole["slots"][:, :num_tokens], whole["block_tables"][:, :num_seqs, :table_width]
        query_start, context_lens = whole["query_start"][: num_seqs + 1], whole["context_lens"][:num_seqs]
        return BatchInputs(
            token_ids=whole["token_ids"][:num_tokens],
            positions=whole["positions"][:num_tokens],
            geometries=tuple(
                BatchGeometry(query_start, context_lens, table, slot) for table, slot in zip(tables, slots, strict=True)
            ),
            rope_lens=whole["rope_lens"][:num_seqs],
            logit_rows=whole["logit_rows"][:num_logits],
            logit_start=whole["logit_start"][: num_sampled + 1],
            adapters=whole["adapters"][:num_tokens] if adapted else None,
            logit_adapters=whole["logit_adapters"][:num_logits] if adapted else None,
            states=whole["states"][:num_seqs],
            memory=self._memory_of(num_tokens),
        )

    def _rows(self, chunks: list[Chunk], first_rows: dict[int, int]) -> tuple[StepRows, list[range]]:
        """The rows of chunks whose first rows are given by slot, and the tokens of each whose logits are wanted.

        Tokens that score stand before the one that is sampled. So they may be logit rows too, if their chunks
        reach the end of the prompts, the step has no other use for hidden states, and there is memory for their logits.
        """
        scored = [self._scored(chunk, first_rows[chunk.slot]) for chunk in chunks]
        sampled, pooled = [], []
        for chunk in chunks:
            end = first_rows[chunk.slot] + chunk.num_tokens
            sampled.append(range(end - chunk.num_sampled, end))
            kind = self.pooling.get(chunk.slot)
            num_pooled = {None: 0, "last": chunk.num_sampled}.get(kind, chunk.num_tokens)
            pooled.append(range(end - num_pooled, end))
        nothing = [range(0)] * len(chunks)
        in_front, elsewhere = scored, nothing
        if (
            any(pooled)
            or any(span and not chunk.num_sampled for span, chunk in zip(scored, chunks, strict=True))
            or sum(map(len, scored + sampled)) > self.max_scored_rows
        ):
            in_front, elsewhere = nothing, scored
        spans = [range(own.start - len(front), own.stop) for front, own in zip(in_front, sampled, strict=True)]
        sample_rows, scored_rows, begin = [], [], 0
        for front, span in zip(in_front, spans, strict=True):
            scored_rows.append(range(begin, begin + len(front)))
            sample_rows.append(range(begin + len(front), begin + len(span)))
            begin += len(span)
        return StepRows(sample_rows, scored_rows, elsewhere, pooled), spans

    def _scored(self, chunk: Chunk, first: int) -> range:
        """The rows of the chunk's tokens that score the next prompt token. `first` is the chunk's first row."""
        if not self.wants_prompt_logprobs[chunk.slot]:
            return range(0)
        start, end = int(self.logprobs_start[chunk.slot]), int(self.num_prompt_tokens[chunk.slot]) - 1
        skipped = max(start - chunk.start, 0)
        return range(first, first + chunk.num_tokens)[skipped : max(end - chunk.start, 0)]

    def prompt_targets(self, chunk: Chunk, count: int) -> list[int]:
        """The tokens that the chunk's scored rows predict."""
        first = max(chunk.start, int(self.logprobs_start[chunk.slot])) + 1
        targets: list[int] = self.token_ids[chunk.slot, first : first + count].tolist()
        return targets
