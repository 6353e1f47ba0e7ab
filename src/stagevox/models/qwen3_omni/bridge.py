"""What crosses Qwen3-Omni's two boundaries: the Thinker's rows to the Talker, chunks of frames to Code2Wav.

Both roads work in two ways: what is made is shipped as it is made, or all of it at the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stagevox.connectors.base import Chunk
from stagevox.connectors.chunks import PROMPT_LENGTH, FrameChunks
from stagevox.contract import CODES, MROPE_POSITIONS, RowsAt
from stagevox.errors import ConfigError, ContractError, UnknownVoiceError
from stagevox.models.qwen3_talker.sampling import RESIDUAL, placeholder
from stagevox.stage.payload import StageInput, StageRequest

from .chat import speech_positions, user_mask
from .code2wav import CODES_STATE, WINDOW
from .config import chat_ids, codec_ids, read_config
from .talker import HEAD, HEAD_ROWS, REPLY, REPLY_LENGTH, SPEAKER, USER, USER_MEDIA
from .thinker import PLACES, ROWS

CHUNK_FRAMES = (4, 12, 24, 48, 96)
"""Frames of a request's first chunks, the last number for all that follow: sound starts after a third of a second."""

WINDOW_FRAMES, LEFT_CONTEXT = 300, 25
"""Frames that the reference decodes together, and those before them that it decodes with them."""

RESIDUAL_SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 0.8}
"""How the reference draws residual codes where the Talker samples."""


class TalkerInput:
    """The Thinker's rows as the Talker's conditioning, as much as is there.

    The prompt's places are held by an id that is never sampled: no penalty on prompt ids changes what is.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._chat, self._codec = chat_ids(checkpoint), codec_ids(checkpoint)
        self._place = placeholder(self._codec.vocab_size, self._codec.eos)
        self._open: dict[str, tuple[int, int]] = {}  # prompt positions of the Talker, rows of the reply so far

    def accept(self, request: StageRequest, chunk: Chunk) -> StageInput:
        """Read one chunk. A reply that ends with its first token leaves nothing to speak: the request ends here with no frames.

        Raises :class:`UnknownVoiceError`, or :class:`ContractError` for a chunk that doesn't fit.
        """
        rows, places = chunk.data.get(ROWS), chunk.data.get(PLACES)
        if chunk.seq == 0:
            if rows is None or places is None:
                raise ContractError("TalkerInput", f"chunk 0 of {chunk.req_id} has no rows")
            return self._begin(request, chunk, rows.cpu(), places.cpu())
        if chunk.req_id not in self._open:
            raise ContractError("TalkerInput", f"chunk {chunk.seq} of {chunk.req_id} came, 0 was next")
        length, known = self._open[chunk.req_id]
        payload: dict[str, Any] = {}
        if rows is not None:
            payload[REPLY] = RowsAt(known, rows.cpu())
            known += len(rows)
        self._open[chunk.req_id] = length, known
        return self._given(chunk, [], payload, length, known)

    def drop(self, req_id: str) -> None:
        """Forget a request."""
        self._open.pop(req_id, None)

    def _begin(self, request: StageRequest, chunk: Chunk, rows: torch.Tensor, places: torch.Tensor) -> StageInput:
        voice = request.options.get("voice")
        if voice not in self._codec.speakers:
            raise UnknownVoiceError("voice", f"no voice {voice!r}", tuple(self._codec.speakers))
        count = chunk.data[PROMPT_LENGTH]
        ids, axes = places[:count, 0], places[:count, 1:].T
        said = user_mask(ids, self._chat)
        head = int((ids == self._chat.im_start).nonzero()[-1])
        user = rows[:count][said]
        reply = rows[count:]
        payload: dict[str, Any] = {
            USER: user,
            USER_MEDIA: torch.isin(ids[said], torch.tensor(self._chat.media)),
            HEAD: rows[head : head + 3],
            SPEAKER: voice,
            MROPE_POSITIONS: speech_positions(ids, axes, said, HEAD_ROWS, self._chat),
            RESIDUAL: RESIDUAL_SAMPLING,
        }
        if len(reply):
            payload[REPLY] = RowsAt(0, reply)
        if chunk.end and not len(reply):
            return StageInput(skip=True)
        length = len(user) + HEAD_ROWS
        self._open[chunk.req_id] = length, len(reply)
        salt = self._salt(payload) if chunk.end else None
        return self._given(chunk, [self._place] * length, payload, length, len(reply), salt)

    def _given(
        self, chunk: Chunk, ids: list[int], payload: dict[str, Any], length: int, known: int, salt: str | None = None
    ) -> StageInput:
        """The prompt's last position is conditioned by the reply's first row, the one after it by the second, and so on."""
        ready: int | None = length - 1 + known
        if chunk.end:
            payload[REPLY_LENGTH], ready = known, None
            self.drop(chunk.req_id)
        return StageInput(prompt_token_ids=ids, payload=payload, cache_salt=salt, end=chunk.end, ready=ready)

    @staticmethod
    def _salt(payload: Mapping[str, Any]) -> str:
        """A digest of all that decides codes and their embeddings."""
        digest = hashlib.sha256(repr((payload[SPEAKER], payload[RESIDUAL])).encode())
        for tensor in (payload[USER], payload[USER_MEDIA], payload[HEAD], payload[REPLY].rows, payload[MROPE_POSITIONS][0]):
            digest.update(repr(tuple(tensor.shape)).encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class TalkerFrames(FrameChunks):
    """Cuts the Talker's frames into chunks. How they are cut changes no sample, only when it comes."""

    def __init__(self, checkpoint: Path, *, sizes: Sequence[int] = CHUNK_FRAMES) -> None:
        super().__init__(CODES, sizes)


class Code2WavInput:
    """Chunks of frames as positions of Code2Wav.

    ``window_frames`` and ``left_context`` are the chunk and the context that the reference decodes with; samples depend on them.
    """

    def __init__(self, checkpoint: Path, *, window_frames: int = WINDOW_FRAMES, left_context: int = LEFT_CONTEXT) -> None:
        config = read_config(checkpoint)["code2wav_config"]
        self._size, self._groups = config["codebook_size"], config["num_quantizers"]
        if window_frames < 1 or left_context < 1:
            # The samples at a window's border come from the frames before it.
            raise ConfigError("code2wav", f"a window of {window_frames} frames with {left_context} before it", ("at least 1",))
        self._window = (window_frames, left_context)
        self._open: dict[str, tuple[int, int]] = {}  # chunks and frames so far

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
        if chunk.end:
            self.drop(chunk.req_id)
        else:
            self._open[chunk.req_id] = (expected + 1, first + len(frames))
        payload = {CODES_STATE: RowsAt(first, frames.cpu().long()), WINDOW: self._window} if len(frames) else {}
        return StageInput(prompt_token_ids=[0] * len(frames), payload=payload, end=chunk.end)

    def drop(self, req_id: str) -> None:
        """Forget a request."""
        self._open.pop(req_id, None)
