"""Samples on their way to a client: tempo, rate, format."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stagevox.audio.check import Samples, as_samples
from stagevox.audio.encode import HIGHEST_RATE, LOWEST_RATE, check_format, make_encoder
from stagevox.audio.tempo import Tempo, check_speed
from stagevox.errors import BadRequestError

from .errors import as_api_error, refused

OPENAI_PCM_RATE = 24_000
"""Hz of OpenAI's pcm: it has no header to say so, and clients rely on it."""
RAW = ("pcm", "pcm16")
LIGHT = ("wav", *RAW)
"""Formats that cost nothing to make; the others are made in a thread."""


def check_sound(name: str, rate: int | None, speed: float | None, param: Callable[[str], str]) -> None:
    """Check what a client asked for; ``param`` gives its names.

    Raises:
        ApiError: 400, a format, rate or speed that can't be.
    """
    try:
        check_format(name, param("format"))
        check_speed(1.0 if speed is None else speed, param("speed"))
    except BadRequestError as error:
        raise as_api_error(error) from error
    if rate is not None and not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise refused(param("sample_rate"), f"{rate} is not from {LOWEST_RATE} to {HIGHEST_RATE}")


class Sound:
    """One choice's speech as the bytes of one file. ``streaming`` hands them out early, with headers that leave sizes open."""

    def __init__(self, name: str, model_rate: int, rate: int | None, speed: float | None, *, streaming: bool) -> None:
        wanted = rate or (OPENAI_PCM_RATE if name in RAW else None)
        self._encoder = make_encoder(name, model_rate, streaming=streaming, encoded_rate=wanted)
        self._tempo = Tempo(model_rate, speed) if speed not in (None, 1.0) else None
        self._light = name in LIGHT and self._tempo is None
        self.mime = self._encoder.mime
        self.sample_rate = self._encoder.sample_rate
        """Hz of the file."""

    async def push(self, samples: Samples) -> bytes:
        """The bytes that are ready after these samples."""
        return self._push(samples) if self._light else await asyncio.to_thread(self._push, samples)

    async def finish(self) -> bytes:
        """The rest of the file."""
        return self._finish() if self._light else await asyncio.to_thread(self._finish)

    def _push(self, samples: Samples) -> bytes:
        return self._encoder.push(self._tempo.push(samples) if self._tempo else as_samples(samples))

    def _finish(self) -> bytes:
        rest = self._encoder.push(self._tempo.finish()) if self._tempo else b""
        return rest + self._encoder.finish()
