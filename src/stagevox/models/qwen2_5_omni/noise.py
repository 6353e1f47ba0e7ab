"""Where a request's speech starts from: noise that is a function of its seed and of the position alone."""

from __future__ import annotations

import hashlib

import torch

BLOCK = 64
"""Mel frames that are drawn at once."""


def noise(seed: int, start: int, end: int, mel: int) -> torch.Tensor:
    """Rows ``[start, end)`` of a request's standard normal noise, ``[end - start, mel]`` in float32 on the CPU.

    Mel frames are drawn in blocks of 64, block ``b`` by a generator seeded with the first eight bytes of
    ``sha256("{seed}:{b}")``, read big-endian. So any window of a long speech has the noise that the whole would have there.
    """
    blocks = []
    for block in range(start // BLOCK, -(-end // BLOCK)):
        digest = hashlib.sha256(f"{seed}:{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
        blocks.append(torch.randn(BLOCK, mel, generator=generator))
    first = start - start // BLOCK * BLOCK
    drawn = torch.cat(blocks) if blocks else torch.empty(0, mel)
    return drawn[first : first + end - start]
