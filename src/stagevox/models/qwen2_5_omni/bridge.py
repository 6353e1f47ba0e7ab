"""What crosses the boundaries: the Thinker's rows to the Talker, whole or as they are made, and codes to Code2Wav."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from stagevox.connectors.base import Chunk
from stagevox.connectors.chunks import PROMPT_LENGTH, FrameChunks
from stagevox.contract import CODES, MROPE_POSITIONS, RowsAt
from stagevox.errors import ContractError, UnknownVoiceError
from stagevox.models.salt import salt
from stagevox.stage.payload import StageInput, StageRequest

from ..checkpoint import read_tensors
from .code2wav import CODES_STATE, SEED, VOICE, WINDOWS, Window
from .config import read_config, read_ids
from .speakers import speakers_of
from .talker import PROMPT_ROWS, REPLY_ROWS, REPLY_WHOLE
from .thinker import ROWS, TOKENS

NOISE_SEED = 42
"""Of a request that names none."""


class TalkerPrompt(NamedTuple):
    """A reconstructed Talker prompt for ``L`` positions of the Thinker's."""

    token_ids: list[int]
    """``L + 2``: a mask where there is no code, PAD, BOS."""
    rows: torch.Tensor
    """``[L + 2, E]``: the Thinker's rows, the voice's, the row of the reply's first token; codec embeddings are the Talker's to add."""
    positions: tuple[torch.Tensor, int]
    """M-RoPE: ``[3, L + 2]``, and what a later position adds to its number."""


class TalkerPrompts:
    """The terminal rows and ids of a checkpoint, and how prompts are made of them."""

    def __init__(self, checkpoint: Path) -> None:
        self.ids = read_ids(checkpoint)
        self.speakers = speakers_of(checkpoint, read_config(checkpoint))
        wanted = [self.ids.text_eos, self.ids.text_pad, *(speaker.bos_token for speaker in self.speakers.values())]
        self._embedding = dict(zip(wanted, read_rows(checkpoint, "thinker.model.embed_tokens.weight", wanted), strict=True))

    def prompt(self, rows: torch.Tensor, first: torch.Tensor, positions: torch.Tensor, voice: str) -> TalkerPrompt:
        """Of the prompt's ``rows [L, E]``, the reply's ``first [1, E]`` row and the prompt's ``positions [3, L]``."""
        length, after = len(rows), int(positions.max()) + 1
        bos = self._embedding[self.speakers[voice].bos_token].to(rows)
        ids = [self.ids.codec_mask] * length + [self.ids.codec_pad, self.ids.codec_bos]
        text = torch.tensor([after, after + 1], device=positions.device).expand(3, -1)
        whole = torch.cat([positions.long(), text], dim=1).cpu()
        return TalkerPrompt(ids, torch.cat([rows, bos, first]), (whole, after - length))

    def ending(self, like: torch.Tensor) -> torch.Tensor:
        """``[2, E]``: the rows of text EOS and of PAD, which goes on for ever."""
        return torch.cat([self._embedding[self.ids.text_eos], self._embedding[self.ids.text_pad]]).to(like)


def read_rows(folder: Path, name: str, rows: Sequence[int]) -> list[torch.Tensor]:
    """Rows ``[1, ...]`` of one tensor of a checkpoint, without reading the rest of it."""
    with safe_open(read_tensors(folder)[name].file, "pt") as file:
        tensor = file.get_slice(name)
        return [tensor[row : row + 1] for row in rows]


class _Rows(NamedTuple):
    """What a Talker request still waits to be whole with, or how far its reply has come."""

    seq: int
    rows: torch.Tensor | None
    tokens: torch.Tensor | None
    prompt: int
    sent: int


class TalkerInput:
    """The Thinker's reply as the Talker's prompt and rows.

    Whole, its digest salts the prefix cache. In pieces, the Talker may run as far as rows are there: generated position ``k`` needs
    row ``k`` of the reply, which comes with the Thinker's token ``k + 1``.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._prompts = TalkerPrompts(checkpoint)
        self._open: dict[str, _Rows] = {}

    def accept(self, request: StageRequest, chunk: Chunk) -> StageInput:
        """One chunk of a reply; a reply without a token to speak ends the request with nothing spoken.

        Raises :class:`UnknownVoiceError`, or :class:`ContractError` for chunks that don't fit together.
        """
        voice = request.options.get("voice")
        if voice not in self._prompts.speakers:
            raise UnknownVoiceError("voice", f"no voice {voice!r}", tuple(self._prompts.speakers))
        had = self._open.pop(chunk.req_id, None) or _Rows(0, None, None, 0, -1)
        if chunk.seq != had.seq:
            raise ContractError("TalkerInput", f"chunk {chunk.seq} of {chunk.req_id} came, {had.seq} was next")
        rows, tokens = _joined(had.rows, chunk.data.get(ROWS)), _joined(had.tokens, chunk.data.get(TOKENS))
        length = had.prompt or chunk.data.get(PROMPT_LENGTH) or 0
        if had.sent < 0:
            return self._begin(chunk, voice, _Rows(had.seq + 1, rows, tokens, length, -1))
        new = chunk.data.get(ROWS)
        if chunk.end:
            pieces = [new] if new is not None else []
            ending = self._prompts.ending(had.rows if new is None else new)
            payload = {REPLY_ROWS: RowsAt(had.sent, torch.cat([*pieces, ending])), REPLY_WHOLE: True}
            return StageInput(payload=payload)
        sent = had.sent + (0 if new is None else len(new))
        self._open[chunk.req_id] = had._replace(seq=had.seq + 1, sent=sent)
        payload = {} if new is None else {REPLY_ROWS: RowsAt(had.sent, new)}
        return StageInput(payload=payload, end=False, ready=length + 2 + sent)

    def _begin(self, chunk: Chunk, voice: str, have: _Rows) -> StageInput:
        """Make the prompt once the row of the reply's first token is there."""
        rows, tokens, length = have.rows, have.tokens, have.prompt
        if rows is None or tokens is None or len(rows) <= length:
            if chunk.end:
                return StageInput(skip=True)
            self._open[chunk.req_id] = have
            return StageInput(end=False)
        if len(rows) != len(tokens):
            raise ContractError("TalkerInput", f"{len(rows)} rows of {len(tokens)} tokens")
        prompt = self._prompts.prompt(rows[:length], rows[length : length + 1], tokens[:length, 1:].T, voice)
        reply = rows[length + 1 :]
        payload: dict[str, Any] = {PROMPT_ROWS: prompt.rows, MROPE_POSITIONS: prompt.positions}
        if chunk.end:
            reply = torch.cat([reply, self._prompts.ending(rows)])
            payload |= {REPLY_ROWS: reply, REPLY_WHOLE: True}
            cache_salt = salt(voice, prompt.rows, reply, prompt.positions[0])
            return StageInput(prompt_token_ids=prompt.token_ids, payload=payload, cache_salt=cache_salt)
        payload[REPLY_ROWS] = RowsAt(0, reply)
        self._open[chunk.req_id] = _Rows(have.seq, rows[:1], None, length, len(reply))
        ready = length + 2 + len(reply)
        return StageInput(prompt_token_ids=prompt.token_ids, payload=payload, end=False, ready=ready)

    def drop(self, req_id: str) -> None:
        """Forget a request."""
        self._open.pop(req_id, None)


def _joined(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return torch.cat([first, second])


class TalkerCodes(FrameChunks):
    """The Talker's tokens as frames of one code: all at the end, or in chunks of ``sizes``. The one that ends them is none."""

    requires_token_updates = True

    def __init__(self, checkpoint: Path, *, sizes: Sequence[int] | None = None) -> None:
        super().__init__(CODES, sizes or (1 << 62,))
        self._ends = frozenset(read_ids(checkpoint).codec_end)

    def push(self, req_id: str, token_ids: list[int], payload: Mapping[str, Any], finish_reason: str | None) -> list[Chunk]:
        """Keep one step's codes and ship the chunks they complete."""
        codes = torch.tensor([code for code in token_ids if code not in self._ends], dtype=torch.long)
        return super().push(req_id, token_ids, {CODES: codes.unsqueeze(1)}, finish_reason)


class _Speech(NamedTuple):
    """Codes so far and the windows cut from them."""

    seq: int
    codes: torch.Tensor
    windows: list[Window]


class Code2WavInput:
    """Codes as windows of the vocoder, a position each.

    Without ``sizes`` there is one window, of all frames, once they are there: what the reference does. With them windows of so many
    frames follow one another (the last size repeats), each with up to ``context`` frames before it and ``ahead`` after it in view;
    a window waits until what it is to see is there. The same frames give the same windows however they come.
    """

    def __init__(self, checkpoint: Path, *, sizes: Sequence[int] | None = None, context: int = 24, ahead: int = 12) -> None:
        if (sizes is not None and (not sizes or min(sizes) < 1)) or min(context, ahead) < 0:
            raise ValueError(f"window sizes must be positive, context and ahead not negative: {sizes}, {context}, {ahead}")
        self._sizes = None if sizes is None else tuple(sizes)
        self._context, self._ahead = context, ahead
        self._num_codes = read_ids(checkpoint).num_codes
        self._speakers = speakers_of(checkpoint, read_config(checkpoint))
        self._open: dict[str, _Speech] = {}

    def accept(self, request: StageRequest, chunk: Chunk) -> StageInput:
        """Append a chunk's codes; raises :class:`ContractError` for a chunk out of order or codes that the vocoder has no row for."""
        had = self._open.pop(chunk.req_id, None) or _Speech(0, torch.empty(0, dtype=torch.long), [])
        if chunk.seq != had.seq:
            raise ContractError("Code2WavInput", f"chunk {chunk.seq} of {chunk.req_id} came, {had.seq} was next")
        new = chunk.data.get(CODES)
        codes = had.codes
        if new is not None:
            if new.dim() != 2 or new.shape[1] != 1 or (new < 0).any() or (new >= self._num_codes).any():
                raise ContractError("Code2WavInput", f"chunk {chunk.seq} of {chunk.req_id} holds no codec frames")
            codes = torch.cat([codes, new[:, 0].cpu()])
        windows = self._cut(had.windows, len(codes), end=chunk.end)
        if not chunk.end:
            self._open[chunk.req_id] = _Speech(had.seq + 1, codes, windows)
        speaker = self._speakers[request.options["voice"]]
        payload = {
            CODES_STATE: codes,
            WINDOWS: windows,
            VOICE: (speaker.cond, speaker.ref_mel),
            SEED: request.sampling.get("seed", NOISE_SEED),
        }
        return StageInput(prompt_token_ids=[0] * (len(windows) - len(had.windows)), payload=payload, end=chunk.end)

    def _cut(self, windows: list[Window], frames: int, *, end: bool) -> list[Window]:
        """All windows of so many frames, the known ones first; ``end``: there will be no more."""
        windows = list(windows)
        start = windows[-1].end if windows else 0
        while start < frames:
            size = frames if self._sizes is None else self._sizes[min(len(windows), len(self._sizes) - 1)]
            ahead = 0 if self._sizes is None else self._ahead
            if not end and (self._sizes is None or start + size + ahead > frames):
                break
            stop = min(start + size, frames)
            windows.append(Window(max(0, start - self._context), start, stop, min(stop + ahead, frames)))
            start = stop
        return windows

    def drop(self, req_id: str) -> None:
        """Forget a request."""
        self._open.pop(req_id, None)
