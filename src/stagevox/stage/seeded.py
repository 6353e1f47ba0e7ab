"""Seeded requests whose prompt is chunked, on a CPU.

vLLM draws for every row of the batch, then winds the generator of a discarded row (a prompt chunk, a replay tail) back by
its offset. CPU generators have no offset: here their state is put back instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def keep_generators(generators: dict[int, torch.Generator], discarded: np.ndarray) -> Iterator[None]:
    """Restore, on exit, the generators of the rows that ``discarded [num_reqs]`` marks."""
    saved = [
        (generators[int(row)], generators[int(row)].get_state()) for row in np.flatnonzero(discarded) if int(row) in generators
    ]
    yield
    for generator, state in saved:
        generator.set_state(state)


@contextmanager
def without_offsets(batch: Any) -> Iterator[None]:
    """Hide ``batch.generators`` from code that would wind them back by offset."""
    generators = batch.generators
    batch.generators = {}
    try:
        yield
    finally:
        batch.generators = generators
