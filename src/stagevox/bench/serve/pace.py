"""When requests are sent."""

from __future__ import annotations

import math

import numpy as np


def offsets(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which each of ``count`` requests is due, the first at 0.

    ``rate`` requests a second on average; infinity: all at once. The gaps are gamma-distributed: ``burstiness`` 1 makes a Poisson
    process, less makes bursts, more makes the gaps alike. The same seed gives the same times.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]
