"""Code2Wav: the vocoder of ``transformers``, chunk by chunk, without the gaps that chunks leave in the reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from stagevox.contract import NUM_COMPUTED_TOKENS, SAMPLE_RATE, WAVEFORM, OmniOutput
from stagevox.errors import ContractError, MissingStateError

from .config import RATE
from .upsampler import Part, Rows, parts_of, samples

CODES_STATE = "codes"
"""State: LongTensor ``[T, Q]``, all frames so far."""

WINDOW = "window"
"""State: ``(frames, left context)`` of the windows that samples are decoded in."""


class Piece(NamedTuple):
    """Frames ``start .. end - 1`` of one window of a request, decoded from frame ``first`` on."""

    request: int
    first: int
    start: int
    end: int


def delay(config: Any) -> int:
    """Samples that the net is behind its newest frame: each transposed convolution but the first ones trims a step at each end."""
    rates = tuple(config.upsample_rates)
    return sum(math.prod(rates[index:]) for index in range(len(rates)))


def samples_of(config: Any, frames: int) -> int:
    """Samples of a whole waveform of ``frames`` frames, however it was cut into chunks."""
    return max(0, frames * math.prod([*config.upsample_rates, *config.upsampling_ratios]) - delay(config))


class Qwen3OmniCode2Wav(nn.Module):
    """A generation model over the frames of a request; positions are frames.

    Frame p belongs to window ``p // frames``, which is decoded with up to ``context`` frames before it, as the reference decodes
    its chunks. The net is ``delay`` samples behind: what it makes of frames up to p ends at ``(p + 1) * up - delay``. At the end of
    each chunk the reference loses the rest; here the next window begins with it, from its context, so that of T frames all
    but the last ``delay`` samples are there: ``T * up - delay``. Samples are a function of the request's codes and their place: however
    frames come and however a step is cut, they are the same (to about 1e-6: other shapes add up in another order).
    """

    is_attention_free: ClassVar[Literal[True]] = True

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"talker.": None, "thinker.": None})

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.code2wav = Qwen3OmniMoeCode2Wav(config).requires_grad_(False).eval()
        self.config = config
        self.up = math.prod([*config.upsample_rates, *config.upsampling_ratios])
        self.delay = delay(config)
        self.parts: list[Part] | None = None

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Zeros ``[n, H]``: ids only hold places, the frames are in the request's state."""
        return torch.zeros(len(input_ids), self.config.hidden_size, device=input_ids.device)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """There are none; vLLM's profiling asks for their shape."""
        return hidden_states.new_zeros(len(hidden_states), 1)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load ``code2wav.*``."""
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
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
        """Samples of the chunks that end in this step: ``WAVEFORM`` one tensor a request, ``SAMPLE_RATE`` in Hz."""
        pieces = [
            piece
            for index, (state, (start, end)) in enumerate(zip(model_intermediate_buffer, request_token_spans, strict=True))
            for piece in self._pieces(index, state, end - start)
        ]
        made: list[list[torch.Tensor]] = [[] for _ in model_intermediate_buffer]
        if pieces:
            codes = [model_intermediate_buffer[piece.request][CODES_STATE][piece.first : piece.end] for piece in pieces]
            for piece, samples in zip(pieces, self._decode(pieces, codes), strict=True):
                made[piece.request].append(samples)
        waveforms = [torch.cat(parts) if parts else _NO_SAMPLES for parts in made]
        outputs = {WAVEFORM: waveforms, SAMPLE_RATE: [RATE] * len(waveforms)}
        return OmniOutput(torch.zeros(len(positions), 1, device=positions.device), outputs if waveforms else None)

    def _pieces(self, request: int, state: Mapping[str, Any], count: int) -> list[Piece]:
        """The ``count`` positions of a request, window by window."""
        codes, window = state.get(CODES_STATE), state.get(WINDOW)
        if codes is None or window is None:
            raise MissingStateError("forward", f"{CODES_STATE if codes is None else WINDOW} was never stored")
        (frames, context), start = window, state[NUM_COMPUTED_TOKENS]
        end = start + count
        if len(codes) < end:
            raise ContractError("forward", f"positions up to {end} are scheduled, {CODES_STATE} has {len(codes)} frames")
        pieces = []
        while start < end:
            begin = start // frames * frames
            until = min(begin + frames, end)
            pieces.append(Piece(request, max(0, begin - context), start, until))
            start = until
        return pieces

    def _decode(self, pieces: Sequence[Piece], codes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Samples of each piece. On a GPU all in one call, shorter ones padded on the right, where the net doesn't look."""
        together = self.code2wav.code_embedding.weight.is_cuda
        groups = [list(range(len(pieces)))] if together else [[index] for index in range(len(pieces))]
        return [made for group in groups for made in self._together([pieces[i] for i in group], [codes[i] for i in group])]

    def _together(self, pieces: Sequence[Piece], codes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        net = self.code2wav
        rows = nn.utils.rnn.pad_sequence(list(codes), batch_first=True).to(net.code_embedding.weight.device)
        hidden = net.code_embedding(rows.transpose(1, 2) + net.code_offset).mean(1)
        hidden = net.pre_transformer(inputs_embeds=hidden).last_hidden_state
        if self.parts is None:
            self.parts = parts_of(net)
        # Where in its window each piece's samples begin and end. Attention sees the whole window, convolutions a few frames of it.
        bounds = [
            [max(0, frame * self.up - self.delay) - piece.first * self.up for frame in (piece.start, piece.end)]
            for piece in pieces
        ]
        asked = [Rows(row[: len(each)], start) for row, each, (start, _) in zip(hidden, codes, bounds, strict=True)]
        made = samples(self.parts, asked)
        return [row[: end - start] for row, (start, end) in zip(made, bounds, strict=True)]


_NO_SAMPLES = torch.zeros(0)
