"""What crosses the packaged model's two boundaries: whole replies to the Talker, chunks of frames to Code2Wav."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from stagevox.connectors.base import Chunk
from stagevox.connectors.chunks import TOKEN_IDS, FrameChunks
from stagevox.contract import CODES
from stagevox.errors import ContractError, UnknownVoiceError
from stagevox.stage.payload import StageInput, StageRequest

from .pieces import WEIGHTS, PieceTable
from .text import ThinkerTokenizer

CHUNK_FRAMES = (6, 12, 36, 64)
"""Frames of a request's first chunks, the last number for all that follow. The first is small: sound starts early."""


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


@cache
def fingerprint(folder: Path) -> str:
    """A digest of a stage's weights and config."""
    digest = hashlib.sha256()
    for name in ("config.json", "model.safetensors"):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


class TalkerInput:
    """The Thinker's reply as the Talker's input: tokens to words, words to pieces, one text row a piece."""

    def __init__(self, checkpoint: Path = WEIGHTS / "talker") -> None:
        config = _config(checkpoint)
        self._fingerprint = fingerprint(checkpoint)
        self._tokenizer = ThinkerTokenizer()
        self._pieces = PieceTable()
        self._voices: tuple[str, ...] = tuple(config["voices"])
        rows = config["prompt_text_rows"] + 1
        self._prompt = [config["codec_pad_id"]] * rows + [config["codec_bos_id"]]

    def accept(self, request: StageRequest, chunk: Chunk) -> StageInput:
        """Make the whole input from the one chunk.

        Raises :class:`UnknownVoiceError`, :class:`EmptyTextError`, :class:`VocabularyError` or :class:`TextTooLongError`.
        """
        if chunk.seq != 0 or not chunk.end:
            raise ContractError("TalkerInput", f"chunk {chunk.seq} of {chunk.req_id}: a reply comes whole")
        voice = request.options.get("voice") or self._voices[0]
        if voice not in self._voices:
            raise UnknownVoiceError("voice", f"no voice {voice!r}", self._voices)
        ids = self._pieces.encode(self._tokenizer.decode(chunk.data[TOKEN_IDS]).split())
        # The last token that is sampled never becomes a frame: one more token than frames.
        limit = self._pieces.frame_cap(ids) + 1
        wanted = request.sampling.get("max_tokens")
        conditioning = json.dumps([self._fingerprint, voice, ids])
        return StageInput(
            prompt_token_ids=list(self._prompt),
            payload={"text_rows": torch.tensor(ids), "voice": voice},
            cache_salt=hashlib.sha256(conditioning.encode()).hexdigest(),
            sampling={"max_tokens": limit if wanted is None else min(limit, wanted + 1)},
        )

    def drop(self, req_id: str) -> None:
        """Nothing is kept."""


class TalkerFrames(FrameChunks):
    """Cuts the Talker's frames into growing chunks."""

    def __init__(self, checkpoint: Path | None = None, sizes: Sequence[int] = CHUNK_FRAMES) -> None:
        super().__init__(CODES, sizes)


class Code2WavInput:
    """Chunks of frames as positions of Code2Wav: silence before the first frame and after the last one.

    The state ``codes`` is the request's whole history, so that the model reads its left context by absolute position. A request
    without a single frame still gets its silence: its waveform is empty.
    """

    def __init__(self, checkpoint: Path = WEIGHTS / "code2wav") -> None:
        config = _config(checkpoint)
        self._sizes = torch.tensor(config["codebook_sizes"])
        silence = torch.tensor([config["silence_codes"]])
        self._before, self._after = silence.expand(config["warmup_codes"], -1), silence
        self._open: dict[str, tuple[int, torch.Tensor]] = {}

    def accept(self, request: StageRequest, chunk: Chunk) -> StageInput:
        """Append a chunk's frames; raises :class:`ContractError` for a chunk out of order or codes outside their codebooks."""
        expected, history = self._open.get(chunk.req_id, (0, self._before))
        if chunk.seq != expected:
            raise ContractError("Code2WavInput", f"chunk {chunk.seq} of {chunk.req_id} came, {expected} was next")
        parts = [history]
        frames = chunk.data.get(CODES)
        if frames is not None:
            if frames.dim() != 2 or frames.shape[1] != len(self._sizes) or (frames < 0).any() or (frames >= self._sizes).any():
                raise ContractError("Code2WavInput", f"chunk {chunk.seq} of {chunk.req_id} holds no codec frames")
            parts.append(frames)
        if chunk.end:
            parts.append(self._after)
        codes = torch.cat(parts)
        new = len(codes) - (len(history) if expected else 0)
        if chunk.end:
            self.drop(chunk.req_id)
        else:
            self._open[chunk.req_id] = (expected + 1, codes)
        return StageInput(prompt_token_ids=[0] * new, payload={"codes": codes}, end=chunk.end)

    def drop(self, req_id: str) -> None:
        """Forget a request."""
        self._open.pop(req_id, None)
