"""Code2Wav: the vocoder of ``transformers``, chunk by chunk, without the gaps that chunks leave in the reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from stagevox.models.windows import Piece, WindowedVocoder

from .config import RATE
from .upsampler import Part, Rows, parts_of, samples


def delay(config: Any) -> int:
    """Samples that the net is behind its newest frame: each transposed convolution but the first ones trims a step at each end."""
    rates = tuple(config.upsample_rates)
    return sum(math.prod(rates[index:]) for index in range(len(rates)))


def samples_of(config: Any, frames: int) -> int:
    """Samples of a whole waveform of ``frames`` frames, however it was cut into chunks."""
    return max(0, frames * math.prod([*config.upsample_rates, *config.upsampling_ratios]) - delay(config))


class Qwen3OmniCode2Wav(WindowedVocoder):
    """A generation model over the frames of a request, in the reference's windows.

    The net is ``delay`` samples behind: what it makes of frames up to p ends at ``(p + 1) * up - delay``. At the end of
    each chunk the reference loses the rest; here the next window begins with it, from its context, so that of T frames all
    but the last ``delay`` samples are there: ``T * up - delay``.
    """

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"talker.": None, "thinker.": None})

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        super().__init__(config.hidden_size, config.num_quantizers, RATE)
        self.code2wav = Qwen3OmniMoeCode2Wav(config).requires_grad_(False).eval()
        self.up = math.prod([*config.upsample_rates, *config.upsampling_ratios])
        self.delay = delay(config)
        self.parts: list[Part] | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load ``code2wav.*``."""
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
        return loaded

    def decode(self, pieces: Sequence[Piece], codes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
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
