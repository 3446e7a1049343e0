"""A head that drafts (models.draft_head), beside the model whose residual streams it reads.

Before it drafts, it computes the tokens that the model has chosen since, from the model's streams. After them it goes
on from its own states. What it has computed from its own states is computed again from the model's.

The text of a sequence begins here after the first token whose streams are kept, at position 0. That changes nothing:
RoPE sees distances alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmkit.layers.batch import BatchInputs
from lmkit.models.draft_head import DraftHead
from lmkit.turbo.plan import Chunk
from lmkit.turbo.runners.batch import in_order
from lmkit.turbo.runners.cpu import CpuRunner
from lmkit.turbo.runners.cuda import CudaRunner
from lmkit.turbo.runners.draft_model_runner import DraftModelRunner, Drafts, Text
from lmkit.turbo.runners.gpu import Gpu
from lmkit.turbo.runners.runner import Runner, RunnerParts, Ticket
from lmkit.turbo.runners.streams import Streams
from lmkit.turbo.sequence import Sequence


class _AllTokens:
    """Gives logits of the model's tokens: those that the head does not have are impossible."""

    def __init__(self, parts: RunnerParts, token_ids: Tensor | None) -> None:
        self._token_ids, shape = token_ids, (parts.config.sequences_per_step, parts.decoder.spec.vocab_size)
        self._logits = None if token_ids is None else torch.full(shape, -torch.inf, device=token_ids.device)

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits [R, the head's tokens] -> [R, vocab], valid until the next call."""
        if self._logits is None or self._token_ids is None:
            return logits
        return self._logits[: len(logits)].index_copy_(1, self._token_ids, logits)


class HeadRunner(CpuRunner):
    """The runner of a head whose tokens are `token_ids` of the model; None: all."""

    def __init__(self, parts: RunnerParts, token_ids: Tensor | None) -> None:
        super().__init__(parts)
        self._all = _AllTokens(parts, token_ids)

    def _logits(self, inputs: BatchInputs) -> Tensor:
        return self._all(super()._logits(inputs))


class CudaHeadRunner(CudaRunner):
    """The same on a GPU."""

    def __init__(self, device: Gpu, parts: RunnerParts, token_ids: Tensor | None) -> None:
        super().__init__(device, parts)
        self._all = _AllTokens(parts, token_ids)

    def _forward(self, inputs: BatchInputs) -> Tensor:
        return self._all(super()._forward(inputs))


class DraftHeadRunner(DraftModelRunner):
    """See DraftModelRunner. The runner's decoder is the head, joined to its model."""

    def __init__(
        self,
        runner: Runner,
        num_blocks: int,
        vocab_size: int,
        call: Callable[[Callable[[], Any]], Any],
        streams: Streams,
    ) -> None:
        super().__init__(runner, num_blocks, vocab_size, call)
        # Its distributions are too rough for the same random numbers to choose the same tokens.
        self._drawing = frozenset({"logit_bias"})
        self._streams = streams
        head = runner.decoder
        assert isinstance(head, DraftHead)
        rows = max(runner.batch.max_step_tokens, len(self._slots))
        head.states = torch.zeros(rows, head.spec.hidden_size, device=head.at)
        head.next_states = torch.zeros_like(head.states)
        self._head = head
        self._goes_on = False  # from its own states, after the first step of a draft

    def follow(self, wanted: bool) -> float:
        """See DraftModel. The model's streams are kept meanwhile."""
        self._streams.are_wanted = wanted
        seconds, self._streams.seconds = self._streams.seconds, 0.0
        return seconds

    def _draft(self, lengths: dict[Sequence, int]) -> Drafts:
        self._goes_on = False
        return super()._draft(lengths)

    def _step(self, chunks: dict[Sequence, Chunk]) -> Ticket:
        """See DraftModelRunner. The rows of those that go on were the first ones of the step before, in this order."""
        if self._goes_on:
            states = self._head.own_states(self._head.next_states[: len(chunks)])
        else:
            by_slot = {chunk.slot: seq for seq, chunk in chunks.items()}
            ordered = in_order(list(chunks.values()))
            states = self._head.first_states(self._streams.take([self._kept(by_slot[c.slot], c) for c in ordered]))
        self._head.states[: len(states)] = states
        self._goes_on = True
        return super()._step(chunks)

    def _kept(self, seq: Sequence, chunk: Chunk) -> tuple[int, int, int]:
        """Where the streams before the chunk's tokens are: those of the tokens before."""
        first = self._texts[seq].start + chunk.start - 1
        return seq.slot, first, first + chunk.num_tokens

    def _begin(self, seq: Sequence, length: int) -> int | None:
        """See DraftModelRunner."""
        begin, end = self._streams.span(seq.slot)
        text = self._texts.get(seq)
        if text is not None:
            too_late = begin >= text.start + min(text.known, text.computed)
            if not too_late and seq.num_tokens - text.start + length <= self._max_len:
                return text.start if end >= seq.num_tokens - 1 else None
            self.forget(seq)
        return begin + 1 if begin < seq.num_tokens - 1 <= end else None

    def _correct(self, text: Text, tokens: np.ndarray) -> None:
        """See DraftModelRunner. Drafts, right or wrong, are computed again: `known` tokens have the model's states."""
        text.computed = min(text.computed, text.known)
        super()._correct(text, tokens)
