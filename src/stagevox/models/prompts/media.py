"""Images, sounds and videos as a caller may hand them over, checked before any engine sees them."""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagevox.audio.filters import resampled
from stagevox.errors import BadMediaError, BadParameterError
from stagevox.images import open_image

from ..checkpoint import integer, read_json

FIELDS = {"images": "image", "audios": "audio", "videos": "video"}
"""The prompt's keys, and what vLLM calls the kind of media."""

MAX_SIDE = 1 << 14
"""Pixels."""

USUAL_RATE = 16_000
"""Hz of the sounds that models hear."""

LOUDEST = 1e6
"""Largest sample. Louder than full scale is the caller's affair, but the power of what is far beyond it is no float32 any more."""


def sound_rate(checkpoint: Path) -> int:
    """Samples a second, in Hz, of the sounds that a model hears: what its preprocessor says, or what it takes if that is silent."""
    path = checkpoint / "preprocessor_config.json"
    return integer(path, {"sampling_rate": USUAL_RATE, **read_json(path)}, "sampling_rate")


def read_media(prompt: Mapping[str, Any], rate: int) -> dict[str, list[Any]]:
    """The media of a prompt by kind, in the order they were given; kinds without any are left out.

    ``rate`` is the model's, of sounds; those of another one are brought to it.

    ``images`` are ``[height, width, 3]`` of uint8, PIL images or the bytes of an image file (of
    :data:`stagevox.images.IMAGE_FORMATS`); ``audios`` are float samples ``[n]`` at the model's rate, pairs ``(samples, Hz)`` or
    the bytes of a 16-bit WAV file; ``videos`` are ``[frames, height, width, 3]`` of uint8.

    Raises:
        BadMediaError: one of them is empty, damaged or of no known kind; the field says which one.
        BadParameterError: a field is no sequence.
    """
    found: dict[str, list[Any]] = {}
    for field, kind in FIELDS.items():
        given = prompt.get(field)
        if given is None:
            continue
        if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
            raise BadParameterError(field, f"not a sequence but a {type(given).__name__}")
        items = [_read(kind, f"{field}[{index}]", item, rate) for index, item in enumerate(given)]
        if items:
            found[kind] = items
    return found


def _image(field: str, given: Any) -> NDArray[np.uint8]:
    from PIL import Image

    if isinstance(given, bytes):
        try:
            with open_image(given, field) as image:
                given = image.convert("RGB")
        except BadMediaError:
            raise
        except Exception as error:  # whatever the decoder of some format trips over
            raise BadMediaError(field, f"no image: {type(error).__name__}") from error
    elif isinstance(given, Image.Image):
        try:
            given = given.convert("RGB")
        except Exception as error:  # a lazy image is decoded only now
            raise BadMediaError(field, f"no whole image: {type(error).__name__}") from error
    return _pixels(field, given, 3)


def _pixels(field: str, given: Any, dims: int) -> NDArray[np.uint8]:
    try:
        pixels = np.asarray(given)
    except Exception as error:
        raise BadMediaError(field, f"no pixels but a {type(given).__name__}") from error
    axes = "frames x height x width x 3" if dims == 4 else "height x width x 3"
    if pixels.dtype != np.uint8 or pixels.ndim != dims or pixels.shape[-1] != 3:
        raise BadMediaError(field, f"shape {list(pixels.shape)} of {pixels.dtype}, expected {axes} of uint8")
    if not pixels.size or max(pixels.shape[-3:-1]) > MAX_SIDE:
        raise BadMediaError(field, f"shape {list(pixels.shape)}: sides must be 1 to {MAX_SIDE}")
    return pixels


def _audio(field: str, given: Any, wanted: int) -> NDArray[np.float32]:
    rate: Any = wanted
    if isinstance(given, bytes):
        given, rate = _wav(field, given)
    elif isinstance(given, tuple):
        try:
            given, rate = given
        except ValueError:
            raise BadMediaError(field, f"{len(given)} values, expected samples and their rate in Hz") from None
    if isinstance(rate, bool) or not isinstance(rate, int | float | np.number) or not 1000 <= rate <= 400_000:
        raise BadMediaError(field, f"a sample rate of {rate!r} Hz")
    try:
        samples = np.asarray(given)
    except Exception as error:
        raise BadMediaError(field, f"no samples but a {type(given).__name__}") from error
    if samples.ndim != 1 or samples.dtype.kind != "f":
        raise BadMediaError(field, f"shape {list(samples.shape)} of {samples.dtype}, expected one axis of floats")
    if not samples.size:
        raise BadMediaError(field, "no samples")
    if not np.isfinite(samples).all():
        raise BadMediaError(field, "samples that are no numbers")
    if np.abs(samples).max() > LOUDEST:
        raise BadMediaError(field, f"samples beyond {LOUDEST:g}: they belong into -1 to 1")
    # vLLM would do it with torchaudio, which is no dependency of ours.
    return resampled(np.ascontiguousarray(samples, np.float32), round(rate), wanted)


def _wav(field: str, data: bytes) -> tuple[NDArray[np.float32], int]:
    try:
        with wave.open(io.BytesIO(data)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            frames = file.readframes(file.getnframes())
    except (wave.Error, EOFError, OSError, ValueError) as error:
        raise BadMediaError(field, f"no WAV file: {str(error) or type(error).__name__}") from error
    if width != 2:
        raise BadMediaError(field, f"a WAV file of {8 * width}-bit samples, expected 16-bit ones")
    samples = np.frombuffer(frames[: len(frames) // (2 * channels) * 2 * channels], "<i2").reshape(-1, channels)
    return samples.mean(axis=1, dtype=np.float32) / 32768.0, rate


def _read(kind: str, field: str, given: Any, rate: int) -> NDArray[Any]:
    if kind == "image":
        return _image(field, given)
    return _audio(field, given, rate) if kind == "audio" else _pixels(field, given, 4)
