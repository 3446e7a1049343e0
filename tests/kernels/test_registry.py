"""Choosing an implementation, and handing a single call on."""

from __future__ import annotations

import pytest

from lmkit.errors import UnsupportedError
from lmkit.kernels.registry import Op, implements


@pytest.fixture
def double() -> Op:
    op = Op("double", "2 x")
    implements(op, "reference", device="any")(lambda x: x + x)

    @implements(op, "fast", device="cuda", accepts=lambda *, size: "too large" if size > 4 else None, priority=5)
    def fast(x: float) -> float:
        return op.fall_back("reference", f"{x} is negative")(x) if x < 0 else 2 * x

    return op


def test_the_first_that_accepts_is_selected(double: Op) -> None:
    assert double.select("cuda", size=4).name == "fast"
    assert double.select("cuda", size=5).name == double.select("cpu", size=4).name == "reference"


def test_an_error_lists_every_reason(double: Op) -> None:
    del double.implementations[1]
    with pytest.raises(UnsupportedError, match="fast: too large"):
        double.select("cuda", size=5)
    with pytest.raises(UnsupportedError, match="fast: runs on cuda"):
        double.select("cpu", size=4)


def test_each_reason_for_a_fallback_is_told_once_and_counted(double: Op, caplog: pytest.LogCaptureFixture) -> None:
    fast = double.select("cuda", size=1)
    with caplog.at_level("WARNING", "lmkit"):
        assert [fast(x) for x in (-1, 3, -2, -1)] == [-2, 6, -4, -2]
    assert [record.getMessage() for record in caplog.records] == [
        "double: -1 is negative; such calls run through its reference implementation, slowly",
        "double: -2 is negative; such calls run through its reference implementation, slowly",
    ]
    assert double.fallbacks == {"-1 is negative": 2, "-2 is negative": 1}
