"""Arrival times: the same for a seed, with the rate and the variation that was asked for."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from lmkit.bench.arrivals import arrival_times


def times(count: int, rate: float, *, seed: int = 0, burstiness: float = 1.0, ramp_seconds: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    drawn = arrival_times(rate, burstiness=burstiness, ramp_seconds=ramp_seconds, rng=rng)
    return np.array(list(itertools.islice(drawn, count)))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_mean_and_variation(burstiness: float) -> None:
    count = 40_000
    intervals = np.diff(times(count, 5.0, burstiness=burstiness))
    variation = 1 / math.sqrt(burstiness)
    # Six standard errors of the mean; of the coefficient of variation, with the heavier tails, 5 %.
    assert intervals.mean() == pytest.approx(0.2, abs=6 * 0.2 * variation / math.sqrt(count))
    assert intervals.std() / intervals.mean() == pytest.approx(variation, rel=0.05)


def test_poisson_intervals_are_exponential() -> None:
    intervals = np.sort(np.diff(times(20_001, 2.0)))
    expected = 1 - np.exp(-2.0 * intervals)
    observed = np.arange(1, len(intervals) + 1) / len(intervals)
    assert np.abs(expected - observed).max() < 1.63 / math.sqrt(len(intervals)), "Kolmogorov-Smirnov at 1 %"


def test_seeds() -> None:
    assert (times(100, 3.0, seed=1) == times(100, 3.0, seed=1)).all()
    assert (times(100, 3.0, seed=1) != times(100, 3.0, seed=2))[1:].all()


def test_begins_at_once_and_never_goes_back() -> None:
    drawn = times(1000, 3.0, burstiness=0.1, ramp_seconds=5.0)
    assert drawn[0] == 0
    assert (np.diff(drawn) >= 0).all()


def test_without_a_rate_all_come_at_once() -> None:
    assert (times(50, math.inf) == 0).all()


def test_a_ramp_rises_linearly_to_the_rate() -> None:
    rate, ramp = 1000.0, 20.0
    drawn = times(30_000, rate, ramp_seconds=ramp)
    # rate t^2 / (2 ramp) arrivals are expected until t, and half of rate * ramp until the ramp's end.
    assert np.searchsorted(drawn, ramp / 2) == pytest.approx(rate * ramp / 8, rel=0.1)
    assert np.searchsorted(drawn, ramp) == pytest.approx(rate * ramp / 2, rel=0.05)
    assert np.searchsorted(drawn, ramp + 10) - np.searchsorted(drawn, ramp) == pytest.approx(10 * rate, rel=0.05)
