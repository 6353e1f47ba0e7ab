"""The 12 Hz decoder: codes to samples, causal throughout. Parameters have the published names, below ``decoder.``."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from stagevox.errors import CheckpointError

from .codebooks import SplitQuantizer
from .config import Qwen3TTSDecoderConfig
from .decoder_transformer import DecoderTransformer

DILATIONS = (1, 3, 9)
"""Of the residual units of a block."""

TINY = 1e-9
"""Keeps the snake's divisor from zero."""


class CausalConv(nn.Module):
    """A convolution that looks back only: zeros stand before the start."""

    def __init__(self, size_in: int, size_out: int, kernel: int, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(size_in, size_out, kernel, dilation=dilation, groups=groups)
        self.reach = (kernel - 1) * dilation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, size_in, T]`` to ``[B, size_out, T]``."""
        out: torch.Tensor = self.conv(F.pad(x, (self.reach, 0)))
        return out


class CausalUpsampling(nn.Module):
    """A transposed convolution, of whose output only what no later input touches is kept: T to ``T * stride``."""

    def __init__(self, size_in: int, size_out: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(size_in, size_out, kernel, stride=stride)
        self.stride = stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, size_in, T]`` to ``[B, size_out, T * stride]``."""
        out: torch.Tensor = self.conv(x)[..., : x.shape[-1] * self.stride].contiguous()
        return out


class ConvNeXt(nn.Module):
    """Depthwise convolution, norm and MLP, scaled and added."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(size, size, 7, groups=size)
        self.norm = nn.LayerNorm(size, eps=1e-6)
        self.pwconv1 = nn.Linear(size, 4 * size)
        self.pwconv2 = nn.Linear(4 * size, size)
        self.gamma = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, size, T]`` to the same."""
        y = self.norm(self.dwconv(x).transpose(1, 2))
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))
        return x + y.transpose(1, 2)


class Snake(nn.Module):
    """``x + sin^2(a x) / b`` with a and b of each channel, kept as logarithms (Ziyin et al. 2020, with b apart)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(size))
        self.beta = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, size, T]`` to the same."""
        a, b = self.alpha.exp()[:, None], self.beta.exp()[:, None]
        return (x * a).sin_().pow_(2).mul_(1.0 / (b + TINY)).add_(x)


class ResidualUnit(nn.Module):
    """Two convolutions, each after a snake."""

    def __init__(self, size: int, dilation: int) -> None:
        super().__init__()
        self.act1 = Snake(size)
        self.conv1 = CausalConv(size, size, 7, dilation=dilation)
        self.act2 = Snake(size)
        self.conv2 = CausalConv(size, size, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, size, T]`` to the same."""
        out: torch.Tensor = x + self.conv2(self.act2(self.conv1(self.act1(x))))
        return out


class Block(nn.Module):
    """Upsampling by ``rate`` to half the channels, then residual units."""

    def __init__(self, size: int, rate: int) -> None:
        super().__init__()
        units = [ResidualUnit(size // 2, dilation) for dilation in DILATIONS]
        self.block = nn.Sequential(Snake(size), CausalUpsampling(size, size // 2, 2 * rate, rate), *units)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, size, T]`` to ``[B, size / 2, T * rate]``."""
        out: torch.Tensor = self.block(x)
        return out


class SpeechDecoder(nn.Module):
    """Codes of T frames to ``T * samples_per_frame`` samples; sample by sample, later frames change nothing.

    The transformer looks far back and costs little, the convolutions after it the other way round: of their input no more than
    ``reach`` frames before a frame matter to its samples.
    """

    def __init__(self, config: Qwen3TTSDecoderConfig) -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise CheckpointError("model", f"decoder_config.hidden_act is {config.hidden_act!r}, expected 'silu'")
        latent, book, wide, rates = config.latent_dim, config.codebook_dim, config.decoder_dim, config.upsample_rates
        self.quantizer = SplitQuantizer(config.num_quantizers, config.codebook_size, book // 2, book)
        self.pre_conv = CausalConv(book, latent, 3)
        self.pre_transformer = DecoderTransformer(config)
        self.upsample = nn.ModuleList(
            [
                nn.Sequential(CausalUpsampling(latent, latent, factor, factor), ConvNeXt(latent))
                for factor in config.upsampling_ratios
            ]
        )
        last = wide // 2 ** len(rates)
        self.decoder = nn.Sequential(
            CausalConv(latent, wide, 7),
            *(Block(wide // 2**index, rate) for index, rate in enumerate(rates)),
            Snake(last),
            CausalConv(last, 1, 7),
        )
        self.samples_per_frame = math.prod([*config.upsampling_ratios, *rates])
        self.reach = _reach(config)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """``[B, Q, T]`` to samples ``[B, T * samples_per_frame]`` in [-1, 1]."""
        return self.samples(self.latents(codes))

    def latents(self, codes: torch.Tensor) -> torch.Tensor:
        """``[B, Q, T]`` to what the transformer makes of them, ``[B, T, latent]``."""
        x: torch.Tensor = self.pre_transformer(self.pre_conv(self.quantizer(codes)).transpose(1, 2))
        return x

    def samples(self, latents: torch.Tensor) -> torch.Tensor:
        """``[B, T, latent]`` to samples ``[B, T * samples_per_frame]`` in [-1, 1]."""
        x = latents.transpose(1, 2)
        for part in self.upsample:
            x = part(x)
        samples: torch.Tensor = self.decoder(x).clamp(-1, 1)[:, 0]
        return samples


def _reach(config: Qwen3TTSDecoderConfig) -> int:
    """How many frames of latents before a frame its samples see, followed from the samples back."""
    ago = 6  # positions before the first one of a frame, at the rate of the layer
    for rate in reversed(config.upsample_rates):
        ago = math.ceil((ago + sum(6 * dilation for dilation in DILATIONS)) / rate) + 1
    ago += 6
    for ratio in reversed(config.upsampling_ratios):
        ago = math.ceil((ago + 6) / ratio)
    return ago
