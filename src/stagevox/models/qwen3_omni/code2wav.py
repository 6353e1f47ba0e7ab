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

from stagevox.contract import NUM_COMPUTED_TOKENS, SAMPLE_RATE, WAVEFORM, OmniOutput, OwnedBatchTensor
from stagevox.errors import ContractError, MissingStateError

from .config import RATE

CODES_STATE = "codes"
"""State: LongTensor ``[T, Q]``, all frames so far."""

CHUNK_ENDS = "chunk_ends"
"""State: how many frames there were at the end of each chunk so far, a tuple."""

CONTEXT = "context"
"""State: how many frames before a chunk are decoded with it."""


class Span(NamedTuple):
    """A chunk to decode."""

    row: int
    """Whose it is: the request's place in the batch."""
    start: int
    end: int
    context: int
    codes: torch.Tensor
    """``[context + end - start, Q]``"""


def delay(config: Any) -> int:
    """Samples that the net is behind its newest frame: each transposed convolution but the first ones trims a step at each end."""
    rates = tuple(config.upsample_rates)
    return sum(math.prod(rates[index:]) for index in range(len(rates)))


def samples_of(config: Any, frames: int) -> int:
    """Samples of a whole waveform of ``frames`` frames, however it was cut into chunks."""
    return max(0, frames * math.prod([*config.upsample_rates, *config.upsampling_ratios]) - delay(config))


class Qwen3OmniCode2Wav(nn.Module):
    """A generation model over the frames of a request; positions are frames.

    A chunk of frames ``start .. end - 1`` is decoded with up to ``context`` frames before it, as the reference does it. The net
    yields the samples up to ``end * up - delay``: the newest frame's last ones wait for the frame after it. The reference loses
    them at each chunk's end. Here the next chunk begins with them, from its context: all samples but those of the last
    chunk are there, ``T * up - delay`` of them. A chunk is decoded in the step that reaches its last frame, so the
    waveform doesn't depend on how positions were scheduled.
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
        made: list[list[torch.Tensor]] = [[] for _ in model_intermediate_buffer]
        spans = [
            span
            for row, (state, (start, end)) in enumerate(zip(model_intermediate_buffer, request_token_spans, strict=True))
            for span in self._chunks(row, state, end - start)
        ]
        for span, samples in zip(spans, self._decode(spans), strict=True):
            made[span.row].append(samples)
        waveforms = [OwnedBatchTensor(torch.cat(parts)) if parts else _NO_SAMPLES for parts in made]
        outputs = {WAVEFORM: waveforms, SAMPLE_RATE: [RATE] * len(waveforms)}
        return OmniOutput(torch.zeros(len(positions), 1, device=positions.device), outputs if waveforms else None)

    def _chunks(self, row: int, state: Mapping[str, Any], count: int) -> list[Span]:
        """The chunks of a request whose last frame is among the ``count`` positions of this step."""
        first = state[NUM_COMPUTED_TOKENS]
        codes, ends = state.get(CODES_STATE), state.get(CHUNK_ENDS)
        if codes is None or ends is None or state.get(CONTEXT) is None:
            raise MissingStateError("forward", f"{CODES_STATE}, {CHUNK_ENDS} or {CONTEXT} was never stored")
        if len(codes) < first + count or not ends or ends[-1] < first + count:
            raise ContractError("forward", f"{first + count} positions are scheduled, {CODES_STATE} has {len(codes)} frames")
        spans = []
        for start, end in zip((0, *ends), ends, strict=False):
            if first < end <= first + count:
                context = min(state[CONTEXT], start)
                spans.append(Span(row, start, end, context, codes[start - context : end]))
        return spans

    def _decode(self, spans: Sequence[Span]) -> list[torch.Tensor]:
        """Samples of each chunk; those of one length go through the net together."""
        device = self.code2wav.code_embedding.weight.device
        made: list[torch.Tensor] = [_NO_SAMPLES] * len(spans)
        for length in sorted({len(span.codes) for span in spans}):
            alike = [index for index, span in enumerate(spans) if len(span.codes) == length]
            codes = torch.stack([spans[index].codes for index in alike]).transpose(1, 2)
            for index, samples in zip(alike, self.code2wav(codes.to(device))[:, 0], strict=True):
                begin = spans[index].context * self.up - (self.delay if spans[index].start else 0)
                made[index] = samples[begin:].float().clone()
        return made


_NO_SAMPLES = torch.zeros(0)
