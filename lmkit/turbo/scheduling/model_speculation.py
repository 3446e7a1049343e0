"""Draft tokens of a smaller model, the draft model, beside those of the text itself.

The draft model computes its draft tokens one after the other, for all sequences in one batch:

    draft 1 .. draft k | one step of the model over the last token and k draft tokens of each sequence | draft 1 ..

Its steps cost time that drafts of the text do not cost, so both times are learned. The number k makes the most tokens
a second. If the text's own draft tokens make more, they are taken.

No draft is judged that is not computed. Where the draft model does not pay, it is tried again now and then, so seldom
that trying is expected to cost PROBE_SHARE of the time. What it costs beyond that, such as prompts, shows in an account
of the draft model (accounts.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol

from lmkit.turbo.plan import Sampled, StepPlan
from lmkit.turbo.scheduling.accounts import Account
from lmkit.turbo.scheduling.history import History
from lmkit.turbo.scheduling.pacing import StepTimes, round_down
from lmkit.turbo.scheduling.speculation import FORGET, MARGIN, SURE, TERMS, Speculation
from lmkit.turbo.sequence import Sequence

PROBE_LENGTH = 3  # draft tokens of a sequence when the draft model is tried
FIRST_PROBES = 4  # are not rare: they show what a draft step costs
PROBE_SHARE = 0.005
AROUND = 0.1  # the weight of the newest draft in what drafts take beside their steps


class DraftModel(Protocol):
    """Drafts the next tokens of sequences."""

    def draft(self, lengths: dict[Sequence, int]) -> tuple[dict[Sequence, list[int]], list[tuple[int, float]]]:
        """Draft so many tokens of each sequence, or fewer, or none. Also returns (tokens, seconds) of each step that
        computed draft tokens, and nothing but them.
        """

    def follow(self, wanted: bool) -> float:
        """Whether drafts may be wanted soon. Returns seconds that following the sequences has taken since the last
        call.
        """

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""


@dataclass
class Chance:
    """Draft tokens and accepted ones."""

    tried: float
    right: float

    def record(self, right: int, wrong: int, forget: float = 1.0) -> None:
        kept = forget ** (right + wrong)
        self.tried = self.tried * kept + right + wrong
        self.right = self.right * kept + right


class ModelSpeculation(Speculation):
    """Proposes drafts of a model, or of the text itself where these make more tokens a second."""

    def __init__(
        self,
        longest: int,
        forced: Callable[[int], list[int]],
        history: History,
        clock: Callable[[], float],
        model: DraftModel,
        *,
        overlaps: bool,
    ) -> None:
        super().__init__(longest, forced, history, clock, overlaps=overlaps)
        self._model = model
        self._model_accounts: defaultdict[int, Account] = defaultdict(Account)
        self._model_times = StepTimes()
        self._around = 0.0  # seconds of a draft beside the draft model's steps: other threads, Python
        self._all = Chance(4.0, 2.0)
        self._own: dict[Sequence, Chance] = {}
        self._drafted: dict[int, Sequence] = {}  # by slot: sequences whose draft is the model's
        self._num_probes, self._next_probe = 0, 0  # the second counts steps

    def _choose(self, sequences: list[Sequence], budget: int) -> Callable[[], None] | None:
        """See Speculation."""
        rate, lengths = self._text_lengths(sequences, budget)
        by_model = self._model_lengths(sequences, budget, rate)
        if by_model:
            return partial(self._draft, by_model, len(sequences))
        return partial(self._propose, lengths) if lengths else None

    def _draft(self, lengths: dict[Sequence, int], num_seqs: int) -> None:
        start = self._clock()
        drafts, steps = self._model.draft(lengths)
        for num_tokens, seconds in steps:
            self._model_times.record([1, num_tokens, 0, 0, 0], seconds)
        seconds = self._clock() - start
        self._book(self._account(self._model_accounts, num_seqs), -seconds, num_seqs)
        if self._since is not None:  # the draft model's time is no part of the step's
            self._since += seconds
        if steps and len(steps) == max(map(len, drafts.values()), default=0):  # all steps were timed
            around = max(seconds - sum(step for _, step in steps), 0.0)
            self._around += (around - self._around) * (AROUND if self._around else 1.0)
        for seq, draft in drafts.items():
            seq.propose(draft)
            self._drafted[seq.slot] = seq
            self._own.setdefault(seq, Chance(0.0, 0.0))
        self._num_probes += bool(drafts)
        if self._num_probes > FIRST_PROBES:
            self._next_probe = self._steps + self._steps_between_probes(num_seqs)

    def _steps_between_probes(self, num_seqs: int) -> int:
        _, each, wait, plain = self._costs(num_seqs)
        cost = (
            wait + self._around + PROBE_LENGTH * (each * num_seqs + self._model_times.predict([1, num_seqs, 0, 0, 0]))
        )
        return math.ceil(cost * plain / num_seqs / PROBE_SHARE)

    def _model_lengths(self, sequences: list[Sequence], budget: int, rate: float) -> dict[Sequence, int]:
        """`_lengths_by_model`, as far as the account allows it."""
        account = self._account(self._model_accounts, len(sequences))
        cost = self._model.follow(account.is_open)
        if not account.is_open:
            return {}
        start = self._clock()
        lengths = self._lengths_by_model(sequences, budget, rate)
        self._has_chosen(account, self._clock() - start + cost, sequences, lengths)
        return lengths

    def _lengths_by_model(self, sequences: list[Sequence], budget: int, rate: float) -> dict[Sequence, int]:
        """The length of each sequence's draft, if the model's drafts make more than `rate` tokens a second."""
        longest = {seq: self._longest_draft(seq) for seq in sequences}
        longest = {seq: length for seq, length in longest.items() if length > 0}
        num_seqs = len(sequences)
        fixed, each, wait, plain = self._costs(num_seqs)
        step, token = (self._model_times.predict(counts) for counts in TERMS[:2])
        least = (each + token) * plain
        chances = {seq: self._chance_of(seq) for seq in longest}
        useful = {seq: self._useful(chances[seq], least, length) for seq, length in longest.items()}
        best, most = 0, max(rate, MARGIN * plain)
        for length in range(1, max(useful.values(), default=0) + 1):
            cut = {seq: min(length, most_useful) for seq, most_useful in useful.items() if most_useful}
            num_tokens = sum(cut.values())
            if num_tokens > budget:
                break
            expected = num_seqs + sum(_expected(chances[seq], count) for seq, count in cut.items())
            seconds = fixed + each * (num_seqs + num_tokens) + wait
            seconds += self._around + length * step + num_tokens * token
            if length == round_down(length, 2) and expected / seconds > most:
                best, most = length, expected / seconds
        if best:
            return {seq: min(best, length) for seq, length in useful.items() if length}
        if self._steps >= self._next_probe and len(longest) * PROBE_LENGTH <= budget:
            return {seq: min(PROBE_LENGTH, length) for seq, length in longest.items()}
        return {}

    def _longest_draft(self, seq: Sequence) -> int:
        if not seq.request.speculate or seq.request.pooling is not None:
            return 0
        return min(self._longest, seq.max_tokens - seq.num_tokens - seq.num_pending - 1)

    @staticmethod
    def _useful(chance: float, least: float, longest: int) -> int:
        """The draft tokens whose chance to be kept is at least `least`."""
        if not 0 < least < 1:
            return longest if least <= 0 else 0
        return min(longest, int(math.log(least) / math.log(chance)))

    def _chance_of(self, seq: Sequence) -> float:
        """The chance of a draft token, if those before it are right. It is in (0, 1)."""
        own = self._own.get(seq, Chance(0.0, 0.0))
        chance = (own.right + SURE * self._all.right / self._all.tried) / (own.tried + SURE)
        return min(max(chance, 0.001), 0.999)

    def record(self, plan: StepPlan, sampled: list[Sampled], now: float, *, waited: bool, goes_on: bool) -> None:
        """See Speculation."""
        if self._drafted:
            for chunk, result in zip(plan.chunks, sampled, strict=True):
                seq = self._drafted.get(chunk.slot)
                if seq is not None and chunk.draft:
                    right = max(len(result.tokens) - 1, 0)
                    wrong = int(right < len(chunk.draft))
                    self._all.record(right, wrong, FORGET)
                    if seq in self._own:  # it has not ended
                        self._own[seq].record(right, wrong)
            self._drafted = {}
        super().record(plan, sampled, now, waited=waited, goes_on=goes_on)

    def _earn(self, num_seqs: int) -> None:
        super()._earn(num_seqs)
        self._account(self._model_accounts, num_seqs).earn()

    def _all_accounts(self) -> Iterable[Account]:
        return chain(self._accounts.values(), self._model_accounts.values())

    def forget(self, seq: Sequence) -> None:
        """See Speculation."""
        super().forget(seq)
        self._own.pop(seq, None)
        self._model.forget(seq)


def _expected(chance: float, count: int) -> float:
    """Draft tokens kept of `count`."""
    return chance * (1 - chance**count) / (1 - chance)
