"""Files of bare 16-bit samples: raw, or with a WAV header."""

from __future__ import annotations

import struct

from .check import Samples
from .wav import pcm16

UNKNOWN_SIZE = 0xFFFFFFFF
"""What the sizes in a WAV header say when nobody knows yet: read until the end."""


class PcmCodec:
    """Little-endian 16-bit samples and nothing else."""

    delay = 0

    def write(self, samples: Samples) -> bytes:
        """Bytes of these samples."""
        return pcm16(samples)

    def end(self) -> bytes:
        """Nothing."""
        return b""


class WavCodec:
    """A WAV file: streamed behind a header that knows no sizes, or all at the end behind one that does."""

    delay = 0

    def __init__(self, sample_rate: int, *, streaming: bool) -> None:
        self._rate, self._streaming = sample_rate, streaming
        self._header_due = True
        self._held: list[bytes] = []

    def write(self, samples: Samples) -> bytes:
        """The header, once, and bytes of these samples; nothing if the sizes are awaited."""
        data = pcm16(samples)
        if self._streaming:
            return self._header() + data
        self._held.append(data)
        return b""

    def end(self) -> bytes:
        """What is due: the header if there was no sample, or the whole file."""
        if self._streaming:
            return self._header()
        data = b"".join(self._held)
        return header(self._rate, len(data)) + data

    def _header(self) -> bytes:
        due, self._header_due = self._header_due, False
        return header(self._rate, None) if due else b""


def header(sample_rate: int, size: int | None) -> bytes:
    """The 44 bytes before ``size`` bytes of mono 16-bit samples; None: as many as come."""
    whole, data = (UNKNOWN_SIZE, UNKNOWN_SIZE) if size is None else (36 + size, size)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", whole, b"WAVE") + form + struct.pack("<4sI", b"data", data)
