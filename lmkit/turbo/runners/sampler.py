"""From logits to tokens on the CPU.

A drawn token depends only on the request: its parameters, its seed and the number of its tokens so far. It never
depends on its slot or on the requests that run beside it. Greedy rows share one argmax, and the others one call of
ops.draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lmkit.devices import CPU
from lmkit.kernels import ops
from lmkit.kernels.reference.sampling import most_likely, relative_weights
from lmkit.turbo.plan import NewSequence, SampledToken
from lmkit.turbo.request import SamplingParams, TokenLogprobs
from lmkit.turbo.runners.guides import Guides, RunningGuide
from lmkit.turbo.sequence import FAILED_TOKEN


class Sampler:
    """Sampling parameters and state of `num_slots` sequences, as arrays indexed by slot."""

    def __init__(self, num_slots: int, vocab_size: int, guides: Guides | None = None) -> None:
        self.vocab_size = vocab_size
        self._guides = guides
        self.temperature = np.zeros(num_slots)
        self.top_k = np.zeros(num_slots, np.int64)  # 0 = off
        self.top_p = np.ones(num_slots)
        self.min_p = np.zeros(num_slots)
        self.seed = [0] * num_slots
        self.num_outputs = [0] * num_slots
        self.num_top = np.full(num_slots, -1)  # most likely tokens to report; -1 = no log-probabilities at all
        self.shown: dict[int, tuple[int, ...]] = {}  # tokens to report instead of the most likely ones
        self.edits: dict[int, LogitEdits] = {}  # only for slots whose logits are changed before the draw
        self._beyond_argmax: set[int] = set()  # slots that draw, edit or report
        self._op = ops.draw.select(CPU.name)

    def resume(self, num_outputs: dict[int, int]) -> None:
        """Draw the next token of each slot as that after so many tokens."""
        for slot, count in num_outputs.items():
            self.num_outputs[slot] = count

    def set(self, slot: int, new: NewSequence) -> None:
        """Set up the slot for a sequence. After a preemption its state is rebuilt from its tokens."""
        params = new.params
        assert params.temperature == 0 or params.seed is not None, "a sampled request without a seed"
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = params.seed or 0
        self.num_outputs[slot] = len(new.token_ids) - new.num_prompt_tokens
        self.num_top[slot] = -1 if params.logprobs is None else params.logprobs
        self.clear(slot)
        if params.logprob_token_ids:
            self.shown[slot] = params.logprob_token_ids
        if edits_logits(params):
            guide = self._guides.begin(new) if self._guides is not None and params.grammar else None
            self.edits[slot] = LogitEdits.of(new, self.vocab_size, guide)
        if slot in self.edits or params.temperature > 0 or params.logprobs is not None:
            self._beyond_argmax.add(slot)

    def clear(self, slot: int) -> None:
        """Clear the slot after its sequence has left."""
        self.edits.pop(slot, None)
        self.shown.pop(slot, None)
        self._beyond_argmax.discard(slot)

    def sample(self, logits: Tensor, slots: Seq[int], ahead: Seq[int] | None = None) -> list[SampledToken]:
        """Sample the next token of each row of `logits` (float32 [R, vocab]). The row's sequence is in slots[row].

        Several rows may belong to a sequence whose logits are not edited: ahead[row] tokens further on.

        A row with NaN or +inf, or with no token left to choose, gives FAILED_TOKEN and does not affect the other rows.
        """
        raw = logits.numpy()
        if self._beyond_argmax.isdisjoint(slots):
            return self._most_likely(raw, slots)
        return self._beyond(raw, slots, ahead or [0] * len(slots))

    @np.errstate(over="ignore", invalid="ignore")  # an infinity is intended, or `isfinite` finds it
    def _beyond(self, raw: np.ndarray, slots: Seq[int], ahead: Seq[int]) -> list[SampledToken]:
        """As `sample`, with draws, edits and reports."""
        slot_ids = np.asarray(slots)
        edited, top = self._edit(raw, slots)
        tokens = edited.argmax(-1)  # the lowest id among the greatest logits
        usable = np.isfinite(top)
        drawn = np.flatnonzero(usable & (self.temperature[slot_ids] > 0))
        if len(drawn):
            tokens[drawn] = self.draw(edited, drawn, slots, ahead)
        tokens[~usable] = FAILED_TOKEN
        results = [SampledToken(token) for token in tokens.tolist()]
        for row in np.flatnonzero(usable & (self.num_top[slot_ids] >= 0)).tolist():
            slot = slots[row]
            scored = token_logprobs(raw[row], results[row].token_id, int(self.num_top[slot]), self.shown.get(slot, ()))
            results[row] = SampledToken(scored.token_id, scored.logprob, scored.top)
        self._count(slots, results)
        return results

    def sample_drafts(self, logits: Tensor, drafts: Seq[list[int]], slots: Seq[int]) -> list[list[SampledToken]] | None:
        """The tokens of sequences with a draft each, up to the first that differs from it. Row by row, `logits` has
        1 + len(draft) rows of the first sequence, then those of the next one.

        None if a token depends on the tokens before it by more than its logits: then they are sampled one by one.
        """
        if not self.edits.keys().isdisjoint(slots):
            return None
        of_rows = [slot for slot, draft in zip(slots, drafts, strict=True) for _ in range(1 + len(draft))]
        ahead = [i for draft in drafts for i in range(1 + len(draft))]
        sampled = iter(self.sample(logits, of_rows, ahead))
        results = []
        for slot, draft in zip(slots, drafts, strict=True):
            tokens = [next(sampled) for _ in range(1 + len(draft))]
            wrong = (i for i, token_id in enumerate(draft) if tokens[i].token_id != token_id)
            kept = tokens[: next(wrong, len(draft)) + 1]
            self.num_outputs[slot] -= sum(token.token_id != FAILED_TOKEN for token in tokens[len(kept) :])
            results.append(kept)
        return results

    def _most_likely(self, logits: np.ndarray, slots: Seq[int]) -> list[SampledToken]:
        """Take the lowest id among the greatest logits of each row. A NaN counts as the greatest."""
        tokens = logits.argmax(-1).tolist()
        results = [
            SampledToken(token if math.isfinite(logits[row, token]) else FAILED_TOKEN)
            for row, token in enumerate(tokens)
        ]
        self._count(slots, results)
        return results

    def _count(self, slots: Seq[int], results: Iterable[SampledToken]) -> None:
        for slot, result in zip(slots, results, strict=True):
            if result.token_id != FAILED_TOKEN:
                self.num_outputs[slot] += 1
                if slot in self.edits:
                    self.edits[slot].count(result.token_id)

    def _edit(self, logits: np.ndarray, slots: Seq[int]) -> tuple[np.ndarray, np.ndarray]:
        """Apply the edits of the slots that have any.

        Returns (edited logits, greatest logit of each row [R]). A greatest logit that is not finite marks an unusable
        row.
        """
        top = logits.max(-1)
        rows = [row for row, slot in enumerate(slots) if slot in self.edits]
        if rows:
            logits = logits.copy()
            for row in rows:
                self.edits[slots[row]].apply(logits[row], self.num_outputs[slots[row]])
                if np.isfinite(top[row]):  # otherwise the row stays unusable, even if the edit has hidden the reason
                    top[row] = logits[row].max()
        return logits, top

    def draw(self, logits: np.ndarray, rows: np.ndarray, slots: Seq[int], ahead: Seq[int]) -> np.ndarray:
        """Draw tokens for `rows` of `logits` float32 [R, vocab]. Their sequences have a temperature."""
        of_rows = [slots[row] for row in rows]
        shares = [philox_uniform(self.seed[slots[row]], self.num_outputs[slots[row]] + ahead[row]) for row in rows]
        parameters = (self.temperature, self.top_k, self.top_p, self.min_p)
        tokens: Tensor = self._op(
            torch.from_numpy(logits), torch.from_numpy(rows),
            *(torch.from_numpy(values[of_rows]) for values in parameters), torch.tensor(shares, dtype=torch.float64),
        )  # fmt: skip
        return tokens.numpy()


def penalizes(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)


def edits_logits(params: SamplingParams) -> bool:
    return penalizes(params) or bool(params.min_tokens or params.logit_bias or params.grammar or params.speech)


@dataclass
class LogitEdits:
    """The changes of one sequence's logits before its temperature is applied."""

    params: SamplingParams
    held_back: np.ndarray  # int64 ids of eos and stop tokens
    bias_ids: np.ndarray  # int64
    bias: np.ndarray  # float32
    num_output: dict[int, int]  # if penalized: context token -> how often it was generated (0 = prompt only)
    guide: RunningGuide | None  # after the last token
    known: list[int]  # generated tokens, if the rules of a transcript hold

    @classmethod
    def of(cls, new: NewSequence, vocab_size: int, guide: RunningGuide | None) -> LogitEdits:
        params = new.params
        edits = cls(
            params,
            np.array([token for token in new.eos_token_ids + params.stop_token_ids if token < vocab_size], np.int64),
            np.array(list(params.logit_bias), np.int64),
            np.array(list(params.logit_bias.values()), np.float32),
            dict.fromkeys(new.token_ids[: new.num_prompt_tokens], 0) if penalizes(params) else {},
            guide,
            new.output_ids() if params.speech is not None else [],
        )
        for token in new.output_ids():
            edits._penalize(token)
        return edits

    def count(self, token_id: int) -> None:
        """Take in a generated token."""
        self._penalize(token_id)
        if self.params.speech is not None:
            self.known.append(token_id)
        if self.guide is not None:
            self.guide.advance(token_id)

    def _penalize(self, token_id: int) -> None:
        if penalizes(self.params):
            self.num_output[token_id] = self.num_output.get(token_id, 0) + 1

    def apply(self, row: np.ndarray, num_outputs: int) -> None:
        """Change `row` (float32 [vocab]) in place.

        The repetition penalty follows arXiv 1909.05858, and the other penalties follow OpenAI's API.
        """
        params = self.params
        if num_outputs < params.min_tokens:
            row[self.held_back] = -np.inf
        row[self.bias_ids] += self.bias
        if penalizes(params):
            self._apply_penalties(row)
        if params.speech is not None:
            params.speech.apply(row, self.known)
        if self.guide is not None:
            bits = np.unpackbits(self.guide.allowed().view(np.uint8), count=len(row), bitorder="little")
            row[bits == 0] = -np.inf

    def _apply_penalties(self, row: np.ndarray) -> None:
        params = self.params
        ids = np.fromiter(self.num_output, np.int64, len(self.num_output))
        counts = np.fromiter(self.num_output.values(), np.float32, len(self.num_output))
        values, repetition = row[ids], np.float32(params.repetition_penalty)
        values = np.where(values > 0, values / repetition, values * repetition)
        penalty = params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
        row[ids] = values - penalty.astype(np.float32)


def token_logprobs(logits: np.ndarray, token_id: int, num_top: int, shown: Seq[int] = ()) -> TokenLogprobs:
    """Log-probabilities of a token and of the `num_top` most likely, in the unmodified `logits` float32 [vocab].

    If tokens are `shown`, those of the token and of these stand in the place of the most likely.
    """
    top = logits.max()
    norm = float(top) + float(np.log(relative_weights(logits, top, 1.0).sum()))
    if shown:
        best = np.unique([token_id, *shown])
    else:
        best = most_likely(logits, min(num_top, len(logits))) if num_top else np.empty(0, np.int64)
    best = best[np.argsort(-logits[best], kind="stable")]
    ranked = [(token, logit - norm) for token, logit in zip(best.tolist(), logits[best].tolist(), strict=True)]
    return TokenLogprobs(token_id, float(logits[token_id]) - norm, ranked)


def philox_uniform(seed: int, index: int) -> float:
    """The `index`-th number of the stream of `seed` (both below 2^64). It is in [0, 1) and has 53 random bits."""
    words = philox4x32((index & _LOW, index >> 32, 0, 0), (seed & _LOW, seed >> 32))
    return ((words[0] >> 5 << 26) + (words[1] >> 6)) / (1 << 53)


_LOW = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: a bijection of four 32-bit words, random for each key of two.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (odd >> 32) ^ c1 ^ k0, odd & _LOW, (even >> 32) ^ c3 ^ k1, even & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3
