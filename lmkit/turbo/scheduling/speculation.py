"""Speculative decoding: which sequences compute guesses at their next tokens beside the one token that is known.

A step that computes a few tokens more of a sequence costs little, because reading the weights costs most. Guesses that
the sampled tokens confirm are kept (plan.Chunk.draft), so the tokens are those of a run without guesses, bit for bit.

Guesses come from the text itself or from earlier answers (ngrams.py, history.py), or from a smaller model
(drafting.py). Where a grammar leaves no choice, they are what must follow.

Guesses are judged all the time, also while none is computed: each new token shows whether a guess at it would have been
right. The chance of a guess depends on how many tokens before it agreed with their source. The length of each draft
follows from these chances and from the measured times of steps:

    computed if   (sequences + expected tokens of drafts) / time of the step with them   is the largest, and larger than
                   sequences / time of a plain step                                       by MARGIN

A step with drafts waits for the tokens of the step before it. Its time includes what the host does in between, which a
plain step hides.

A step of a new size is prepared once (captured), which takes time. Such a size is taken as soon as it would have saved
that time, had it been there before. Until then the best known size is, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from lmkit.turbo.plan import Sampled, StepPlan
from lmkit.turbo.scheduling.history import History
from lmkit.turbo.scheduling.ngrams import LONGEST, Ngrams
from lmkit.turbo.scheduling.pacing import StepTimes, round_down
from lmkit.turbo.sequence import Sequence

MARGIN = 1.05
# Agreeing tokens below which a guess belongs to the first, second, ... band: the first three are those behind an edit.
BANDS = (1, 2, 3, 4, 6, 9, 14, 22, LONGEST + 1)
BAND = [next(place for place, end in enumerate(BANDS) if agreed < end) for agreed in range(LONGEST + 1)]
TERMS = ((1, 0, 0, 0, 0), (0, 1, 0, 0, 0), (0, 0, 1, 0, 0))  # of pacing.StepTimes: a step, a token of it, waiting
FORCED = 0.97  # the chance of a token that a grammar forces: the same text may be written in other tokens
SURE = 4.0  # guesses of a sequence that count as much as those of all other sequences
FORGET = 0.998  # of what all sequences showed, with each guess
LATEST = 8.0  # times of a step: what a new size takes longer counts as no more; kernels may have been compiled in it
TIMED = 8  # one in so many plain steps is timed: they are alike
FIRST_PLAIN = 2  # steps without guesses at first: they show what waiting adds to a step with guesses


@dataclass
class Chances:
    """Guesses and right guesses, by band."""

    tried: list[float] = field(default_factory=lambda: [4.0] * len(BANDS))
    right: list[float] = field(default_factory=lambda: [1.0] * len(BANDS))

    def record(self, agreed: int, right: bool) -> None:
        place = BAND[agreed]
        self.tried[place] = self.tried[place] * FORGET + 1
        self.right[place] = self.right[place] * FORGET + right

    def of(self, place: int) -> float:
        return self.right[place] / self.tried[place]


class _Choice(NamedTuple):
    """The number of guesses in a step, all tokens that are expected of it, and tokens a second."""

    guesses: int
    tokens: float
    rate: float


_RATE = attrgetter("rate")


@dataclass
class _Text:
    """What is known about one sequence's guesses."""

    ngrams: Ngrams
    own: Chances = field(default_factory=lambda: Chances([0.0] * len(BANDS), [0.0] * len(BANDS)))
    forced: list[int] = field(default_factory=list)  # the next tokens, as its grammar wants them


class Speculation:
    """Proposes drafts of at most `longest` tokens. It owns the indices of the running sequences' texts."""

    def __init__(self, longest: int, forced: Callable[[int], list[int]], history: History, *, overlaps: bool) -> None:
        self.num_drafts = self.num_draft_tokens = self.num_accepted = 0
        self._longest, self._forced, self._history, self._overlaps = longest, forced, history, overlaps
        self._texts: dict[Sequence, _Text] = {}
        self._chances = Chances()
        self._times = StepTimes()
        self._steps = 0
        self._seen: set[tuple[int, int]] = set()  # (sequences, tokens) of steps with drafts: the first may be compiled
        self._first_times = StepTimes()  # of steps with drafts whose size is new
        self._missed: dict[tuple[int, int], float] = {}  # by new size: seconds that it would have saved so far
        self._since: float | None = None  # when the last step's result came, if others followed at once

    def propose(self, sequences: list[Sequence], budget: int) -> bool:
        """Propose a draft to each of these decoding sequences, together at most `budget` tokens, if that pays.

        If tokens of some are not known yet, nothing is proposed. The result says whether to wait for them.
        """
        _, lengths = self._lengths(sequences, budget)
        if any(seq.num_pending for seq in sequences):
            return bool(lengths)
        self._guess(lengths)
        return False

    def _guess(self, lengths: dict[Sequence, int]) -> None:
        for seq, length in lengths.items():
            text = self._texts[seq]
            seq.propose(text.forced[:length] or text.ngrams.guess(length))

    def _costs(self, num_seqs: int) -> tuple[float, float, float, float]:
        """Seconds of a step, of each of its tokens, and of waiting for the step before it; tokens a second of plain
        steps.
        """
        fixed, each, wait = (self._times.predict(counts) for counts in TERMS)
        return fixed, each, wait, num_seqs / (fixed + each * num_seqs + (0.0 if self._overlaps else wait))

    def _lengths(self, sequences: list[Sequence], budget: int) -> tuple[float, dict[Sequence, int]]:
        """The draft's length of each sequence that gets one: those that make the most tokens a second, and how many
        these are.
        """
        num_seqs = len(sequences)
        fixed, each, wait, plain = self._costs(num_seqs)
        if self._steps < FIRST_PLAIN:
            return MARGIN * plain, {}
        least = each * plain  # a guess with a smaller chance costs more time than it saves
        chances = [(chance, seq) for seq in sequences for chance in self._chances_of(seq, least)]
        chances.sort(key=itemgetter(0), reverse=True)
        lengths: dict[Sequence, int] = {}
        best = known = _Choice(0, float(num_seqs), MARGIN * plain)
        expected = float(num_seqs)
        for count, (chance, _) in enumerate(chances[: max(budget, 0)], 1):
            expected += chance
            if count == round_down(count, 3):
                choice = _Choice(count, expected, expected / (fixed + each * (num_seqs + count) + wait))
                best = max(best, choice, key=_RATE)
                if (num_seqs, num_seqs + count) in self._seen:
                    known = max(known, choice, key=_RATE)
        if best != known:
            saved = best.tokens * (1 / (known.rate if known.guesses else plain) - 1 / best.rate)
            best = best if self._is_worth_preparing(num_seqs, num_seqs + best.guesses, saved) else known
        for _, seq in chances[: best.guesses]:
            lengths[seq] = lengths.get(seq, 0) + 1
        return best.rate, lengths

    def _is_worth_preparing(self, num_seqs: int, num_tokens: int, saved: float) -> bool:
        """Whether to take a new size, which would save so many seconds now."""
        size, counts = (num_seqs, num_tokens), [1, num_tokens, 1, 0, 0]
        missed = self._missed[size] = self._missed.get(size, 0.0) + saved
        usual = self._times.predict(counts)
        first = self._first_times.predict(counts) if self._first_times.num_records else usual
        return missed >= min(first - usual, LATEST * usual)

    def _chances_of(self, seq: Sequence, least: float) -> list[float]:
        """The chance of each token of a draft to be kept: that all tokens before it are right, and itself."""
        if not seq.request.speculate or seq.request.pooling is not None:
            return []
        text = self._texts.get(seq)
        if text is None:
            text = self._texts[seq] = _Text(Ngrams(seq.token_ids, partial(self._history.of, seq)))
        self._learn(text, seq)
        chances: list[float] = []
        longest = min(self._longest, seq.max_tokens - seq.num_tokens - 1)
        if seq.request.params.grammar:
            text.forced = self._forced(seq.slot)[seq.num_pending :] if seq.has_entered else []
        if text.forced:
            return [FORCED**count for count in range(1, min(longest, len(text.forced)) + 1)]
        if text.ngrams.place < 0:
            return chances
        chance, agreed = 1.0, text.ngrams.agreed
        for _ in text.ngrams.guess(longest):
            chance *= self._chance(text, agreed)
            if chance < least:
                break
            chances.append(chance)
            agreed = min(agreed + 1, LONGEST)
        return chances

    def _learn(self, text: _Text, seq: Sequence) -> None:
        ngrams = text.ngrams
        while ngrams.known < seq.num_tokens:
            judged = ngrams.learn()
            if judged is not None:
                text.own.record(*judged)
                self._chances.record(*judged)

    def _chance(self, text: _Text, agreed: int) -> float:
        place, own = BAND[agreed], text.own
        return (own.right[place] + SURE * self._chances.of(place)) / (own.tried[place] + SURE)

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self._texts.pop(seq, None)
        self._history.add(seq)

    def record(self, plan: StepPlan, sampled: list[Sampled], now: float, *, waited: bool, goes_on: bool) -> None:
        """Learn from a step whose result came at `now`. `waited`: it began after the result of the step before it.
        `goes_on`: another step is under way, or follows at once.
        """
        since, self._since = self._since, now if goes_on else None
        num_seqs, num_tokens = len(plan.chunks), sum(chunk.num_tokens for chunk in plan.chunks)
        if not num_seqs or num_tokens > sum(chunk.num_sampled for chunk in plan.chunks):  # it had prompt tokens
            self._since = None
            return
        drafted = num_tokens > num_seqs
        if drafted:
            for chunk, result in zip(plan.chunks, sampled, strict=True):
                self.num_drafts += bool(chunk.draft)
                self.num_draft_tokens += len(chunk.draft)
                self.num_accepted += max(len(result.tokens) - 1, 0)
        self._steps += 1
        size = num_seqs, num_tokens
        if since is not None and (drafted or self._steps <= FIRST_PLAIN or self._steps % TIMED == 0):
            times = self._first_times if drafted and size not in self._seen else self._times
            times.record([1, num_tokens, waited, 0, 0], now - since)
        if drafted:
            self._seen.add(size)
            self._missed.pop(size, None)

    def stats(self) -> dict[str, Any]:
        """Figures of EngineStats."""
        return {
            "drafts": self.num_drafts,
            "draft_tokens": self.num_draft_tokens,
            "accepted_tokens": self.num_accepted,
            "history_tokens": self._history.num_tokens,
        }
