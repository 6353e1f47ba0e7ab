"""Speech that is decoded window by window, each window with some frames before it: the stage's input and its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from stagevox.connectors.base import Chunk
from stagevox.contract import CODES, NUM_COMPUTED_TOKENS, SAMPLE_RATE, WAVEFORM, OmniOutput, OwnedBatchTensor, RowsAt
from stagevox.errors import ConfigError, ContractError, MissingStateError
from stagevox.stage.payload import StageInput, StageRequest

from .vocoder import Vocoder, rounded

CODES_STATE = "codes"
"""State: LongTensor ``[frames so far, Q]``; row p is the frame at position p."""

WINDOW = "window"
"""State: ``(frames, left context)`` of the windows that samples are decoded in."""


class Piece(NamedTuple):
    """Frames ``[start, end)`` of one window of a request, decoded from frame ``first`` on."""

    request: int
    first: int
    start: int
    end: int


class WindowedVocoder(Vocoder):
    """Positions are codec frames, each of ``groups`` codes; each yields its samples once.

    Frame p belongs to window ``p // frames``, which is decoded with up to ``context`` frames before it and nothing else. So its
    samples are a function of the request's codes and p: however frames come and however a step is cut, they are the same (to
    about 1e-6: other shapes add up in another order).
    """

    def __init__(self, width: int, groups: int, sample_rate: int) -> None:
        super().__init__(width)
        self.groups = groups
        self.sample_rate = sample_rate

    def decode(self, pieces: Sequence[Piece], codes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Samples of each piece; its ``codes [>= end - first, Q]`` begin with the context and end with filling.

        A result may be a view of what was made for all.
        """
        raise NotImplementedError

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        model_intermediate_buffer: Sequence[Mapping[str, Any]] = (),
        request_token_spans: Sequence[tuple[int, int]] = (),
        **kwargs: Any,
    ) -> OmniOutput:
        """Samples of each request's new frames: ``WAVEFORM`` one tensor a request, ``SAMPLE_RATE`` in Hz."""
        pieces: list[Piece] = []
        for index, (state, (start, end)) in enumerate(zip(model_intermediate_buffer, request_token_spans, strict=True)):
            pieces += self._pieces(index, state, end - start)
        made: list[list[torch.Tensor]] = [[] for _ in model_intermediate_buffer]
        if pieces:
            codes = [_filled(model_intermediate_buffer[piece.request][CODES_STATE], piece) for piece in pieces]
            for piece, samples in zip(pieces, self.decode(pieces, codes), strict=True):
                made[piece.request].append(samples)
        # Joined samples are the request's own memory, also where it is only one part.
        waveforms = [OwnedBatchTensor(torch.cat(parts)) if parts else _NO_SAMPLES for parts in made]
        outputs = {WAVEFORM: waveforms, SAMPLE_RATE: [self.sample_rate] * len(waveforms)}
        return OmniOutput(torch.zeros(len(positions), 1, device=positions.device), outputs if waveforms else None)

    def _pieces(self, request: int, state: Mapping[str, Any], count: int) -> list[Piece]:
        """The ``count`` positions of a request, window by window."""
        for key in (CODES_STATE, WINDOW):
            if key not in state:
                raise MissingStateError("forward", f"{key} was never stored")
        (frames, context), codes, start = state[WINDOW], state[CODES_STATE], state[NUM_COMPUTED_TOKENS]
        end = start + count
        if codes.dim() != 2 or codes.shape[1] != self.groups:
            raise ContractError("forward", f"{CODES_STATE} has shape {list(codes.shape)}")
        if len(codes) < end:
            raise ContractError("forward", f"positions up to {end} are scheduled, {CODES_STATE} has {len(codes)} frames")
        pieces = []
        while start < end:
            begin = start // frames * frames
            until = min(begin + frames, end)
            pieces.append(Piece(request, max(0, begin - context), start, until))
            start = until
        return pieces


class WindowedInput:
    """Chunks of frames as positions of a :class:`WindowedVocoder`: ``groups`` codes each, below ``size``.

    ``window`` is ``(frames, left context)``; samples depend on both. Raises :class:`ConfigError` for a window without frames or
    with fewer than ``least_context`` before it.
    """

    def __init__(self, groups: int, size: int, window: tuple[int, int], least_context: int = 0) -> None:
        frames, context = window
        if frames < 1 or context < least_context:
            least = f"at least 1 frame with {least_context} before it"
            raise ConfigError("code2wav.input_options", f"a window of {frames} frames with {context} before it", (least,))
        self._groups, self._size, self._window = groups, size, window
        self._open: dict[str, tuple[int, int]] = {}  # chunks and frames so far

    def accept(self, request: StageRequest, chunk: Chunk) -> StageInput:
        """Append a chunk's frames; raises :class:`ContractError` for a chunk out of order or codes outside their codebooks.

        A request that ends without a single frame has no position: the stage ends it with no samples.
        """
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


def _filled(codes: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A piece's codes with its context, and as many zeros after them as make a common length."""
    count = piece.end - piece.start
    return F.pad(codes[piece.first : piece.end], (0, 0, 0, rounded(count) - count))


_NO_SAMPLES = torch.zeros(0)
