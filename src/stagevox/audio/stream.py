"""The samples of one request, joined in the order they come."""

from __future__ import annotations

from typing import Any

import numpy as np

from .check import Samples, as_samples


class SampleStream:
    """Takes the samples of a request's new frames, chunk by chunk; what it has taken is never cut or moved."""

    def __init__(self, sample_rate: int) -> None:
        self.sample_rate = sample_rate
        self.num_samples = 0
        self._chunks: list[Samples] = []

    def push(self, samples: Any) -> Samples:
        """Add one chunk (an array or CPU tensor ``[samples]``) and return it as float32.

        Raises:
            SamplesError: no numbers, not one-dimensional, or not finite.
        """
        chunk = as_samples(samples).copy()  # whoever gave them may write there again
        self._chunks.append(chunk)
        self.num_samples += len(chunk)
        return chunk

    @property
    def seconds(self) -> float:
        """The length so far."""
        return self.num_samples / self.sample_rate

    def joined(self) -> Samples:
        """All samples so far."""
        return np.concatenate(self._chunks) if self._chunks else np.zeros(0, dtype=np.float32)
