"""Images, sounds and films of a prompt, as vLLM's processors take them, checked at the border."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from stagevox.errors import BadMediaError, BadParameterError

SIDE = 1 << 14
"""The longest side of a picture that is taken, in pixels."""

SECONDS = 3600
"""The longest sound that is taken."""


def read_image(field: str, value: Any) -> Image.Image:
    """A picture: an encoded file as bytes, a PIL image, or an array uint8 ``[height, width, 3]``.

    Raises:
        BadMediaError: it is none of these, damaged, empty or too large; ``field`` is its name.
    """
    try:
        image: Image.Image
        if isinstance(value, bytes):
            image = Image.open(io.BytesIO(value))
        elif isinstance(value, Image.Image):
            image = value
        else:
            image = Image.fromarray(_pixels(value, 3))
        if not 0 < min(image.size) <= max(image.size) <= SIDE:
            raise ValueError(f"{image.width} x {image.height} pixels")
        return image.convert("RGB")
    except (OSError, ValueError, TypeError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadMediaError(field, f"no picture: {error}") from error


def read_audio(field: str, value: Any) -> tuple[np.ndarray, int]:
    """A sound: an encoded file as bytes, an array float ``[samples]`` at 16 kHz, or ``(array, rate)``; ``(samples, rate)``.

    Raises:
        BadMediaError: it is none of these, damaged, silent for want of samples, not finite or too long.
    """
    try:
        if isinstance(value, bytes):
            import soundfile  # type: ignore[import-untyped]  # vLLM brings it

            samples, rate = soundfile.read(io.BytesIO(value), dtype="float32", always_2d=True)
            samples = samples.mean(axis=1)
        else:
            samples, rate = value if isinstance(value, tuple) else (value, 16_000)
        samples = np.asarray(samples, dtype=np.float32)
        if isinstance(rate, bool) or not isinstance(rate, int) or rate < 1:
            raise ValueError(f"a rate of {rate!r} Hz")
        if samples.ndim != 1 or not 0 < len(samples) <= SECONDS * rate:
            raise ValueError(f"samples of shape {list(samples.shape)}")
        if not np.isfinite(samples).all():
            raise ValueError("samples that are no numbers")
        return samples, rate
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise BadMediaError(field, f"no sound: {error}") from error


def read_video(field: str, value: Any) -> np.ndarray:
    """A film: an array uint8 ``[frames, height, width, 3]``.

    Raises:
        BadMediaError: it is no such array, or empty or too large.
    """
    try:
        frames = _pixels(value, 4)
        if not 0 < min(frames.shape[1:3]) <= max(frames.shape[1:3]) <= SIDE:
            raise ValueError(f"frames of shape {list(frames.shape)}")
        return frames
    except (ValueError, TypeError) as error:
        raise BadMediaError(field, f"no film: {error}") from error


READERS: Mapping[str, tuple[str, Callable[[str, Any], Any]]] = {
    "images": ("image", read_image),
    "audios": ("audio", read_audio),
    "videos": ("video", read_video),
}
"""A prompt's keys: what chat templates and vLLM call one of them, and how it is read."""


def read_media(prompt: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The media of a prompt by vLLM's names; kinds without any are left out.

    Raises:
        BadParameterError: a key's value is no sequence.
        BadMediaError: one of the media is damaged; the field is ``images[2]`` for the third picture.
    """
    found: dict[str, list[Any]] = {}
    for key, (kind, read) in READERS.items():
        values = prompt.get(key)
        if values is None:
            continue
        if isinstance(values, str | bytes) or not isinstance(values, Sequence):
            raise BadParameterError(key, f"not a list but a {type(values).__name__}")
        if len(values):
            found[kind] = [read(f"{key}[{index}]", value) for index, value in enumerate(values)]
    return found


def _pixels(value: Any, dims: int) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype != np.uint8 or array.ndim != dims or array.shape[-1] != 3 or not math.prod(array.shape):
        raise ValueError(f"an array of {array.dtype} {list(array.shape)}")
    return array
