"""Code2Wav: the 12 Hz decoder as a generation stage, window by window as the reference decodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from vllm.config import VllmConfig

from stagevox.contract import NUM_COMPUTED_TOKENS, SAMPLE_RATE, WAVEFORM, OmniOutput, OwnedBatchTensor
from stagevox.errors import CheckpointError, ContractError, MissingStateError

from .decoder import SpeechDecoder
from .layout import ENCODING

CODES_STATE = "codes"
"""State: LongTensor ``[frames so far, Q]``; row p is the frame at position p."""

WINDOW = "window"
"""State: ``(frames, left context)`` of the windows that samples are decoded in."""


class Piece(NamedTuple):
    """Frames ``[start, end)`` of one window of a request, and where decoding starts for them."""

    request: int
    first: int
    start: int
    end: int


class Qwen3TTSCode2Wav(nn.Module):
    """Positions are codec frames; each yields its 1920 samples once.

    Frame p belongs to window ``p // frames``, which is decoded with up to ``context`` frames before it and nothing else. So its
    samples are a function of the request's codes and p: however frames come and however a step is cut, they are what the
    reference's chunked decoding makes of the whole, and T frames make ``1920 * T`` samples. Positions past the codes yield nothing.
    """

    is_attention_free: ClassVar[Literal[True]] = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.decoder = SpeechDecoder(self.config.decoder_config)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Zeros ``[n, H]``: ids only hold places, the frames are in the request's state."""
        return torch.zeros(len(input_ids), self.config.hidden_size, device=input_ids.device)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """There are none; vLLM's profiling asks for their shape."""
        return hidden_states.new_zeros(len(hidden_states), self.config.vocab_size)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the decoder's tensors; raises :class:`CheckpointError` on any that is missing, extra or misshapen."""
        targets = dict(self.named_parameters())
        loaded: set[str] = set()
        with torch.no_grad():
            for name, tensor in weights:
                if name.startswith(ENCODING):
                    continue
                if name not in targets or targets[name].shape != tensor.shape:
                    raise CheckpointError(
                        "code2wav", f"tensor {name} with shape {list(tensor.shape)} belongs to no part of the model"
                    )
                targets[name].copy_(tensor)
                loaded.add(name)
        if missing := sorted(set(targets) - loaded):
            raise CheckpointError("code2wav", f"missing tensors: {', '.join(missing)}")
        return loaded

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
        waves: list[list[torch.Tensor]] = [[] for _ in model_intermediate_buffer]
        if pieces:
            made = self._decode(pieces, [model_intermediate_buffer[piece.request][CODES_STATE] for piece in pieces])
            for piece, samples in zip(pieces, made, strict=True):
                waves[piece.request].append(samples)
        joined = [OwnedBatchTensor(torch.cat(parts)) if parts else _NO_SAMPLES for parts in waves]
        outputs = {WAVEFORM: joined, SAMPLE_RATE: [self.config.output_sample_rate] * len(joined)}
        return OmniOutput(torch.zeros(len(positions), 1, device=positions.device), outputs if joined else None)

    def _pieces(self, request: int, state: Mapping[str, Any], count: int) -> list[Piece]:
        if CODES_STATE not in state or WINDOW not in state:
            raise MissingStateError("forward", f"{CODES_STATE if WINDOW in state else WINDOW} was never stored")
        frames, context = state[WINDOW]
        codes = state[CODES_STATE]
        if codes.dim() != 2 or codes.shape[1] != self.config.decoder_config.num_quantizers:
            raise ContractError("forward", f"{CODES_STATE} has shape {list(codes.shape)}")
        start = state[NUM_COMPUTED_TOKENS]
        end = min(start + count, len(codes))
        pieces = []
        while start < end:
            window = start // frames * frames
            until = min(window + frames, end)
            pieces.append(Piece(request, max(0, window - context), start, until))
            start = until
        return pieces

    def _decode(self, pieces: Sequence[Piece], codes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Samples of each piece; shorter ones are padded on the right, where the decoder doesn't look."""
        rows = [one[piece.first : piece.end] for piece, one in zip(pieces, codes, strict=True)]
        device = self.decoder.pre_conv.conv.weight.device
        latents = self.decoder.latents(pad_sequence(rows, batch_first=True).to(device).transpose(1, 2))
        # The convolutions get what they can see of the frames before the piece, counted from the window's first one.
        bounds = [(max(0, piece.start - piece.first - self.decoder.reach), piece.end - piece.first) for piece in pieces]
        seen = [row[first:end] for row, (first, end) in zip(latents, bounds, strict=True)]
        samples = self.decoder.samples(pad_sequence(seen, batch_first=True))
        rate = self.decoder.samples_per_frame
        return [
            row[(piece.start - piece.first - first) * rate : (end - first) * rate]
            for row, piece, (first, end) in zip(samples, pieces, bounds, strict=True)
        ]


_NO_SAMPLES = torch.zeros(0)
