"""What crosses from a talker to its vocoder: frames, in chunks that grow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stagevox.connectors.chunks import FrameChunks
from stagevox.contract import CODES

CHUNK_FRAMES = (4, 12, 24, 48, 96)
"""Frames of a request's first chunks, the last number for all that follow: sound starts after a third of a second."""


class TalkerFrames(FrameChunks):
    """Cuts the Talker's frames into chunks. How they are cut changes no sample, only when it comes."""

    def __init__(self, checkpoint: Path, *, sizes: Sequence[int] = CHUNK_FRAMES) -> None:
        super().__init__(CODES, sizes)
