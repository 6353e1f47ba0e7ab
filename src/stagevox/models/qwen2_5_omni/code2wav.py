"""Code2Wav under the phase contract: each position is a window of frames that becomes samples on its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from stagevox.contract import CODES, NUM_COMPUTED_TOKENS, SAMPLE_RATE, WAVEFORM, OmniOutput, OwnedBatchTensor
from stagevox.errors import ContractError, MissingStateError
from stagevox.models.vocoder import Vocoder

from .config import SAMPLE_RATE as HERTZ
from .declared import BUFFER
from .flow import Condition
from .noise import noise
from .vocoder import Token2Wav

CODES_STATE = "codes"
"""State: LongTensor ``[frames so far]``."""

WINDOWS = "windows"
"""State: a :class:`Window` for each position so far."""

VOICE = "voice"
"""State: ``(cond [1, d], ref_mel [1, frames, mel])`` of the speaker."""

SEED = "seed"
"""State: what the noise is drawn from."""


class Window(NamedTuple):
    """Frames ``[start, end)`` are wanted; the vocoder sees ``[first, last)``, which holds them."""

    first: int
    start: int
    end: int
    last: int

    @property
    def left_context_size(self) -> int:
        """Frames before the wanted ones that the vocoder sees (EX-9)."""
        return self.start - self.first


class Qwen2_5OmniToken2Wav(Vocoder):
    """Positions are windows: one for a whole speech, or one a chunk. What a window yields depends on its frames, the voice and the seed.

    A frame is 480 samples, so windows that follow one another yield ``480 * T`` samples of T frames, none of them twice.
    """

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={BUFFER: None, "token2wav.": "token2wav.", "thinker.": None, "talker.": None}
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(width=1)
        self.config = vllm_config.model_config.hf_config
        self.token2wav = Token2Wav(self.config)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the vocoder's part of the checkpoint."""
        self.token2wav.refresh()
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)

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
        """Each request's samples (``WAVEFORM``, in Hz ``SAMPLE_RATE``) and frames (``CODES``) of its new windows."""
        rows = [
            (state, self._windows(state, end - start))
            for state, (start, end) in zip(model_intermediate_buffer, request_token_spans, strict=True)
        ]
        made = iter(self._samples([(state, window) for state, windows in rows for window in windows]))
        waves: list[Any] = [OwnedBatchTensor(torch.cat([next(made) for _ in windows])) for _, windows in rows]
        frames = [torch.cat([state[CODES_STATE][w.start : w.end] for w in windows]).unsqueeze(1) for state, windows in rows]
        outputs = {WAVEFORM: waves, CODES: frames, SAMPLE_RATE: [HERTZ] * len(waves)}
        return OmniOutput(torch.zeros(len(positions), 1, device=positions.device), outputs if waves else None)

    def _windows(self, state: Mapping[str, Any], count: int) -> Sequence[Window]:
        for key in (CODES_STATE, WINDOWS, VOICE, SEED):
            if key not in state:
                raise MissingStateError("forward", f"{key} was never stored")
        first, windows, frames = state[NUM_COMPUTED_TOKENS], state[WINDOWS], len(state[CODES_STATE])
        if len(windows) < first + count:
            raise ContractError("forward", f"position {first + count - 1} is scheduled, there are {len(windows)} windows")
        wanted: Sequence[Window] = windows[first : first + count]
        for window in wanted:
            if not 0 <= window.first <= window.start < window.end <= window.last <= frames:
                raise ContractError("forward", f"{window} of {frames} frames")
        return wanted

    def _samples(self, windows: Sequence[tuple[Mapping[str, Any], Window]]) -> list[torch.Tensor]:
        """The samples that each window is to yield, ``[480 * wanted frames]``."""
        if not windows:
            return []
        size = self.token2wav.samples_per_code
        waves = self.token2wav([self._condition(state, window) for state, window in windows])
        return [
            wave[(window.start - window.first) * size : (window.end - window.first) * size]
            for (_, window), wave in zip(windows, waves, strict=True)
        ]

    def _condition(self, state: Mapping[str, Any], window: Window) -> Condition:
        net = self.token2wav
        device = net.code2wav_dit_model.proj_out.weight.device
        cond, ref_mel = state[VOICE]
        rows = noise(state[SEED], window.first * net.repeats, window.last * net.repeats, net.mel_dim)
        codes = state[CODES_STATE][window.first : window.last]
        return Condition(codes.to(device), rows.to(device), cond.to(device), ref_mel.to(device))
