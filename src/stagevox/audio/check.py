"""What counts as samples on the way to a file."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagevox.errors import SamplesError

Samples = NDArray[np.float32]
"""Mono samples ``[samples]`` in [-1, 1]."""


def as_samples(values: Any) -> Samples:
    """``values`` (an array or CPU tensor ``[samples]``) as float32.

    Raises:
        SamplesError: not numbers, not one-dimensional, or not finite.
    """
    try:
        with np.errstate(over="ignore"):  # to infinity, told below
            samples = np.asarray(values).astype(np.float32, copy=False)
    except (TypeError, ValueError):
        raise SamplesError(f"samples are no numbers: {type(values).__name__}") from None
    if samples.ndim != 1:
        raise SamplesError(f"samples have shape {list(samples.shape)}, expected [samples]")
    if not np.isfinite(samples).all():
        at = int(np.flatnonzero(~np.isfinite(samples))[0])
        raise SamplesError(f"samples are not finite: {samples[at]} at {at} of {len(samples)}")
    return samples


def saturated(samples: Samples) -> Samples:
    """``samples`` with what is outside [-1, 1] clamped."""
    return np.clip(samples, np.float32(-1), np.float32(1))
