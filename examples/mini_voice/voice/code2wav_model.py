"""Code2Wav: a causal ConvNeXt from 25 frames to 100 hops a second, then an inverse STFT (640 samples, hop 160).

Its output is one code (640 samples) late. Parameters carry the names of the checkpoint.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N_FFT = 640
HOP = 160
SAMPLES_PER_CODE = 640
DELAY_SAMPLES = 640
WARMUP_CODES = 8
LEFT_CONTEXT_CODES = 16
UPSAMPLE = SAMPLES_PER_CODE // HOP
OVERLAP_GAIN = 1.5
CODEBOOK_SIZES = (512, 256, 256, 256)


class Block(nn.Module):
    """ConvNeXt block: causal depthwise convolution, norm, two linear layers, scaled residual."""

    def __init__(self, size: int, feed_forward: int, kernel: int) -> None:
        super().__init__()
        self.kernel = kernel
        self.dw = nn.Conv1d(size, size, kernel, groups=size)
        self.norm = nn.LayerNorm(size)
        self.fc1 = nn.Linear(size, feed_forward)
        self.fc2 = nn.Linear(feed_forward, size)
        self.scale = nn.Parameter(torch.full((size,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.dw(F.pad(x.transpose(1, 2), (self.kernel - 1, 0))).transpose(1, 2)
        return x + self.scale * self.fc2(F.gelu(self.fc1(self.norm(y))))


class Code2Wav(nn.Module):
    """``forward(codes [B, T, 4])`` -> samples ``[B, T * 640]``; sample n depends on codes up to n // 640 only."""

    def __init__(
        self, embedding: int = 256, hidden: int = 192, pre_layers: int = 2, pre_kernel: int = 5, pre_ff: int = 512,
        post_layers: int = 4, post_kernel: int = 7, post_ff: int = 448,
    ) -> None:  # fmt: skip
        super().__init__()
        self.hidden = hidden
        self.embedding = nn.ParameterList(nn.Parameter(torch.randn(size, embedding) * 0.5) for size in CODEBOOK_SIZES)
        self.pre = nn.ModuleList(Block(embedding, pre_ff, pre_kernel) for _ in range(pre_layers))
        self.up = nn.Linear(embedding, UPSAMPLE * hidden)
        self.post = nn.ModuleList(Block(hidden, post_ff, post_kernel) for _ in range(post_layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, N_FFT + 2)
        nn.init.normal_(self.head.weight, std=0.02)
        self.register_buffer("window", torch.hann_window(N_FFT), persistent=False)
        self.register_buffer("silence", torch.zeros(len(CODEBOOK_SIZES), dtype=torch.long))

    def spectrum(self, codes: Tensor) -> Tensor:
        """Log magnitudes and phases ``[B, 4 T, 642]``."""
        x = torch.stack([F.embedding(codes[..., q], table) for q, table in enumerate(self.embedding)]).sum(0)
        for block in self.pre:
            x = block(x)
        batch, length, _ = x.shape
        x = self.up(x).view(batch, length * UPSAMPLE, self.hidden)
        for block in self.post:
            x = block(x)
        return self.head(self.norm(x)).float()

    def forward(self, codes: Tensor) -> Tensor:
        magnitude, phase = self.spectrum(codes).chunk(2, -1)
        magnitude = torch.exp(magnitude.clamp(max=5.0) - 1)
        frames = torch.fft.irfft(torch.complex(magnitude * phase.cos(), magnitude * phase.sin()), n=N_FFT) * self.window
        batch, hops, _ = frames.shape
        length = N_FFT + (hops - 1) * HOP
        wave = F.fold(frames.transpose(1, 2), (1, length), (1, N_FFT), stride=(1, HOP)).reshape(batch, -1)
        return wave[:, : hops * HOP] / OVERLAP_GAIN

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """The wave of one utterance ``[T, 4]``, on time: silence warms the net up and flushes it."""
        codes = torch.cat([self.silence.repeat(WARMUP_CODES, 1), codes, self.silence[None]])
        return self(codes[None])[0][WARMUP_CODES * SAMPLES_PER_CODE + DELAY_SAMPLES :]
