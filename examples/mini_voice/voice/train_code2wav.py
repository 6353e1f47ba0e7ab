"""Train Code2Wav on the teacher's codes and waves.

    python train_code2wav.py DATA_FOLDER --minutes 12

Multi-resolution STFT and mel losses, AdamW with a cosine by the clock, bf16 autocast. Writes ``code2wav.pt``.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from code2wav_model import DELAY_SAMPLES, SAMPLES_PER_CODE, WARMUP_CODES, Code2Wav
from features import mel_filters
from torch import Tensor

MEL_BINS = {256: 32, 512: 64, 1024: 80, 2048: 96}
FILTERS = {n: mel_filters(n, bins) for n, bins in MEL_BINS.items()}
WINDOWS = {n: torch.hann_window(n) for n in MEL_BINS}
SKIPPED_CODES = 6  # the net has no left context there
SILENCE_SAMPLE = 500


def magnitudes(wave: Tensor, n_fft: int) -> Tensor:
    return torch.stft(wave, n_fft, n_fft // 4, window=WINDOWS[n_fft], return_complex=True, center=False).abs()


def log_distance(a: Tensor, b: Tensor) -> Tensor:
    return (torch.log(a + 2e-2) - torch.log(b + 2e-2)).abs().mean()


def spectral_loss(wave: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Log magnitude, spectral convergence and twice the log mel distance, over four resolutions; and the mean mel distance."""
    total = mel_total = torch.zeros(())
    for n_fft, filters in FILTERS.items():
        a, b = magnitudes(wave, n_fft), magnitudes(target, n_fft)
        mel = log_distance(filters @ a, filters @ b)
        total = total + log_distance(a, b) + (a - b).norm() / (b.norm() + 1e-3) + 2 * mel
        mel_total = mel_total + mel
    return total, mel_total / len(FILTERS)


def crop(row: dict[str, Any], silence: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """``length`` codes of one utterance (after its warm-up silence) and the samples that the net should give for them."""
    codes, wave = row["codes"].long(), row["wave"].float() / 32768
    samples = len(codes) * SAMPLES_PER_CODE
    wave = F.pad(wave, (DELAY_SAMPLES, max(0, samples - len(wave) - DELAY_SAMPLES)))[:samples]
    codes = torch.cat([silence.repeat(WARMUP_CODES, 1), codes])
    wave = F.pad(wave, (WARMUP_CODES * SAMPLES_PER_CODE, 0))
    start = 0 if random.random() < 0.2 else random.randint(0, max(0, len(codes) - length))
    codes = codes[start : start + length]
    wave = wave[start * SAMPLES_PER_CODE : (start + length) * SAMPLES_PER_CODE]
    if (short := length - len(codes)) > 0:
        codes = torch.cat([codes[:1].repeat(short, 1), codes])
        wave = F.pad(wave, (short * SAMPLES_PER_CODE, 0))
    return codes, wave


def silence_codes(rows: list[dict[str, Any]]) -> Tensor:
    """The most frequent first code of every group."""
    return torch.stack([row["codes"][0].long() for row in rows[:SILENCE_SAMPLE]]).mode(0)[0]


def train(model: Code2Wav, rows: list[dict[str, Any]], a: argparse.Namespace) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=a.rate, betas=(0.8, 0.95), weight_decay=0.01, fused=True)
    start, step = time.time(), 0
    while (done := (time.time() - start) / (a.minutes * 60)) < 1:
        crops = [crop(random.choice(rows), model.silence, a.codes) for _ in range(a.batch)]
        codes, target = torch.stack([c for c, _ in crops]), torch.stack([w for _, w in crops])
        with torch.autocast("cpu", torch.bfloat16):
            wave = model(codes)
        skip = SKIPPED_CODES * SAMPLES_PER_CODE
        loss, mel = spectral_loss(wave[:, skip:], target[:, skip:])
        for group in optimiser.param_groups:
            group["lr"] = a.rate * min(1, (step + 1) / 100) * (0.5 * (1 + math.cos(math.pi * done)) * 0.97 + 0.03)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimiser.step()
        step += 1
        if step % 50 == 0:
            print(f"{step} {time.time() - start:.0f}s loss {loss:.3f} mel {mel:.3f} gradient {norm:.2f}", flush=True)
    print(f"{step} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--codes", type=int, default=30, help="length of a training crop")
    parser.add_argument("--threads", type=int, default=1)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    random.seed(0)
    rows = torch.load(a.folder / "encoded.pt")["train"]
    model = Code2Wav()
    model.silence.copy_(silence_codes(rows))
    print(f"{sum(p.numel() for p in model.parameters())} weights, {len(rows)} utterances, silence {model.silence.tolist()}")
    train(model, rows, a)
    torch.save(model.state_dict(), a.folder / "code2wav.pt")


if __name__ == "__main__":
    main()
