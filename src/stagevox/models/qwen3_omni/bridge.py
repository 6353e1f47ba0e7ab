"""What crosses Qwen3-Omni's two boundaries: the Thinker's rows to the Talker, chunks of frames to Code2Wav.

Both roads work in two ways: what is made is shipped as it is made, or all of it at the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stagevox.connectors.base import Chunk
from stagevox.connectors.chunks import PROMPT_LENGTH
from stagevox.contract import MROPE_POSITIONS, RowsAt
from stagevox.errors import ContractError, UnknownVoiceError
from stagevox.models.qwen3_talker.sampling import RESIDUAL, placeholder
from stagevox.models.salt import salt
from stagevox.models.windows import WindowedInput
from stagevox.stage.payload import StageInput, StageRequest

from .chat import speech_positions, user_mask
from .config import chat_ids, codec_ids, read_config
from .talker import HEAD, HEAD_ROWS, REPLY, REPLY_LENGTH, SPEAKER, USER, USER_MEDIA
from .thinker import PLACES, ROWS

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
        cache_salt = None
        if chunk.end:
            cache_salt = salt(
                (voice, RESIDUAL_SAMPLING), user, payload[USER_MEDIA], payload[HEAD], reply, payload[MROPE_POSITIONS][0]
            )
        return self._given(chunk, [self._place] * length, payload, length, len(reply), cache_salt)

    def _given(
        self, chunk: Chunk, ids: list[int], payload: dict[str, Any], length: int, known: int, cache_salt: str | None = None
    ) -> StageInput:
        """The prompt's last position is conditioned by the reply's first row, the one after it by the second, and so on."""
        ready: int | None = length - 1 + known
        if chunk.end:
            payload[REPLY_LENGTH], ready = known, None
            self.drop(chunk.req_id)
        return StageInput(prompt_token_ids=ids, payload=payload, cache_salt=cache_salt, end=chunk.end, ready=ready)


class Code2WavInput(WindowedInput):
    """Chunks of frames as positions of Code2Wav, decoded in the reference's windows by default."""

    def __init__(self, checkpoint: Path, *, window_frames: int = WINDOW_FRAMES, left_context: int = LEFT_CONTEXT) -> None:
        config = read_config(checkpoint)["code2wav_config"]
        # The samples at a window's border come from the frames before it.
        super().__init__(config["num_quantizers"], config["codebook_size"], (window_frames, left_context), least_context=1)
