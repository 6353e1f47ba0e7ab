"""What crosses from the talker to Code2Wav: frames, in chunks that grow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from stagevox.connectors.base import Chunk
from stagevox.connectors.chunks import FrameChunks
from stagevox.contract import CODES, RowsAt
from stagevox.errors import ConfigError, ContractError
from stagevox.models.checkpoint import read_json, require
from stagevox.stage.payload import StageInput, StageRequest

from .code2wav import CODES_STATE, WINDOW

CHUNK_FRAMES = (4, 12, 24, 48, 96)
"""Frames of a request's first chunks, the last number for all that follow: sound starts after a third of a second."""


class TalkerFrames(FrameChunks):
    """Cuts the talker's frames into chunks. How they are cut changes no sample, only when it comes."""

    def __init__(self, checkpoint: Path, sizes: Sequence[int] = CHUNK_FRAMES) -> None:
        super().__init__(CODES, sizes)


class Code2WavInput:
    """Chunks of frames as positions of Code2Wav.

    ``window_frames`` and ``left_context`` are the chunk and the context that the reference decodes with; samples depend on them.
    A request that ends without a single frame gets a position that yields nothing.
    """

    def __init__(self, checkpoint: Path, window_frames: int = 300, left_context: int = 25) -> None:
        path = checkpoint / "config.json"
        config = read_json(path)
        self._size = int(require(path, config, "decoder_config", "codebook_size"))
        self._groups = int(require(path, config, "decoder_config", "num_quantizers"))
        if window_frames < 1 or left_context < 0:
            raise ConfigError("code2wav.input_options", f"a window of {window_frames} frames with {left_context} before it")
        self._window = (window_frames, left_context)
        self._open: dict[str, tuple[int, int]] = {}

    def accept(self, request: StageRequest, chunk: Chunk) -> StageInput:
        """Append a chunk's frames; raises :class:`ContractError` for a chunk out of order or codes outside their codebooks."""
        expected, first = self._open.get(chunk.req_id, (0, 0))
        if chunk.seq != expected:
            raise ContractError("Code2WavInput", f"chunk {chunk.seq} of {chunk.req_id} came, {expected} was next")
        frames = chunk.data.get(CODES)
        if frames is None:
            frames = torch.zeros(0, self._groups, dtype=torch.long)
        if frames.dim() != 2 or frames.shape[1] != self._groups or (frames < 0).any() or (frames >= self._size).any():
            raise ContractError("Code2WavInput", f"chunk {chunk.seq} of {chunk.req_id} holds no codec frames")
        end = first + len(frames)
        if chunk.end:
            self.drop(chunk.req_id)
        else:
            self._open[chunk.req_id] = (expected + 1, end)
        places = len(frames) if end or not chunk.end else 1
        return StageInput([0] * places, {CODES_STATE: RowsAt(first, frames), WINDOW: self._window}, end=chunk.end)

    def drop(self, req_id: str) -> None:
        """Forget a request."""
        self._open.pop(req_id, None)
