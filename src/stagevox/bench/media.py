"""Pictures, sounds and films made from formulas: the same everywhere, with no file to ship."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def tone(seconds: float, pitch: float, rate: int = 16_000) -> NDArray[np.float32]:
    """A rising tone, ``[seconds * rate]`` samples in -0.5..0.5."""
    time = np.arange(int(seconds * rate), dtype=np.float64) / rate
    return (0.5 * np.sin(2 * np.pi * (pitch * time + 40 * time**2))).astype(np.float32)


def picture(width: int, height: int, shade: int = 0) -> NDArray[np.uint8]:
    """Ramps in red and green and a chequered blue, ``[height, width, 3]``; ``shade`` moves the red ramp."""
    down, across = np.mgrid[0:height, 0:width]
    red = (across * 255 // max(width - 1, 1) + shade) % 256
    green = down * 255 // max(height - 1, 1)
    blue = ((across // 8 + down // 8) % 2) * 200
    return np.stack([red, green, blue], axis=-1).astype(np.uint8)


def film(frames: int, width: int, height: int) -> NDArray[np.uint8]:
    """Pictures whose red ramp moves on, ``[frames, height, width, 3]``."""
    return np.stack([picture(width, height, 37 * frame) for frame in range(frames)])
