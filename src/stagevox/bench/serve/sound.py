"""Bytes of a stream as 16-bit samples, however they are cut."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.int16]
HEADER_BYTES = 1 << 16
"""No header of a WAV is longer."""


class BadAudioError(Exception):
    """What came is no sound that can be counted."""


class Decoder(Protocol):
    """Bytes in, samples out. ``sample_rate`` in Hz, None until it is known."""

    sample_rate: int | None

    def push(self, data: bytes) -> Samples:
        """The samples that these bytes complete."""
        ...

    def finish(self) -> None:
        """Raise :class:`BadAudioError` if the stream ended in the middle of a header or a sample."""
        ...


class PcmDecoder:
    """Raw little-endian samples of a rate that is known."""

    def __init__(self, sample_rate: int) -> None:
        self.sample_rate: int | None = sample_rate
        self._rest = b""

    def push(self, data: bytes) -> Samples:
        """See :class:`Decoder`."""
        data = self._rest + data
        whole = len(data) & ~1
        self._rest = data[whole:]
        return np.frombuffer(data[:whole], "<i2").astype(np.int16)

    def finish(self) -> None:
        """See :class:`Decoder`."""
        if self._rest:
            raise BadAudioError("half a sample at the end")


class WavDecoder:
    """A mono 16-bit WAV whose sizes may be left open, as in a stream."""

    def __init__(self) -> None:
        self.sample_rate: int | None = None
        self._header = b""
        self._pcm: PcmDecoder | None = None

    def push(self, data: bytes) -> Samples:
        """See :class:`Decoder`."""
        if self._pcm is None:
            self._header += data
            start = self._data_start()
            if start is None:
                return np.zeros(0, np.int16)
            assert self.sample_rate is not None
            self._pcm = PcmDecoder(self.sample_rate)
            data, self._header = self._header[start:], b""
        return self._pcm.push(data)

    def finish(self) -> None:
        """See :class:`Decoder`."""
        if self._pcm is None:
            if self._header:
                raise BadAudioError("the WAV ends in its header")
            return
        self._pcm.finish()

    def _data_start(self) -> int | None:
        """Where the samples begin, once the header is there; sets the rate."""
        header = self._header
        if header[:4] != b"RIFF"[: len(header)] or (len(header) >= 12 and header[8:12] != b"WAVE"):
            raise BadAudioError("not a WAV")
        at = 12
        while len(header) >= at + 8:
            name, size = header[at : at + 4], int.from_bytes(header[at + 4 : at + 8], "little")
            if name == b"data":
                if self.sample_rate is None:
                    raise BadAudioError("a WAV without a format")
                return at + 8
            if size > HEADER_BYTES or at > HEADER_BYTES:
                raise BadAudioError("a WAV whose header never ends")
            if name == b"fmt " and len(header) >= at + 8 + 16:
                self._read_format(header[at + 8 : at + 24])
            at += 8 + size + size % 2
        return None

    def _read_format(self, data: bytes) -> None:
        kind, channels = int.from_bytes(data[:2], "little"), int.from_bytes(data[2:4], "little")
        bits = int.from_bytes(data[14:16], "little")
        if (kind, channels, bits) != (1, 1, 16):
            raise BadAudioError(f"not 16-bit mono samples but format {kind}, {channels} channels, {bits} bits")
        self.sample_rate = int.from_bytes(data[4:8], "little")
        if not self.sample_rate:
            raise BadAudioError("a rate of 0 Hz")


def make_decoder(audio_format: str, sample_rate: int | None) -> Decoder:
    """For ``wav`` or ``pcm``; the latter needs a rate in Hz."""
    if audio_format == "wav":
        return WavDecoder()
    assert sample_rate is not None
    return PcmDecoder(sample_rate)
