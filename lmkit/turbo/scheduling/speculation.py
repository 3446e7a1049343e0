"""Speculative decoding: which sequences compute drafts of their next tokens beside the one token that is known.

A step that computes a few tokens more of a sequence costs little, because reading the weights costs most. Drafts that
the sampled tokens confirm are kept (plan.Chunk.draft), so the tokens are those of a run without drafts, bit for bit.

Draft tokens come from the text itself or from earlier answers (ngrams.py, history.py), or from a smaller model
(model_speculation.py). Where a grammar leaves no choice, they are what must follow.

Drafts are judged all the time, also while none is computed: each new token shows whether a draft for it would have been
right. The chance of a draft depends on how many tokens before it agreed with their source. The length of each draft
follows from these chances and from the measured times of steps:

    computed if   (sequences + expected tokens of drafts) / time of the step with them   is the largest, and larger than
                   sequences / time of a plain step                                       by MARGIN

A step with drafts waits for the tokens of the step before it. Its time includes what the host does in between, which a
plain step hides.

Expectations may be wrong, so what drafts really saved or lost is booked (accounts.py). For a number of sequences with
which they lose there are hardly any.

A step of a new size is prepared once (captured), which takes time. Such a size is taken as soon as it would have saved
that time, had it been there before. Until then the best known size is, or none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from lmkit.turbo.plan import Sampled, StepPlan
from lmkit.turbo.scheduling.accounts import Account
from lmkit.turbo.scheduling.history import History
from lmkit.turbo.scheduling.ngrams import LONGEST, Ngrams
from lmkit.turbo.scheduling.pacing import StepTimes, round_down
from lmkit.turbo.sequence import Sequence

MARGIN = 1.05
# Drafts are tried, although they seem to take too long, if so many tokens of a sequence are expected of them, and if
# each draft token has such a chance.
LIKELY, UNLIKELY = 4.0, 0.25
# Agreeing tokens below which a draft belongs to the first, second, ... band: the first three are those after an edit.
BANDS = (1, 2, 3, 4, 6, 9, 14, 22, LONGEST + 1)
BAND = [next(place for place, end in enumerate(BANDS) if agreed < end) for agreed in range(LONGEST + 1)]
FORCED = 0.97  # the chance of a token that a grammar forces: the same text may be written in other tokens
SURE = 4.0  # draft tokens of a sequence that count as much as those of all other sequences
FORGET = 0.998  # of what all sequences showed, with each draft token
LATEST = 8.0  # times of a step: what a new size takes longer counts as no more; kernels may have been compiled in it
HOST = 0.1  # the count of the fourth term of pacing.StepTimes: what choosing drafts adds to a step
TERMS = ((1, 0, 0, 0, 0), (0, 1, 0, 0, 0), (0, 0, 1, HOST, 0))  # a step, a token of it, draft tokens in it
# In so many steps there are no drafts, to show the time of a plain step. It is never seen else where drafts go on.
REST, FIRST_REST, REST_EVERY = 4, 28, 256
TIMED = 32  # one in so many plain steps is timed: they are alike
FIRST_PLAIN = 2  # steps without draft tokens at first: they show what waiting adds to a step with draft tokens


@dataclass
class Chances:
    """Draft tokens and accepted ones, by band."""

    tried: list[float] = field(default_factory=lambda: [4.0] * len(BANDS))
    right: list[float] = field(default_factory=lambda: [1.0] * len(BANDS))

    def record(self, agreed: int, right: bool) -> None:
        place = BAND[agreed]
        self.tried[place] = self.tried[place] * FORGET + 1
        self.right[place] = self.right[place] * FORGET + right

    def of(self, place: int) -> float:
        return self.right[place] / self.tried[place]


class _Choice(NamedTuple):
    """The number of draft tokens in a step, all tokens that are expected of it, and tokens a second."""

    drafts: int
    tokens: float
    rate: float


_RATE = attrgetter("rate")


@dataclass
class _Text:
    """What is known about one sequence's draft tokens."""

    ngrams: Ngrams
    own: Chances = field(default_factory=lambda: Chances([0.0] * len(BANDS), [0.0] * len(BANDS)))
    forced: list[int] = field(default_factory=list)  # the next tokens, as its grammar wants them


class Speculation:
    """Proposes drafts of at most `longest` tokens. It owns the indices of the running sequences' texts. `clock` counts
    seconds.
    """

    def __init__(
        self,
        longest: int,
        forced: Callable[[int], list[int]],
        history: History,
        clock: Callable[[], float],
        *,
        overlaps: bool,
    ) -> None:
        self._clock = clock
        self.num_drafts = self.num_draft_tokens = self.num_accepted = 0
        self._longest, self._forced, self._history, self._overlaps = longest, forced, history, overlaps
        self._texts: dict[Sequence, _Text] = {}
        self._chances = Chances()
        self._times = StepTimes()
        self._steps = 0
        self._seen: set[tuple[int, int]] = set()  # (sequences, tokens) of steps with drafts: the first may be compiled
        self._first_times = StepTimes()  # of steps with drafts whose size is new
        self._missed: dict[tuple[int, int], float] = {}  # by new size: seconds that it would have saved so far
        self._accounts: defaultdict[int, Account] = defaultdict(Account)  # by the number of sequences, see _account
        self._would_save = 0.0  # seconds that a step would save whose size is not prepared
        self._is_active = False  # drafts were chosen, or none, since the last step
        self._payer: Account | None = None  # of waiting and of the step with the draft tokens that were wanted last
        self._since: float | None = None  # when the last step's result came, if others followed at once

    def propose(self, sequences: list[Sequence], budget: int) -> bool:
        """Propose a draft to each of these decoding sequences, together at most `budget` tokens, if that pays.

        If tokens of some are not known yet, nothing is proposed. The result says whether to wait for them.
        """
        self._is_active = False
        if self._rests():
            return False
        propose = self._choose(sequences, budget)
        if any(seq.num_pending for seq in sequences):
            return propose is not None
        if propose is not None:
            propose()
        return False

    def _rests(self) -> bool:
        """Whether steps show now what a plain step takes."""
        return self._times.num_records > 0 and FIRST_REST <= self._steps % REST_EVERY < FIRST_REST + REST

    def _choose(self, sequences: list[Sequence], budget: int) -> Callable[[], None] | None:
        """What proposes the drafts that pay best. None: none pays."""
        _, lengths = self._text_lengths(sequences, budget)
        return partial(self._propose, lengths) if lengths else None

    def _text_lengths(self, sequences: list[Sequence], budget: int) -> tuple[float, dict[Sequence, int]]:
        """`_lengths`, as far as the account allows it."""
        account = self._account(self._accounts, len(sequences))
        if not account.is_open:
            self._texts.clear()  # an index is made at once more quickly than token by token
            return 0.0, {}
        start = self._clock()
        self._would_save = 0.0
        rate, lengths = self._lengths(sequences, budget, account)
        self._has_chosen(account, max(self._clock() - start - self._would_save, 0.0), sequences, lengths)
        return rate, lengths

    def _has_chosen(
        self, account: Account, seconds: float, sequences: list[Sequence], lengths: dict[Sequence, int]
    ) -> None:
        """Choosing these lengths took so many seconds, which the account pays."""
        self._is_active = True
        self._book(account, -seconds, len(sequences))
        if lengths:
            self._payer = account

    @staticmethod
    def _account(accounts: defaultdict[int, Account], num_seqs: int) -> Account:
        return accounts[num_seqs.bit_length()]

    def _plain(self, num_seqs: int) -> float:
        """Seconds of a step of an engine that never drafts."""
        return self._times.predict([1, num_seqs, not self._overlaps, 0, 0])

    def _propose(self, lengths: dict[Sequence, int]) -> None:
        for seq, length in lengths.items():
            text = self._texts[seq]
            seq.propose(text.forced[:length] or text.ngrams.draft(length))

    def _costs(self, num_seqs: int) -> tuple[float, float, float, float]:
        """Seconds of a step, of each of its tokens, and of waiting for the step before it with all that belongs to
        draft tokens; tokens a second of plain steps.
        """
        fixed, each, wait = (self._times.predict(counts) for counts in TERMS)
        return fixed, each, wait, num_seqs / self._plain(num_seqs)

    def _lengths(self, sequences: list[Sequence], budget: int, account: Account) -> tuple[float, dict[Sequence, int]]:
        """The draft's length of each sequence that gets one: those that make the most tokens a second, and how many
        these are. The times of long drafts may be expected too long, because short ones showed them alone. So likely
        ones are tried as well, if the account can pay for it.
        """
        num_seqs = len(sequences)
        fixed, each, wait, plain = self._costs(num_seqs)
        if self._steps < FIRST_PLAIN:
            return MARGIN * plain, {}
        least = each * plain  # a draft token with a smaller chance costs more time than it saves
        if account.can_try:
            least = min(least, UNLIKELY)
        chances = [(chance, seq) for seq in sequences for chance in self._chances_of(seq, least)]
        chances.sort(key=itemgetter(0), reverse=True)
        lengths: dict[Sequence, int] = {}
        best = known = last = _Choice(0, float(num_seqs), MARGIN * plain)
        expected = float(num_seqs)
        for count, (chance, _) in enumerate(chances[: max(budget, 0)], 1):
            expected += chance
            if count == round_down(count, 3):
                choice = _Choice(count, expected, expected / (fixed + each * (num_seqs + count) + wait))
                best, last = max(best, choice, key=_RATE), choice
                if (num_seqs, num_seqs + count) in self._seen:
                    known = max(known, choice, key=_RATE)
        if best != known:
            saved = best.tokens * (1 / (known.rate if known.drafts else plain) - 1 / best.rate)
            best = best if self._is_worth_preparing(num_seqs, num_seqs + best.drafts, saved) else known
        elif not best.drafts and last.tokens > LIKELY * num_seqs and account.can_try:
            best = last
        for _, seq in chances[: best.drafts]:
            lengths[seq] = lengths.get(seq, 0) + 1
        return best.rate, lengths

    def _is_worth_preparing(self, num_seqs: int, num_tokens: int, saved: float) -> bool:
        """Whether to take a new size, which would save so many seconds now."""
        size, counts = (num_seqs, num_tokens), [1, num_tokens, 1, HOST, 0]
        self._would_save = saved
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
        for _ in text.ngrams.draft(longest):
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
        self._earn(num_seqs)
        if drafted:
            for chunk, result in zip(plan.chunks, sampled, strict=True):
                self.num_drafts += bool(chunk.draft)
                self.num_draft_tokens += len(chunk.draft)
                self.num_accepted += max(len(result.tokens) - 1, 0)
        self._steps += 1
        size = num_seqs, num_tokens
        if self._payer is not None and (drafted or (waited and self._overlaps)):
            saved = self._saved(plan, sampled, None if since is None else now - since)
            self._book(self._payer, saved, num_seqs, is_prepared=not drafted or size in self._seen)
        times = self._first_times if drafted and size not in self._seen else self._times
        is_timed = drafted or self._steps <= FIRST_PLAIN or not self._steps % TIMED or self._rests()
        if since is not None and is_timed:
            times.record([1, num_tokens, waited, HOST * self._is_active, 0], now - since)
        if drafted:
            self._seen.add(size)
            self._missed.pop(size, None)

    def _earn(self, num_seqs: int) -> None:
        """A step without prompt tokens has passed."""
        self._account(self._accounts, num_seqs).earn()

    def _all_accounts(self) -> Iterable[Account]:
        return self._accounts.values()

    def _book(self, account: Account, saved: float, num_seqs: int, *, is_prepared: bool = True) -> None:
        if not self._times.num_records:  # it is not known what a step takes
            return
        if is_prepared:
            account.book(saved, self._plain(num_seqs))
        else:  # `_is_worth_preparing` has weighed what it takes
            account.saved += saved

    def _saved(self, plan: StepPlan, sampled: list[Sampled], seconds: float | None) -> float:
        """Seconds that a step's tokens would have taken in plain steps, less those that it took, or is expected to take
        if these are not known.
        """
        num_seqs, num_tokens = len(plan.chunks), sum(chunk.num_tokens for chunk in plan.chunks)
        if seconds is None:
            seconds = self._times.predict([1, num_tokens, 1, HOST, 0])
        return sum(len(result.tokens) for result in sampled) / num_seqs * self._plain(num_seqs) - seconds

    def stats(self) -> dict[str, Any]:
        """Figures of EngineStats."""
        return {
            "drafts": self.num_drafts,
            "draft_tokens": self.num_draft_tokens,
            "accepted_tokens": self.num_accepted,
            "draft_seconds_saved": sum(account.saved for account in self._all_accounts()),
            "history_tokens": self._history.num_tokens,
        }
