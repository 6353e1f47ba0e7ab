"""WAV files of 16-bit samples with true sizes, complete or not there at all."""

from __future__ import annotations

import io
import os
import wave
from pathlib import Path

import numpy as np

from stagevox.errors import ConfigError

from .check import Samples


def pcm16(samples: Samples) -> bytes:
    """Little-endian 16-bit samples; what is outside [-1, 1] is clamped."""
    return np.rint(np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2").tobytes()


def wav_bytes(samples: Samples, sample_rate: int) -> bytes:
    """A mono WAV file of ``samples [samples]``; ``sample_rate`` in Hz."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(pcm16(samples))
    return buffer.getvalue()


def check_writable(field: str, path: Path) -> None:
    """Check that :func:`write_whole` can write ``path``, leaving nothing behind.

    Raises:
        ConfigError: it can't; ``field`` is its name.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise IsADirectoryError("a folder, not a file")
        if not target.exists() or target.is_file():
            part = _part(target)
            with part.open("xb"):
                pass
            part.unlink()
        elif not os.access(target, os.W_OK):
            raise PermissionError("not writable")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(field, f"can't write {str(path)!r}: {reason}") from None


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that nobody ever sees half of it: beside its place, then renamed. Devices are written straight."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            file.write(data)
        return
    part = _part(target)
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _part(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.part")
