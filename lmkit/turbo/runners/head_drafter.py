"""A head that guesses (models.draft_head) on a CPU, beside the model whose residual streams it reads.

Before it guesses, it computes the tokens that the model has chosen since, from the model's streams. Behind them it goes
on from its own states. What it has computed from its own states is computed again from the model's.

The text of a sequence begins here behind the first token whose streams are kept, at position 0. That changes nothing:
RoPE sees distances alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmkit.layers.batch import BatchInputs
from lmkit.models.draft_head import DraftHead, HeadParts
from lmkit.turbo.plan import Chunk
from lmkit.turbo.runners.batch import in_order
from lmkit.turbo.runners.cpu import CpuRunner
from lmkit.turbo.runners.device import CpuDevice
from lmkit.turbo.runners.drafter import Drafter, Drafts, Text
from lmkit.turbo.runners.runner import RunnerParts
from lmkit.turbo.runners.streams import Streams
from lmkit.turbo.sequence import Sequence


class HeadRunner(CpuRunner):
    """Gives logits of the model's tokens: those that the head does not have are impossible."""

    def __init__(self, parts: RunnerParts, token_ids: Tensor | None) -> None:
        super().__init__(CpuDevice(), parts)
        self._token_ids = token_ids
        shape = parts.config.sequences_per_step, parts.decoder.spec.vocab_size
        self._all = None if token_ids is None else torch.full(shape, -torch.inf)

    def _logits(self, inputs: BatchInputs) -> Tensor:
        logits = super()._logits(inputs)
        if self._all is None or self._token_ids is None:
            return logits
        return self._all[: len(logits)].index_copy_(1, self._token_ids, logits)


class HeadDrafter(Drafter):
    """See Drafter. `parts.decoder` is the head, joined to its model."""

    def __init__(
        self,
        parts: RunnerParts,
        head: HeadParts,
        num_blocks: int,
        vocab_size: int,
        call: Callable[[Callable[[], Any]], Any],
        streams: Streams,
    ) -> None:
        super().__init__(parts, num_blocks, vocab_size, call, HeadRunner(parts, head.token_ids))
        # Its distributions are too rough for the same random numbers to choose the same tokens.
        self._drawing = frozenset({"logit_bias"})
        self._streams = streams
        self._states = torch.zeros(self._runner.batch.max_step_tokens, parts.decoder.spec.hidden_size)
        self._next_states = torch.zeros_like(self._states)
        decoder = parts.decoder
        assert isinstance(decoder, DraftHead)
        decoder.states, decoder.next_states = self._states, self._next_states
        self._head = decoder
        self._rows: dict[Sequence, int] = {}  # of the states behind the last step

    def _draft(self, lengths: dict[Sequence, int]) -> Drafts:
        self._rows = {}
        return super()._draft(lengths)

    def _step(self, chunks: dict[Sequence, Chunk], drafts: dict[Sequence, list[int]]) -> None:
        by_slot = {chunk.slot: seq for seq, chunk in chunks.items()}
        ordered = [(by_slot[chunk.slot], chunk) for chunk in in_order(list(chunks.values()))]
        if self._rows:
            states = self._head.own_states(self._next_states[[self._rows[seq] for seq, _ in ordered]])
        else:
            kept = [self._kept(seq, chunk) for seq, chunk in ordered]
            states = self._head.first_states(torch.cat(kept))
        self._states[: len(states)] = states
        super()._step(chunks, drafts)
        self._rows = {seq: row for row, (seq, chunk) in enumerate(ordered) if chunk.num_sampled}

    def _kept(self, seq: Sequence, chunk: Chunk) -> Tensor:
        """The streams in front of the chunk's tokens: those of the tokens before."""
        first = self._texts[seq].start + chunk.start - 1
        return self._streams.take(seq.slot, first, first + chunk.num_tokens)

    def _begin(self, seq: Sequence, length: int) -> int | None:
        """See Drafter."""
        begin, end = self._streams.span(seq.slot)
        text = self._texts.get(seq)
        if text is not None:
            too_late = begin >= text.start + min(text.known, text.computed)
            if not too_late and seq.num_tokens - text.start + length <= self._max_len:
                return text.start if end >= seq.num_tokens - 1 else None
            self.forget(seq)
        return begin + 1 if begin < seq.num_tokens - 1 <= end else None

    def _correct(self, text: Text, tokens: np.ndarray) -> None:
        """See Drafter. Guesses, right or wrong, are computed again: `known` tokens have the model's states."""
        text.computed = min(text.computed, text.known)
        super()._correct(text, tokens)
