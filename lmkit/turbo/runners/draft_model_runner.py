"""A draft model: a runner of its own, whose KV follows the sequences of another model.

Before it drafts, it computes the tokens that the other model has chosen since. The KV of drafts that were wrong is
written again. A sequence keeps its place here when it is preempted there.

It samples as the other model does, with the request's temperature and seed. The same random numbers then choose the
same token wherever both models find it equally likely.

On a GPU all steps of a draft are launched before the first draft token is known, and the host waits once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import msgspec
import numpy as np

from lmkit.log import get_logger
from lmkit.turbo.plan import Chunk, NewSequence, StepPlan
from lmkit.turbo.request import SamplingParams
from lmkit.turbo.runners.runner import Runner, StepResult, Ticket
from lmkit.turbo.sequence import Sequence

log = get_logger(__name__)

Drafts = tuple[dict[Sequence, list[int]], list[tuple[int, float]]]


@dataclass
class Text:
    """A sequence that the draft model follows."""

    slot: int
    start: int = 0  # the token of the sequence at which it begins
    known: int = 0  # tokens that the other model has chosen, as far as they are here
    computed: int = 0  # tokens whose KV is here: known ones, then draft tokens
    blocks: list[int] = field(default_factory=list)  # of all groups


class DraftModelRunner:
    """See scheduling.model_speculation.DraftModel. `call` works where steps of the other model run, and waits."""

    def __init__(
        self,
        runner: Runner,
        num_blocks: int,
        vocab_size: int,
        call: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._runner, self._call = runner, call
        num_slots, self._max_len = runner.batch.token_ids.shape
        self._vocab_size = min(vocab_size, runner.decoder.spec.vocab_size)  # tokens that both models have
        self._num_groups = len(runner.batch.block_tables)
        self._slots = list(range(num_slots))
        self._blocks = list(range(num_blocks))
        self._texts: dict[Sequence, Text] = {}
        self._new: dict[int, NewSequence] = {}  # by slot: they enter with the next step
        self._drawing = DRAWING
        self._has_failed = False

    def warm_up(self) -> None:
        if captured := self._runner.warm_up():
            log.info("draft tokens: captured %s", captured)

    def close(self) -> None:
        self._runner.close()

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        text = self._texts.pop(seq, None)
        if text is not None:
            self._slots.append(text.slot)
            self._blocks += text.blocks
            self._new.pop(text.slot, None)

    def follow(self, wanted: bool) -> float:
        """See DraftModel. It computes what it lacks when it is asked."""
        return 0.0

    def draft(self, lengths: dict[Sequence, int]) -> Drafts:
        """See DraftModel. If a step fails, there are no more draft tokens, and the other model goes on alone."""
        if self._has_failed:
            return {}, []
        try:
            drafts: Drafts = self._call(partial(self._draft, lengths))
        except Exception:  # draft tokens are never needed
            log.exception("the draft model failed; decoding goes on without it")
            self._has_failed = True
            return {}, []
        return drafts

    def _draft(self, lengths: dict[Sequence, int]) -> Drafts:
        chunks: dict[Sequence, Chunk] = {}
        room = self._runner.batch.max_step_tokens
        for seq in sorted(lengths, key=lambda seq: -lengths[seq]):  # those that go on are the first rows of each step
            chunk = self._catch_up(seq, lengths[seq], room, lengths) if room else None
            if chunk is not None:
                chunks[seq] = chunk
                room -= chunk.num_tokens
        self._runner.resume({chunk.slot: seq.num_outputs for seq, chunk in chunks.items()})
        launched = list[tuple[dict[Sequence, Chunk], Ticket, float]]()
        while chunks:
            start = time.perf_counter()
            ticket = self._step(chunks)
            launched.append((chunks, ticket, time.perf_counter() - start))
            chunks = {
                seq: Chunk(chunk.slot, self._texts[seq].computed, 1, [], 1)
                for seq, chunk in chunks.items()
                if chunk.num_sampled and len(launched) < lengths[seq]
            }
        drafts, steps = dict[Sequence, list[int]](), list[tuple[int, float]]()
        for chunks, ticket, on_host in launched:
            sampled, seconds, *_ = ticket()
            for seq, result in zip(chunks, sampled, strict=True):
                drafts.setdefault(seq, []).extend(token.token_id for token in result.tokens)
            count = sum(chunk.num_tokens for chunk in chunks.values())
            if count <= (2 + max(lengths.values())) * len(chunks):  # or it had a prompt, or tokens without draft tokens
                steps.append((len(chunks), max(seconds, on_host)))
        known = {seq: list(takewhile(self._is_known, draft)) for seq, draft in drafts.items()}
        return {seq: draft for seq, draft in known.items() if draft}, steps

    def _is_known(self, token: int) -> bool:
        return 0 <= token < self._vocab_size

    def _step(self, chunks: dict[Sequence, Chunk]) -> Ticket:
        new, self._new = list(self._new.values()), {}
        runner = self._runner
        ticket = partial(runner.collect, runner.launch(StepPlan([], new, list(chunks.values()))))
        for seq, chunk in chunks.items():
            self._texts[seq].computed += chunk.num_tokens
        return ticket if runner.runs_ahead else _known(ticket())

    def _catch_up(self, seq: Sequence, length: int, room: int, wanted: dict[Sequence, int]) -> Chunk | None:
        """The tokens of the sequence to compute before its first draft, at most `room`. None if it finds no place."""
        start = self._begin(seq, length)
        if start is None or (num_tokens := seq.num_tokens - start) + length > self._max_len:
            return None
        text = self._texts.get(seq)
        tokens = seq.tokens(seq.num_tokens)[start + (text.known if text is not None else 0) :]
        if tokens.size and int(tokens.max()) >= self._vocab_size:
            return None
        text = text or self._enter(seq, start, wanted)
        new_blocks = self._grow(text, num_tokens + length, wanted) if text is not None else None
        if text is None or new_blocks is None:
            self.forget(seq)
            return None
        self._correct(text, tokens)
        count = min(num_tokens - text.computed, room)
        return Chunk(text.slot, text.computed, count, new_blocks, int(text.computed + count == num_tokens))

    def _begin(self, seq: Sequence, length: int) -> int | None:
        """The token of the sequence at which its text here begins. None: it cannot be followed now."""
        return 0

    def _correct(self, text: Text, tokens: np.ndarray) -> None:
        """Put the next tokens of the text in the place of the drafts of them."""
        batch, slot, end = self._runner.batch, text.slot, text.known + len(tokens)
        held = batch.token_ids[slot, text.known : end]
        wrong = np.flatnonzero(held != tokens)
        first = text.known + int(wrong[0]) if len(wrong) else end
        text.computed = min(text.computed, first, end - 1)
        held[:] = tokens
        text.known = end
        batch.num_tokens[slot] = end

    def _enter(self, seq: Sequence, start: int, wanted: dict[Sequence, int]) -> Text | None:
        if not self._slots:
            self._make_room(wanted)
        if not self._slots:
            return None
        slot = self._slots.pop()
        params = msgspec.structs.replace(
            seq.request.params,
            **{name: getattr(PLAIN, name) for name in PLAIN.__struct_fields__ if name not in self._drawing},
        )
        num_prompt_tokens = max(seq.num_prompt_tokens - start, 0)
        self._new[slot] = NewSequence(slot, seq.token_ids[start:].tolist(), num_prompt_tokens, params, (), False)
        self._texts[seq] = text = Text(slot, start)
        return text

    def _grow(self, text: Text, num_tokens: int, wanted: dict[Sequence, int]) -> list[list[int]] | None:
        """Blocks of each group that the text lacks for so many tokens. None if there are too few."""
        columns = -(-num_tokens // self._runner.batch.block_size) - len(text.blocks) // self._num_groups
        count = max(columns, 0) * self._num_groups
        if count > len(self._blocks):
            self._make_room(wanted)
        if count > len(self._blocks):
            return None
        taken = [self._blocks.pop() for _ in range(count)]
        text.blocks += taken
        return [taken[group :: self._num_groups] for group in range(self._num_groups)]

    def _make_room(self, wanted: dict[Sequence, int]) -> None:
        """Drop what is kept of other sequences, such as preempted ones."""
        for seq in [seq for seq in self._texts if seq not in wanted]:
            self.forget(seq)


def _known(result: StepResult) -> Ticket:
    return lambda: result


PLAIN = SamplingParams()
DRAWING = frozenset({"temperature", "top_k", "top_p", "min_p", "seed", "logit_bias"})
