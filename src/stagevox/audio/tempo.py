"""Speech faster or slower at its own pitch: the ``speed`` of OpenAI's speech endpoint."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from stagevox.errors import BadParameterError, ClosedError

from .check import Samples, as_samples
from .filters import FilterStage

SLOWEST, FASTEST = 0.25, 4.0


def check_speed(speed: Any, field: str = "speed") -> float:
    """``speed`` as a number.

    Raises:
        BadParameterError: not a number from 0.25 to 4; ``field`` is its name.
    """
    number = isinstance(speed, int | float) and not isinstance(speed, bool) and math.isfinite(speed)
    if not number or not SLOWEST <= speed <= FASTEST:
        raise BadParameterError(field, f"{speed!r} is not a number from {SLOWEST} to {FASTEST}")
    return float(speed)


class Tempo:
    """Stretches mono samples at ``sample_rate`` (Hz) to ``1 / speed`` of their length: exactly ``ceil(n / speed)`` samples.

    ``speed`` counts to a thousandth. FFmpeg's ``atempo`` (overlapped waveforms, ends joined where they match) keeps the pitch.
    Where a sound comes in the output may be off by some of its windows, which last 1/24 s to 1/12 s each. At speed 1 samples
    pass as they are.
    """

    def __init__(self, sample_rate: int, speed: float) -> None:
        exact = Fraction(round(check_speed(speed) * 1000), 1000)
        self._stage = FilterStage(sample_rate, _chain(exact), 1 / exact) if exact != 1 else None
        self._open = True

    def push(self, samples: Any) -> Samples:
        """The samples that are ready after these ``[samples]``.

        Raises:
            SamplesError: not one-dimensional, or not finite.
            ClosedError: after ``finish``.
        """
        chunk = as_samples(samples)
        if not self._open:
            raise ClosedError("samples after the end")
        return self._stage.push(chunk) if self._stage else chunk

    def finish(self) -> Samples:
        """The rest.

        Raises:
            ClosedError: called twice.
        """
        if not self._open:
            raise ClosedError("ended already")
        self._open = False
        return self._stage.finish() if self._stage else np.zeros(0, np.float32)


def _chain(speed: Fraction) -> list[tuple[str, str]]:
    """Steps within 0.5 to 2: slower ``atempo`` can't, and faster it drops samples instead of blending them."""
    steps = []
    while speed > 2 or speed < Fraction(1, 2):
        step = Fraction(2) if speed > 2 else Fraction(1, 2)
        steps.append(step)
        speed /= step
    return [("atempo", f"{float(step):.6f}") for step in [*steps, speed]]
