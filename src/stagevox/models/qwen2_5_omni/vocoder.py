"""Codes to samples: flow matching and BigVGAN over the parameters of ``transformers``, from noise that the caller hands in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniToken2WavBigVGANModel,
    Qwen2_5OmniToken2WavDiTModel,
)

from .bigvgan import BigVGAN
from .flow import Blocks, Condition, Flow

STEPS = 10
"""Points in time, both ends included."""

GROUP = 512
"""Frames of mel spectrogram that a net takes at once: more are no faster on a CPU, and BigVGAN's published sizes take 0.2 MB each."""


def times() -> torch.Tensor:
    """``1 - cos(pi t / 2)`` of ten even points from 0 to 1, as the reference adds it up."""
    even = torch.linspace(0, 1, STEPS)
    return even - (torch.cos(torch.pi / 2 * even) - 1 + even)


def integrate(flow: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Follow ``flow(t, x)`` through the points ``at``: Runge and Kutta's fourth order by the 3/8 rule."""
    third, two_thirds = 1 / 3, 2 / 3
    for start, end in pairwise(at):
        step = end - start
        k1 = flow(start, x)
        k2 = flow(start + step * third, x + step * k1 * third)
        k3 = flow(start + step * two_thirds, x + step * (k2 - k1 * third))
        k4 = flow(end, x + step * (k1 - k2 + k3))
        x = x + (k1 + 3 * (k2 + k3) + k4) * step / 8
    return x


def alike(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Indices of equal lengths together, in groups of up to ``most`` in all; a longer one is alone."""
    groups: list[list[int]] = []
    last: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        group = last.get(length)
        if group is None or (len(group) + 1) * length > most:
            group = last[length] = []
            groups.append(group)
        group.append(index)
    return groups


class Token2Wav(nn.Module):
    """Both nets; parameter names are those of the checkpoint. Always float32, as the reference demands."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.code2wav_dit_model = Qwen2_5OmniToken2WavDiTModel._from_config(config.dit_config)
        self.code2wav_bigvgan_model = Qwen2_5OmniToken2WavBigVGANModel._from_config(config.bigvgan_config)
        self.repeats: int = config.dit_config.repeats
        self.mel_dim: int = config.dit_config.mel_dim
        self.num_codes: int = config.dit_config.num_embeds + 1
        self.block: int = config.dit_config.block_size
        self.samples_per_code: int = self.repeats * math.prod(config.bigvgan_config.upsample_rates)
        self._flow: Flow | None = None
        self._bigvgan: BigVGAN | None = None
        self.float().eval().requires_grad_(False)

    def forward(self, windows: Sequence[Condition]) -> list[torch.Tensor]:
        """Each window's ``[T * 480]`` samples."""
        if self._bigvgan is None:
            self._bigvgan = BigVGAN(self.code2wav_bigvgan_model)
        mels = self.mels(windows)
        waves: dict[int, torch.Tensor] = {}
        for group in alike([len(mel) for mel in mels], GROUP):
            made = self._bigvgan(torch.stack([mels[index].T for index in group]))
            waves.update(zip(group, made.unbind(), strict=True))
        return [waves[index] for index in range(len(mels))]

    def mels(self, windows: Sequence[Condition]) -> list[torch.Tensor]:
        """Each window's mel spectrogram ``[T * repeats, mel]``; up to ``GROUP`` frames in one flow, of windows of any length."""
        if self._flow is None:
            self._flow = Flow(self.code2wav_dit_model, self.block)
        mels: list[torch.Tensor] = []
        while len(mels) < len(windows):
            ends = list(accumulate(len(window.noise) for window in windows[len(mels) :]))
            count = max(1, sum(end <= GROUP for end in ends))
            mels += self._mels(self._flow, windows[len(mels) : len(mels) + count])
        return mels

    def _mels(self, flow: Flow, windows: Sequence[Condition]) -> list[torch.Tensor]:
        blocks = Blocks([len(window.noise) for window in windows], self.block, windows[0].noise.device)
        start = windows[0].noise.new_zeros(blocks.rows, self.mel_dim)
        for window, (first, last) in zip(windows, blocks.spans, strict=True):
            start[first:last] = window.noise
        mel = integrate(flow.of(windows, blocks), start, times())
        return [mel[first:last] for first, last in blocks.spans]

    def refresh(self) -> None:
        """Forget what was made of the weights: they have changed."""
        self._flow = self._bigvgan = None
