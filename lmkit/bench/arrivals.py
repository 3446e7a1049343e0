"""When requests are to be sent: a renewal process with gamma-distributed intervals, and a ramp before it.

`burstiness` is the gamma distribution's shape: 1 is a Poisson process, below 1 comes in bursts, above 1 is more even;
the intervals' coefficient of variation is 1 / sqrt(burstiness).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

_BLOCK = 1024  # intervals drawn at a time


def arrival_times(
    rate: float, *, burstiness: float = 1.0, ramp_seconds: float = 0.0, rng: np.random.Generator
) -> Iterator[float]:
    """Seconds of one arrival after the other, without end; the first is at 0. An infinite `rate`: all at 0.

    During the ramp the rate rises linearly from 0: unit-rate arrivals u are mapped through the inverse of the expected
    number of arrivals, L(t) = rate t^2 / (2 ramp) up to the ramp's end and rate (t - ramp / 2) after it.
    """
    if math.isinf(rate):
        while True:
            yield 0.0
    yield 0.0
    unit = 0.0
    while True:
        for interval in rng.gamma(burstiness, 1 / burstiness, _BLOCK).tolist():
            unit += interval
            in_ramp = unit <= rate * ramp_seconds / 2
            yield math.sqrt(2 * unit * ramp_seconds / rate) if in_ramp else unit / rate + ramp_seconds / 2
