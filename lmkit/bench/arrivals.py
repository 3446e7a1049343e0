"""The times at which requests are sent: a renewal process with gamma-distributed intervals, after a ramp.

`burstiness` is the shape of the gamma distribution: 1 is a Poisson process, less than 1 is burstier, more than 1 is
more even. The coefficient of variation of the intervals is 1 / sqrt(burstiness).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

_BLOCK = 1024  # intervals drawn at a time


def arrival_times(
    rate: float, *, burstiness: float = 1.0, ramp_seconds: float = 0.0, rng: np.random.Generator
) -> Iterator[float]:
    """The times of all arrivals in seconds, without end. The first is 0; with an infinite `rate`, all are 0.

    During the ramp the rate rises linearly from 0. Arrivals u of rate 1 are mapped through the inverse of the expected
    number of arrivals L(t), which is rate t^2 / (2 ramp) until the ramp's end and rate (t - ramp / 2) after it.
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
