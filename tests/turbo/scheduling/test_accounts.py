"""The account of what drafts saved and lost, in steps of one second."""

from __future__ import annotations

import pytest

from lmkit.turbo.scheduling.accounts import CREDIT, FIRST_SECONDS, LARGE_LOSS, MOST_INVESTED, SHARE, TRIAL, Account


def steps_until_open(account: Account) -> int:
    for count in range(100_000):
        if account.is_open:
            return count
        account.earn()
    raise AssertionError("it never opens")


@pytest.mark.parametrize("loss", [0.1, 1.0, 3.0, 30.0])
def test_drafts_that_never_help_cost_a_share_of_the_time(loss: float) -> None:
    account, steps = Account(), 50_000
    for _ in range(steps):
        account.earn()
        if account.is_open:
            account.book(-loss, 1.0)
    assert TRIAL < -account.saved < SHARE * steps + TRIAL + 2 * loss
    assert -account.saved > 0.5 * SHARE * steps, "it stopped trying"


def test_the_first_drafts_of_a_fast_model_may_take_some_time() -> None:
    plain, lost = 1e-4, 0.0
    account = Account()
    while account.is_open:
        account.book(-plain, plain)
        lost += plain
    assert FIRST_SECONDS <= lost < 1.1 * FIRST_SECONDS


def test_only_what_is_left_is_for_tries() -> None:
    account = Account()
    assert account.can_try
    account.book(-1.0, 1.0)
    assert account.is_open
    assert not account.can_try


def test_drafts_that_help_go_on() -> None:
    account = Account()
    for _ in range(100):
        account.book(-1.5, 1.0)
        account.book(2.0, 1.0)
        assert account.is_open
    assert account.saved == pytest.approx(50)


def test_old_gains_pay_for_few_losses() -> None:
    account = Account()
    account.book(1000.0, 1.0)
    for _ in range(int(CREDIT) + 1):
        account.book(-1.0, 1.0)
    assert not account.is_open


def test_a_large_loss_may_pay_later() -> None:
    """Such as a long prompt, whose KV many drafts need."""
    account = Account()
    account.book(-50.0, 1.0)
    assert account.is_open
    account.book(200.0, 1.0)  # pays it back
    for _ in range(int(CREDIT / LARGE_LOSS) + 1):
        assert account.is_open
        account.book(-LARGE_LOSS, 1.0)
    assert not account.is_open
    assert steps_until_open(account) < 4 * CREDIT / SHARE


def test_a_large_loss_that_did_not_pay_counts_when_drafts_stop() -> None:
    account = Account()
    account.book(-50.0, 1.0)
    account.book(-LARGE_LOSS, 1.0)
    assert not account.is_open
    assert steps_until_open(account) > 40 / SHARE


def test_large_losses_are_bounded_even_if_drafts_help_between_them() -> None:
    account = Account()
    while account.is_open:
        account.book(-20.0, 1.0)
        account.book(10.0, 1.0)
    assert -account.saved < 2 * MOST_INVESTED


def test_amounts_are_measured_in_steps() -> None:
    slow, fast = Account(), Account()
    for _ in range(3):
        slow.book(-3.0, 1.0)
        fast.book(-0.03, 0.01)
        assert slow.is_open == fast.is_open
    assert not slow.is_open
    assert slow.saved == pytest.approx(100 * fast.saved)
