"""Samples to the bytes of an audio file, piece by piece, in the formats of OpenAI's interfaces."""

from __future__ import annotations

from typing import Any, Protocol

from stagevox.errors import BadParameterError, ClosedError, ConfigError

from .check import Samples, as_samples, saturated
from .codecs import SPECS, Mp3Codec, MuxedCodec
from .filters import Resampler
from .plain import PcmCodec, WavCodec

MIME_TYPES = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "pcm16": "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}
"""The formats and what HTTP calls them. ``pcm`` and ``pcm16`` are one: little-endian, no header."""
LOWEST_RATE, HIGHEST_RATE = 4_000, 192_000


class AudioEncoder(Protocol):
    """Turns mono samples into one file: what ``push`` and ``finish`` return, joined, is that file.

    The bytes depend on the samples alone, not on how they were cut into pieces. What is outside [-1, 1] is clamped.
    An encoder belongs to one request and is used by one thread at a time; dropping it half-way is fine.
    """

    format: str
    mime: str
    sample_rate: int
    """Hz, of the file."""
    delay: int
    """Samples (at the file's rate) that players put out before the first of the sound: 0 wherever the file can tell them."""

    def push(self, samples: Any) -> bytes:
        """Take samples ``[samples]`` (an array or CPU tensor) and return the bytes that are ready.

        Raises:
            SamplesError: not one-dimensional, or not finite; none of them is taken.
            ClosedError: after ``finish``.
        """
        ...

    def finish(self) -> bytes:
        """Return the rest of the file; of no samples at all it is still one that plays (nothing).

        Raises:
            ClosedError: called twice.
        """
        ...


class _Codec(Protocol):
    delay: int

    def write(self, samples: Samples) -> bytes: ...

    def end(self) -> bytes: ...


def check_format(name: Any, field: str = "response_format") -> str:
    """``name``, if it is one of :data:`MIME_TYPES`.

    Raises:
        BadParameterError: it isn't, to the letter; ``field`` is its name.
    """
    if not isinstance(name, str) or name not in MIME_TYPES:
        raise BadParameterError(field, f"unsupported audio format {name!r}", list(MIME_TYPES))
    return name


def make_encoder(
    name: str, sample_rate: int, *, streaming: bool = True, encoded_rate: int | None = None, field: str = "response_format"
) -> AudioEncoder:
    """An encoder to the format ``name`` of samples at ``sample_rate`` Hz.

    ``streaming`` hands bytes out as early as the format allows; then headers leave open what isn't known yet: the sizes of
    ``wav``, the length of ``flac``, and ``mp3`` has none to name its delay and padding. Otherwise headers are exact, and files
    of these formats come whole at the end.

    ``encoded_rate`` is the rate wished for the file, by default that of the samples. The file's own, ``sample_rate`` of the
    encoder, is another only where the codec lacks it: then the next higher one.

    Raises:
        BadParameterError: no such format.
        ConfigError: a rate out of range.
    """
    check_format(name, field)
    for rate_field, rate in (("sample_rate", sample_rate), ("encoded_rate", encoded_rate or sample_rate)):
        if not LOWEST_RATE <= rate <= HIGHEST_RATE:
            raise ConfigError(rate_field, f"{rate} Hz is not from {LOWEST_RATE} to {HIGHEST_RATE}")
    return _Encoder(name, sample_rate, encoded_rate or sample_rate, streaming)


class _Encoder:
    def __init__(self, name: str, source_rate: int, wanted_rate: int, streaming: bool) -> None:
        self.format, self.mime = name, MIME_TYPES[name]
        self.sample_rate = SPECS[name].rate_for(wanted_rate) if name in SPECS else wanted_rate
        self._resampler = Resampler(source_rate, self.sample_rate) if source_rate != self.sample_rate else None
        self._codec = _make_codec(name, self.sample_rate, streaming)
        self.delay = self._codec.delay
        self._open = True

    def push(self, samples: Any) -> bytes:
        chunk = as_samples(samples)
        if not self._open:
            raise ClosedError("samples after the end of the file")
        chunk = saturated(chunk)
        # Between samples within [-1, 1] the sound itself may go beyond: clamped once more.
        return self._codec.write(saturated(self._resampler.push(chunk)) if self._resampler else chunk)

    def finish(self) -> bytes:
        if not self._open:
            raise ClosedError("the file has ended already")
        self._open = False
        rest = self._codec.write(saturated(self._resampler.finish())) if self._resampler else b""
        return rest + self._codec.end()


def _make_codec(name: str, sample_rate: int, streaming: bool) -> _Codec:
    if name == "wav":
        return WavCodec(sample_rate, streaming=streaming)
    if name in ("pcm", "pcm16"):
        return PcmCodec()
    if name == "mp3":
        return Mp3Codec(sample_rate, streaming=streaming)
    return MuxedCodec(name, sample_rate, streaming=streaming)


def encoded(name: str, samples: Any, sample_rate: int, **options: Any) -> bytes:
    """A complete file with exact sizes; the options and errors of :func:`make_encoder`."""
    encoder = make_encoder(name, sample_rate, streaming=False, **options)
    return encoder.push(samples) + encoder.finish()
