"""Budgets of memory: what is given back, and who is refused when one is used up."""

import pytest

from lmkit.errors import RequestError
from lmkit.web.budget import Budget


def test_the_largest_is_refused() -> None:
    budget = Budget(100, what="bodies")
    refused = []
    with budget.share() as large, budget.share() as other, budget.share() as small:
        large.on_refusal = lambda: refused.append("large")
        large.add(50)
        other.add(45)
        small.add(6)
        assert refused == ["large"]
        assert (large.num_bytes, budget.used) == (0, 51)
        with pytest.raises(RequestError, match="memory for bodies is used up") as error:
            large.add(1)  # it does not come back
        assert error.value.status == 503
        with pytest.raises(RequestError, match="memory for bodies is used up"):
            small.add(50)  # the other can no longer be refused
        assert budget.used == 46
    assert (budget.used, budget.holders) == (0, set())


def test_small_requests_pass_however_many_hold_the_rest() -> None:
    budget = Budget(1000, what="bodies")
    refused = []
    for i in range(200):
        share = budget.share()
        share.on_refusal = lambda i=i: refused.append(i)  # type: ignore[misc]
        for _ in range(40):
            if share.refusal is None:
                try:
                    share.add(1)
                except RequestError:
                    break
        assert budget.used <= 1000
    assert len(refused) > 100
    budget.share().add(1)


def test_one_request_gets_its_part_only() -> None:
    budget = Budget(100, each=10, what="answers")
    with budget.share() as share, pytest.raises(RequestError, match="of one request"):
        share.add(11)
    assert budget.used == 0
