"""What a codec frame hears: log mel energies and pitch of 40 ms (four hops of 10 ms)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

SAMPLE_RATE = 16000
SAMPLES_PER_FRAME = 640
HOP = 160
HOPS_PER_FRAME = SAMPLES_PER_FRAME // HOP
MEL_BINS = 64


def mel_filters(n_fft: int = 512, bins: int = MEL_BINS, low: float = 40, high: float = 8000) -> Tensor:
    """Triangular filters ``[bins, n_fft // 2 + 1]`` on the HTK mel scale."""
    frequency = np.linspace(0, SAMPLE_RATE / 2, n_fft // 2 + 1)
    edges_mel = np.linspace(2595 * np.log10(1 + low / 700), 2595 * np.log10(1 + high / 700), bins + 2)
    edges = 700 * (10 ** (edges_mel / 2595) - 1)
    filters = np.zeros((bins, len(frequency)), np.float32)
    for i in range(bins):
        rising = (frequency - edges[i]) / (edges[i + 1] - edges[i] + 1e-9)
        falling = (edges[i + 2] - frequency) / (edges[i + 2] - edges[i + 1] + 1e-9)
        filters[i] = np.maximum(0, np.minimum(rising, falling))
    return torch.tensor(filters)


_FILTERS = mel_filters()
_PITCH_WINDOW = torch.hann_window(1024)
_PITCH_LAGS = 400
_WINDOW_CORRELATION = torch.fft.irfft(torch.fft.rfft(_PITCH_WINDOW, n=2048).abs() ** 2)[:_PITCH_LAGS]


def _windows(wave: Tensor, size: int, hops: int) -> Tensor:
    """``[hops, size]``, each centred on its hop."""
    return torch.nn.functional.pad(wave, (size // 2 - HOP // 2, size + hops * HOP)).unfold(0, size, HOP)[:hops]


def log_mel(wave: Tensor, hops: int) -> Tensor:
    """``[hops, MEL_BINS]``."""
    spectrum = torch.fft.rfft(_windows(wave, 512, hops) * torch.hann_window(512)).abs()
    return torch.log(torch.clamp(spectrum @ _FILTERS.T, min=5e-2))


def pitch(wave: Tensor, hops: int) -> tuple[Tensor, Tensor]:
    """Pitch in Hz and its strength (0 where it is silent), by the peak of the normalised autocorrelation: 80 to 302 Hz."""
    correlation = torch.fft.irfft(torch.fft.rfft(_windows(wave, 1024, hops) * _PITCH_WINDOW, n=2048).abs() ** 2)[:, :_PITCH_LAGS]
    energy = correlation[:, :1]
    correlation = correlation / (energy + 1e-4) / (_WINDOW_CORRELATION / _WINDOW_CORRELATION[0])
    low, high = 53, 200
    strength, lag = correlation[:, low:high].max(1)
    strength = torch.where(energy[:, 0] < 0.05, torch.zeros_like(strength), strength)
    return SAMPLE_RATE / (lag + low).float(), strength


def frame_features(pcm: np.ndarray) -> tuple[Tensor, Tensor]:
    """Of every frame: four hops of log mel in a row ``[N, 256]`` and the pitch ``[N]``.

    Pitch is the mean over the frame's voiced hops, in octaves from 180 Hz; 0 if none is voiced.
    """
    wave = torch.tensor(pcm.astype(np.float32) / 32768)
    frames = math.ceil(len(wave) / SAMPLES_PER_FRAME)
    hops = HOPS_PER_FRAME * frames
    hertz, strength = pitch(wave, hops)
    voiced = (strength > 0.55).float()
    log_pitch = torch.log2(hertz / 180) * voiced
    mean = log_pitch.view(frames, HOPS_PER_FRAME).sum(1) / voiced.view(frames, HOPS_PER_FRAME).sum(1).clamp(min=1)
    return log_mel(wave, hops).reshape(frames, HOPS_PER_FRAME * MEL_BINS), mean
