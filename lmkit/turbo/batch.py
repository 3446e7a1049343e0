"""The persistent batch: sequences keep a slot while they run, and a step touches only what changed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lmkit.layers.batch import BatchInputs
from lmkit.turbo.plan import Chunk, NewSequence, StepPlan


@dataclass(frozen=True)
class StepRows:
    """Where each chunk's logits lie among the step's logit rows, by the plan's order."""

    sample_row: list[int]  # -1 = the chunk does not sample
    prompt_rows: list[range]  # rows that score the chunk's prompt tokens; empty where not asked for


class PersistentBatch:
    """Token ids and block tables of `num_slots` sequences, as arrays indexed by slot."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.token_ids = np.zeros((num_slots, max_model_len), np.int64)
        self.num_tokens = np.zeros(num_slots, np.int64)
        self.num_prompt_tokens = np.zeros(num_slots, np.int64)
        self.block_tables = np.zeros((num_slots, -(-max_model_len // block_size)), np.int32)
        self.num_blocks = np.zeros(num_slots, np.int64)
        self.wants_prompt_logprobs = np.zeros(num_slots, bool)

    def enter(self, new: NewSequence) -> None:
        count = len(new.token_ids)
        self.token_ids[new.slot, :count] = new.token_ids
        self.num_tokens[new.slot] = count
        self.num_prompt_tokens[new.slot] = new.num_prompt_tokens
        self.num_blocks[new.slot] = 0
        self.wants_prompt_logprobs[new.slot] = new.prompt_logprobs

    def append(self, slot: int, token_id: int) -> None:
        """A sampled token becomes the sequence's last; it is computed in a later step."""
        position = self.num_tokens[slot]
        if position < self.token_ids.shape[1]:
            self.token_ids[slot, position] = token_id
        self.num_tokens[slot] = position + 1

    def inputs(self, plan: StepPlan) -> tuple[BatchInputs, StepRows]:
        """Give the chunks their new blocks and gather the step's tensors."""
        for chunk in plan.chunks:
            first = self.num_blocks[chunk.slot]
            self.block_tables[chunk.slot, first : first + len(chunk.new_blocks)] = chunk.new_blocks
            self.num_blocks[chunk.slot] = first + len(chunk.new_blocks)
        slots = np.array([c.slot for c in plan.chunks])
        starts = np.array([c.start for c in plan.chunks])
        counts = np.array([c.num_tokens for c in plan.chunks])
        query_start = np.concatenate(([0], counts.cumsum()))
        owner = np.repeat(slots, counts)
        positions = np.arange(query_start[-1]) - np.repeat(query_start[:-1] - starts, counts)
        blocks = self.block_tables[owner, positions // self.block_size]
        max_blocks = int(-(-(starts + counts).max() // self.block_size))
        rows, logit_rows = self._logit_rows(plan.chunks, query_start)
        batch = BatchInputs(
            token_ids=torch.from_numpy(self.token_ids[owner, positions]),
            positions=torch.from_numpy(positions.astype(np.int32)),
            slots=torch.from_numpy((blocks * self.block_size + positions % self.block_size).astype(np.int32)),
            query_start=torch.from_numpy(query_start.astype(np.int32)),
            context_lens=torch.from_numpy((starts + counts).astype(np.int32)),
            block_tables=torch.from_numpy(self.block_tables[slots, :max_blocks]),
            rope_lens=torch.from_numpy(self.num_prompt_tokens[slots].astype(np.int32)),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        )
        return batch, rows

    def _logit_rows(self, chunks: list[Chunk], query_start: np.ndarray) -> tuple[StepRows, list[int]]:
        logit_rows: list[int] = []
        sample_row, prompt_rows = [], []
        for chunk, first in zip(chunks, query_start.tolist(), strict=False):
            scored = 0
            if self.wants_prompt_logprobs[chunk.slot]:
                scored = min(chunk.num_tokens, max(int(self.num_prompt_tokens[chunk.slot]) - 1 - chunk.start, 0))
            prompt_rows.append(range(len(logit_rows), len(logit_rows) + scored))
            logit_rows.extend(range(first, first + scored))
            sample_row.append(len(logit_rows) if chunk.sample else -1)
            if chunk.sample:
                logit_rows.append(first + chunk.num_tokens - 1)
        return StepRows(sample_row, prompt_rows), logit_rows

    def prompt_targets(self, chunk: Chunk, count: int) -> torch.Tensor:
        """int64 [count]: the tokens that the chunk's scored rows predict."""
        return torch.from_numpy(self.token_ids[chunk.slot, chunk.start + 1 : chunk.start + 1 + count])
