"""What draft tokens lose is bounded by an account of measured times, whatever the chooser expects of them.

    a step with drafts saves    tokens that it gave / tokens of a plain step * time of a plain step  -  its own time

Computing drafts, choosing between them and waiting for tokens costs time as well. All of it goes into the account,
except steps of a new size, whose preparation speculation.py has weighed. The account gains SHARE of the decoding time
besides. When the account is empty, there are no draft tokens until it has saved up
TRIAL. So draft tokens that never help cost SHARE of the time in the long run.

Amounts are in plain steps, so they mean the same for every model.
"""

from __future__ import annotations

SHARE = 0.005  # of the time
TRIAL = 6.0  # what there is when draft tokens go on, and at least at first
FIRST_SECONDS = 0.02  # what there is at first, if it is more: indices of prompts, and times that are not known yet
ENOUGH, CREDIT = 12.0, 64.0  # what is kept before investments are paid off; the most that is kept
# A loss at once counts as no more while drafts go on, because it may be an investment, such as the prompt's KV of a
# draft model. The rest counts when draft tokens stop. They do when it exceeds MOST_INVESTED.
LARGE_LOSS, MOST_INVESTED = 4.0, 100.0


class Account:
    """It is open while draft tokens may be made."""

    def __init__(self) -> None:
        self.is_open = True
        self.saved = 0.0  # seconds in all; negative: lost
        self._balance, self._invested = TRIAL, 0.0
        self._is_new = True

    @property
    def can_try(self) -> bool:
        """Whether there is enough for draft tokens that are not expected to pay."""
        return self._balance >= TRIAL

    def earn(self) -> None:
        """A decode step has passed."""
        self._add(SHARE)

    def book(self, saved: float, plain: float) -> None:
        """Draft tokens saved so many seconds, or lost them. A plain step takes `plain` seconds."""
        self.saved += saved
        if self._is_new:
            self._is_new, self._balance = False, max(FIRST_SECONDS / plain, TRIAL)
        steps = saved / plain
        self._invested -= min(steps + LARGE_LOSS, 0.0)
        self._add(max(steps, -LARGE_LOSS))

    def _add(self, steps: float) -> None:
        balance = self._balance + steps
        paid_off = min(max(balance - ENOUGH, 0.0), self._invested)
        self._invested -= paid_off
        self._balance = min(balance - paid_off, max(self._balance, CREDIT))
        if self.is_open and (self._balance < 0 or self._invested > MOST_INVESTED):
            self.is_open = False
            self._balance, self._invested = self._balance - self._invested, 0.0
        elif not self.is_open and self._balance >= TRIAL:
            self.is_open = True
