"""The vocoder's memory doesn't grow with the shapes it has seen: code that oneDNN generates for them is kept for few."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).resolve().parents[3] / "src"
PROGRAM = """
from stagevox.config.env import FEW_KERNELS, prepare_inline_process

prepare_inline_process(FEW_KERNELS)

import torch

from stagevox.models.mini.code2wav import MiniCode2WavNet, Span
from stagevox.models.mini.config import MiniCode2WavConfig


def resident():
    with open("/proc/self/status") as status:
        return int(status.read().split("RssAnon:")[1].split()[0]) / 1024


config = MiniCode2WavConfig()
net = MiniCode2WavNet(config)
for parameter in net.parameters():
    torch.nn.init.normal_(parameter, std=0.02)
codes = torch.zeros(60, len(config.codebook_sizes), dtype=torch.long)
with torch.inference_mode():
    for count in (16, 1):  # the largest first: what is grown for it stays
        net([Span(20, 40, codes)] * count)
    before = resident()
    for frames in range(4, 21, 4):
        for count in range(1, 17):
            net([Span(20, 20 + frames, codes)] * count)
print(resident() - before)
"""


def growth(**environment):
    """MiB that 80 shapes take."""
    inherited = {name: value for name, value in os.environ.items() if name != "ONEDNN_PRIMITIVE_CACHE_CAPACITY"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, env={**inherited, "PYTHONPATH": str(SRC), **environment}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1])


def test_new_shapes_take_no_memory_for_good():
    kept = growth(ONEDNN_PRIMITIVE_CACHE_CAPACITY="1024")
    assert kept > 60, "oneDNN's own setting keeps them all: else this shows nothing"
    assert growth() < kept / 2
