"""From logits to tokens on the GPU: the same tokens as turbo.runners.sampler, without a wait for them.

A sampled token stays on the device (`last_token`), where the next step finds it, and is copied to the host meanwhile.
Everything that decides it is on the device too: the sequence's parameters, the number of its tokens and the count of
each token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lmkit.kernels.cuda import sampling
from lmkit.kernels.cuda.switches import switches
from lmkit.turbo.plan import NewSequence, SampledToken
from lmkit.turbo.runners.guides import Guides, RunningGuide
from lmkit.turbo.runners.sampler import edits_logits, penalizes
from lmkit.turbo.runners.upload import upload
from lmkit.turbo.sequence import FAILED_TOKEN

NUM_OUTPUTS = list(sampling.SLOT.names or ()).index("num_outputs")


@dataclass(frozen=True)
class PendingTokens:
    """Tokens on their way to the host. `result` waits for them, and for nothing later on the stream."""

    tokens: Tensor  # int64 [R] on the host
    scores: Tensor | None  # float64, the result of sampling.score; on the host
    scored: dict[int, tuple[int, int]]  # row -> (row of `scores`, most likely tokens to report)
    copied: torch.cuda.Event | None
    # of sequences that show certain tokens: row -> (their ids, their logits)
    shown: dict[int, tuple[tuple[int, ...], Tensor]]

    def token_id(self, row: int) -> int:
        """Wait for the tokens. Returns one of them."""
        if self.copied is not None:
            self.copied.synchronize()
        return int(self.tokens[row])

    def result(self) -> list[SampledToken]:
        """Wait for the tokens. Returns one for each row of the logits; FAILED_TOKEN for an unusable row."""
        if self.copied is not None:
            self.copied.synchronize()
        results = [SampledToken(token) for token in self.tokens.tolist()]
        if self.scores is not None:
            scores = self.scores.numpy()
            for row, (place, num_top) in self.scored.items():
                if results[row].token_id != FAILED_TOKEN:
                    results[row] = _with_logprobs(results[row].token_id, scores[place], num_top, self.shown.get(row))
        return results


class GpuSampler:
    """Sampling parameters and state of `num_slots` sequences, on a device.

    A sequence with penalties takes 4 bytes there for each token of the vocabulary.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: str, guides: Guides | None = None) -> None:
        self.vocab_size = vocab_size
        self._guides = guides
        self._guided: dict[int, RunningGuide] = {}
        self._masks: Tensor | None = None  # int32 [slots, ceil(vocab / 32)], if a sequence ever followed a grammar
        self._unread: tuple[PendingTokens, list[tuple[int, RunningGuide]]] | None = None  # rows that guides wait for
        self.num_top = np.full(num_slots, -1)  # most likely tokens to report; -1 = no log-probabilities at all
        self.last_token = torch.zeros(num_slots, dtype=torch.int64, device=device)  # 0 where sampling has failed
        self.table = torch.zeros(num_slots, sampling.WORDS, dtype=torch.int64, device=device)
        self._shown: dict[int, tuple[int, ...]] = {}  # slots -> tokens to report instead of the most likely ones
        self._edits: dict[int, list[Tensor]] = {}  # slots with changed logits -> tensors that their records point at
        self._beyond_argmax: set[int] = set()  # slots that draw, edit or report
        self._beyond_draws: set[int] = set()  # of these, slots that edit or report
        sampling.compile_kernels(self.table.device.type)

    def set(self, slot: int, new: NewSequence) -> None:
        """Set up the slot for a sequence. After a preemption its state is rebuilt from its tokens."""
        params = new.params
        assert params.temperature == 0 or params.seed is not None, "a sampled request without a seed"
        self.clear(slot)
        self.num_top[slot] = -1 if params.logprobs is None else params.logprobs
        if params.logprob_token_ids:
            self.num_top[slot], self._shown[slot] = 0, params.logprob_token_ids
        record = np.zeros((), sampling.SLOT)
        record["temperature"], record["top_k"] = params.temperature, params.top_k
        record["top_p"], record["min_p"] = params.top_p, params.min_p
        record["seed"], record["num_outputs"] = params.seed or 0, len(new.token_ids) - new.num_prompt_tokens
        record["num_top"] = max(0, self.num_top[slot])
        if self._guides is not None and params.grammar:
            self._guided[slot] = self._guides.begin(new)
            record["mask"] = self._mask(slot).data_ptr()
        if edits_logits(params):
            self._edits[slot] = self._record_edits(record, new)
        if slot in self._edits or params.logprobs is not None:
            self._beyond_draws.add(slot)
        if slot in self._beyond_draws or params.temperature > 0:
            self._beyond_argmax.add(slot)
        self.table[slot].copy_(self._upload(record.reshape(1).view(np.int64)))

    def clear(self, slot: int) -> None:
        """Clear the slot after its sequence has left."""
        self._edits.pop(slot, None)
        self._guided.pop(slot, None)
        self._shown.pop(slot, None)
        self._beyond_argmax.discard(slot)
        self._beyond_draws.discard(slot)

    def resume(self, num_outputs: dict[int, int]) -> None:
        """See Sampler. A greedy slot needs no number."""
        drawn = np.array([item for item in num_outputs.items() if item[0] in self._beyond_argmax], np.int64)
        if len(drawn):
            slots, counts = self._upload(drawn.T.copy())
            self.table[:, NUM_OUTPUTS].index_copy_(0, slots, counts)

    def is_greedy(self, slots: Seq[int]) -> bool:
        """Whether `argmax` chooses the tokens of these slots."""
        return switches().argmax and self._beyond_argmax.isdisjoint(slots)

    def is_drawn(self, slots: Seq[int]) -> bool:
        """Whether `argmax` and `draw` together choose the tokens of these slots."""
        return switches().argmax and self._beyond_draws.isdisjoint(slots)

    def draw(self, logits: Tensor, slots: Tensor, tokens: Tensor) -> None:
        """Launch the part of `sample` for rows with a temperature, of which nothing is edited or reported. See argmax,
        whose rows are left out."""
        sampling.sample(logits, self.table, slots, self.last_token, tokens, drawn_only=True)

    def argmax(self, logits: Tensor, slots: Tensor, tokens: Tensor, *, counts: bool = True) -> None:
        """Launch the greedy part of `sample`: tokens int64 [R] of slots int32 [R], -1 = padding. It can be captured.
        Rows with a temperature are left out.

        Without `counts` the tokens are not those of the slots yet: a slot has the rows of a draft. Greedy slots need no
        more, because the host knows the tokens of such a step before the next one.
        """
        sampling.argmax(logits, self.table, slots, self.last_token if counts else None, tokens)

    def most_likely(self, logits: Tensor) -> PendingTokens:
        """The most likely token of each row, where all rows are of greedy slots."""
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        slots = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        self.argmax(logits, slots, tokens, counts=False)
        return self.chosen(tokens)

    def sample(self, logits: Tensor, slots: Seq[int]) -> PendingTokens:
        """Sample the next token of each row of `logits` (float32 [R, vocab]). The row's sequence is in slots[row].

        Rows of sequences with penalties, biases or tokens that are held back are changed. A row with NaN or +inf, or
        with no token left to choose, gives FAILED_TOKEN and does not affect the other rows.
        """
        assert (logits.dtype, logits.stride(1)) == (torch.float32, 1)
        pending = self._sample(logits, slots)
        guided = [(row, self._guided[slot]) for row, slot in enumerate(slots) if slot in self._guided]
        self._unread = (pending, guided) if guided else None
        return pending

    def chosen(self, tokens: Tensor) -> PendingTokens:
        """What `sample` returns, for slots whose tokens were chosen in a captured step."""
        self._unread = None
        return self.fetch(tokens)

    def _sample(self, logits: Tensor, slots: Seq[int]) -> PendingTokens:
        edited = [row for row, slot in enumerate(slots) if slot in self._edits]
        scored = [row for row, slot in enumerate(slots) if self.num_top[slot] >= 0]
        numbers = self._upload(np.array([*slots, *edited, *scored], np.int32))
        slot_ids, edited_rows, scored_rows = numbers.split([len(slots), len(edited), len(scored)])
        tokens = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
        if self.is_greedy(slots):
            self.argmax(logits, slot_ids, tokens)
            return self.fetch(tokens)
        raw, gathered = logits, not set(edited).isdisjoint(scored)
        if gathered:
            raw = logits.index_select(0, scored_rows)
        shown = {
            row: (ids, _download(logits[row, self._upload(np.array(ids))]))
            for row, slot in enumerate(slots)
            if (ids := self._shown.get(slot))
        }
        self._guide([slot for slot in slots if slot in self._guided])
        if edited:
            sampling.edit_logits(logits, edited_rows, slot_ids, self.table)
        sampling.sample(logits, self.table, slot_ids, self.last_token, tokens)
        if not scored:
            return self.fetch(tokens)
        num_top = [int(self.num_top[slots[row]]) for row in scored]
        scores = sampling.score(
            raw, scored_rows, slot_ids, self.table, tokens, min(max(num_top), self.vocab_size), gathered=gathered
        )
        return self.fetch(tokens, scores, {row: (i, num_top[i]) for i, row in enumerate(scored)}, shown)

    def _guide(self, slots: list[int]) -> None:
        """Write the masks of `slots`. The host waits for the step before, while this step's logits are computed."""
        if self._unread is not None:
            pending, rows = self._unread
            for row, guide in rows:
                if (token := pending.token_id(row)) != FAILED_TOKEN:
                    guide.advance(token)
            self._unread = None
        if slots:
            masks = self._upload(np.stack([self._guided[slot].allowed() for slot in slots]))
            for slot, mask in zip(slots, masks, strict=True):
                self._mask(slot).copy_(mask)

    def _mask(self, slot: int) -> Tensor:
        if self._masks is None:
            shape = len(self.table), -(-self.vocab_size // 32)
            self._masks = torch.zeros(shape, dtype=torch.int32, device=self.table.device)
        return self._masks[slot]

    def fetch(
        self,
        tokens: Tensor,
        scores: Tensor | None = None,
        scored: dict[int, tuple[int, int]] | None = None,
        shown: dict[int, tuple[tuple[int, ...], Tensor]] | None = None,
    ) -> PendingTokens:
        """Begin to copy the sampled tokens to the host. Later work on the stream may write to the tensors again."""
        on_host, scores = _download(tokens), None if scores is None else _download(scores)
        copied = None
        if tokens.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        return PendingTokens(on_host, scores, scored or {}, copied, shown or {})

    def _record_edits(self, record: np.ndarray, new: NewSequence) -> list[Tensor]:
        """Write the changes of the sequence's logits into its record. Returns the tensors that the record points at."""
        params = new.params
        held = [token for token in new.eos_token_ids + params.stop_token_ids if token < self.vocab_size]
        bias = np.array(list(params.logit_bias.values()), np.float32)
        lists = self._upload(np.array([*held, *params.logit_bias, *bias.view(np.int32)], np.int32))
        record["min_tokens"], record["num_held"], record["num_bias"] = params.min_tokens, len(held), len(bias)
        record["held"] = lists.data_ptr()
        record["bias_ids"] = lists.data_ptr() + 4 * len(held)
        record["bias"] = lists.data_ptr() + 4 * (len(held) + len(bias))
        if not penalizes(params):
            return [lists]
        record["repetition"], record["frequency"] = params.repetition_penalty, params.frequency_penalty
        record["presence"] = params.presence_penalty
        ids, where = np.unique(np.array(new.token_ids, np.int64), return_inverse=True)
        counts = 1 + np.bincount(where[new.num_prompt_tokens :], minlength=len(ids))
        seen = torch.zeros(self.vocab_size, dtype=torch.int32, device=self.table.device)
        seen[self._upload(ids)] = self._upload(counts.astype(np.int32))
        record["seen"] = seen.data_ptr()
        return [lists, seen]

    def _upload(self, array: np.ndarray) -> Tensor:
        return upload(array, self.table.device)


def _download(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.clone()  # a captured step writes its tokens to the same place again
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return on_host.copy_(tensor, non_blocking=True)


def _with_logprobs(
    token_id: int, scores: np.ndarray, num_top: int, shown: tuple[tuple[int, ...], Tensor] | None
) -> SampledToken:
    """`shown`: ids, and their logits, that stand with the token in the place of the `num_top` most likely."""
    norm, logit = scores[:2].tolist()
    entries = scores[2 : 2 + 2 * num_top].reshape(-1, 2).tolist()
    if shown is not None:
        known = dict(zip(shown[0], shown[1].tolist(), strict=True)) | {token_id: logit}
        entries = [[token, value] for token, value in known.items()]
    best = sorted(((int(token), value) for token, value in entries), key=lambda entry: (-entry[1], entry[0]))
    return SampledToken(token_id, logit - norm, [(token, value - norm) for token, value in best])
