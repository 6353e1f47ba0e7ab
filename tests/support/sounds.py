"""Sounds to encode, other people's decoders to hear them by, and a measure of the difference."""

from __future__ import annotations

import io

import av
import numpy as np
import soundfile


def voice_like(num_samples, sample_rate, *, pitch=140.0):
    """Harmonics under 3.2 kHz of a gliding pitch, that swell and fade four times a second."""
    seconds = np.arange(num_samples) / sample_rate
    phase = 2 * np.pi * pitch * (seconds + 0.05 * np.sin(2 * np.pi * 3 * seconds))
    sound = sum(np.sin(k * phase + k) / k for k in range(1, int(3200 / pitch)))
    return (0.2 * sound * np.sin(np.pi * 4 * seconds) ** 2).astype(np.float32)


def by_libsndfile(data):
    """Samples and rate, as far as libsndfile knows the format (not AAC)."""
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float64")
    return samples, rate


def by_ffmpeg(data, *, container=None, raw=False):
    """Samples and rate; ``raw``: as the file has them, integers or floats."""
    parts, rate = [], None
    with av.open(io.BytesIO(data), format=container) as file:
        for frame in file.decode(audio=0):
            parts.append(frame.to_ndarray()[0])
            rate = frame.sample_rate
    samples = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    if not raw and samples.dtype == np.int16:
        samples = samples / 32768
    return samples, rate


def snr(expected, heard):
    """dB by which ``expected`` is louder than what differs."""
    assert len(expected) == len(heard)
    noise = np.sum((np.asarray(heard, np.float64) - expected) ** 2)
    return 10 * np.log10(np.sum(np.asarray(expected, np.float64) ** 2) / max(noise, 1e-20))


def pieces(samples, generator, largest=3000):
    """Cut into pieces of random sizes, single samples and empty ones among them."""
    at = 0
    while at < len(samples):
        size = int(generator.choice([0, 1, 2, 7, int(generator.integers(1, largest))]))
        yield samples[at : at + size]
        at += size
