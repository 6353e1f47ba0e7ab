"""What crosses the packaged model's two boundaries: whole replies to the Talker, chunks of frames to Code2Wav."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from stagevox.connectors.base import Chunk, ChunkProcessor
from stagevox.contract import CODES
from stagevox.errors import ContractError, UnknownVoiceError
from stagevox.stage.payload import StageInput, StageRequest

from .pieces import WEIGHTS, PieceTable
from .text import ThinkerTokenizer

TOKEN_IDS = "token_ids"
"""Key of the Thinker's reply in a chunk."""

CHUNK_FRAMES = (4, 8, 16, 25)
"""Frames of a request's first chunks, the last number for all that follow. The first is small: sound starts early."""

_NO_CHUNKS: list[Chunk] = []
_FAILED = frozenset({"abort", "error"})


def _config(stage: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((WEIGHTS / stage / "config.json").read_text(encoding="utf-8"))
    return config


@cache
def fingerprint(folder: Path) -> str:
    """A digest of a stage's weights and config."""
    digest = hashlib.sha256()
    for name in ("config.json", "model.safetensors"):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


class WholeReply(ChunkProcessor):
    """Sends the Thinker's reply once it is whole: the Talker's conditioning is complete at admission."""

    requires_token_updates = True

    def __init__(self) -> None:
        self._replies: dict[str, list[int]] = {}

    def push(self, req_id: str, token_ids: list[int], payload: Mapping[str, Any], finish_reason: str | None) -> list[Chunk]:
        """Collect the reply; one chunk at its end."""
        reply = self._replies.setdefault(req_id, [])
        reply += token_ids
        if finish_reason is None:
            return _NO_CHUNKS
        self.drop(req_id)
        return _NO_CHUNKS if finish_reason in _FAILED else [Chunk(req_id, 0, True, {TOKEN_IDS: reply})]

    def drop(self, req_id: str) -> None:
        """Forget a request."""
        self._replies.pop(req_id, None)

    @property
    def num_open(self) -> int:
        """Replies under way."""
        return len(self._replies)


class TalkerInput:
    """The Thinker's reply as the Talker's input: tokens to words, words to pieces, one text row a piece."""

    def __init__(self) -> None:
        config = _config("talker")
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
        conditioning = json.dumps([fingerprint(WEIGHTS / "talker"), voice, ids])
        return StageInput(
            prompt_token_ids=list(self._prompt),
            payload={"text_rows": torch.tensor(ids), "voice": voice},
            cache_salt=hashlib.sha256(conditioning.encode()).hexdigest(),
            sampling={"max_tokens": limit if wanted is None else min(limit, wanted + 1)},
        )

    def drop(self, req_id: str) -> None:
        """Nothing is kept."""


class FrameChunks(ChunkProcessor):
    """Cuts the Talker's frames into chunks that grow from :data:`CHUNK_FRAMES`."""

    def __init__(self) -> None:
        self._open: dict[str, _Frames] = {}

    def push(self, req_id: str, token_ids: list[int], payload: Mapping[str, Any], finish_reason: str | None) -> list[Chunk]:
        """Collect frames ``[n, Q]``; a chunk whenever enough are there, and the last one at the end, be it empty."""
        state = self._open.get(req_id)
        if state is None:
            state = self._open[req_id] = _Frames()
        frames = payload.get(CODES)
        if frames is not None and len(frames):
            state.parts.append(frames)
            state.count += len(frames)
        if finish_reason is not None:
            self.drop(req_id)
            return _NO_CHUNKS if finish_reason in _FAILED else [state.cut(req_id, end=True)]
        if state.count < CHUNK_FRAMES[min(state.seq, len(CHUNK_FRAMES) - 1)]:
            return _NO_CHUNKS
        return [state.cut(req_id, end=False)]

    def drop(self, req_id: str) -> None:
        """Forget a request."""
        self._open.pop(req_id, None)

    @property
    def num_open(self) -> int:
        """Requests whose frames are under way."""
        return len(self._open)


class _Frames:
    """Frames of one request that are not on their way yet."""

    def __init__(self) -> None:
        self.seq = 0
        self.count = 0
        self.parts: list[torch.Tensor] = []

    def cut(self, req_id: str, *, end: bool) -> Chunk:
        data = {CODES: torch.cat(self.parts)} if self.parts else {}
        chunk = Chunk(req_id, self.seq, end, data)
        self.seq, self.count, self.parts = self.seq + 1, 0, []
        return chunk


class Code2WavInput:
    """Chunks of frames as positions of Code2Wav: silence before the first frame and after the last one.

    The state ``codes`` is the request's whole history, so that the model reads its left context by absolute position. A request
    without a single frame still gets its silence: its waveform is empty.
    """

    def __init__(self) -> None:
        config = _config("code2wav")
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
