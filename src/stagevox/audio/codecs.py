"""Compressed formats, by FFmpeg's encoders and muxers. Mono; each encoder takes frames of its own size and runs alone."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from .check import Samples
from .mp3_info import DECODER_DELAY, info_frame
from .wav import pcm16

if TYPE_CHECKING:
    from av import AudioCodecContext, Packet


@dataclass(frozen=True)
class CodecSpec:
    """What FFmpeg calls a codec and its container, and what it can do."""

    encoder: str
    container: str | None
    sample_format: str
    rates: tuple[int, ...] = ()
    """Hz, ascending; empty: any."""

    def rate_for(self, wanted: int) -> int:
        """The rate itself, else the next higher one, else the highest."""
        if not self.rates or wanted in self.rates:
            return wanted
        return next((rate for rate in self.rates if rate > wanted), self.rates[-1])


_MPEG = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
SPECS = {
    "flac": CodecSpec("flac", "flac", "s16"),
    "mp3": CodecSpec("libmp3lame", None, "fltp", _MPEG),
    "opus": CodecSpec("libopus", "ogg", "flt", (8000, 12000, 16000, 24000, 48000)),
    "aac": CodecSpec("aac", "adts", "fltp", _MPEG),
}


def bit_rate(name: str, sample_rate: int) -> int | None:
    """Bits per second: high for one voice, within what the codec allows at this rate. None: lossless."""
    if name == "flac":
        return None
    highest = 96_000 if name == "aac" or sample_rate >= 32_000 else 64_000
    return highest if name == "opus" else min(highest, 4 * sample_rate)


class _Framed:
    """An encoder fed with frames of exactly its size (the last may be shorter): how samples were pushed leaves no trace.

    ``lead`` samples of silence come first.
    """

    def __init__(self, name: str, context: AudioCodecContext, sample_rate: int, lead: int = 0) -> None:
        self.num_samples = lead
        self._context, self._rate = context, sample_rate
        self._format = SPECS[name].sample_format
        context.sample_rate, context.layout, context.format = sample_rate, "mono", self._format
        context.time_base = Fraction(1, sample_rate)
        context.thread_count = 1
        context.options = {"flags": "+bitexact"}
        if rate := bit_rate(name, sample_rate):
            context.bit_rate = rate
        context.open()
        self.frame_size = context.frame_size
        self._waiting: Samples = np.zeros(lead, np.float32)

    def write(self, samples: Samples) -> Iterator[Packet]:
        self.num_samples += len(samples)
        self._waiting = np.concatenate([self._waiting, samples])
        while len(self._waiting) >= self.frame_size:
            frame, self._waiting = self._waiting[: self.frame_size], self._waiting[self.frame_size :]
            yield from self._encode(frame, self.num_samples - len(self._waiting) - len(frame))

    def end(self) -> Iterator[Packet]:
        """The rest. Of no samples at all a codec makes no frame, and without one a file is none: then one is made of silence."""
        if not self.num_samples and self._format != "s16":
            yield from self._encode(np.zeros(1, np.float32), 0)
        elif len(self._waiting):
            yield from self._encode(self._waiting, self.num_samples - len(self._waiting))
        yield from self._context.encode(None)

    def _encode(self, samples: Samples, position: int) -> list[Packet]:
        import av

        values = np.frombuffer(pcm16(samples), np.int16) if self._format == "s16" else samples
        frame = av.AudioFrame.from_ndarray(values[None], format=self._format, layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = self._rate, position, Fraction(1, self._rate)
        return list(self._context.encode(frame))


class MuxedCodec:
    """FLAC, Ogg Opus or ADTS AAC.

    ``streaming`` FLAC leaves the length open; otherwise all its bytes come at the end, with length and checksum in front.
    Opus names its delay (the pre-skip) and its true end, so that players hear exactly what was pushed.
    ADTS can't: a player hears ``delay`` samples before the first and silence to the end of the last frame of 1024.
    """

    def __init__(self, name: str, sample_rate: int, *, streaming: bool) -> None:
        import av

        spec = SPECS[name]
        self.delay = 1024 if name == "aac" else 0
        self._sink: Any = _Pipe() if streaming or name != "flac" else io.BytesIO()
        options = {"fflags": "+flush_packets+bitexact", "metadata_header_padding": "0"}
        # A page for each packet, or the sound of a whole second waits for its page to fill.
        options |= {"page_duration": "1"} if name == "opus" and streaming else {}
        assert spec.container is not None
        self._container = av.open(self._sink, "w", format=spec.container, options=options)
        self._stream = self._container.add_stream(spec.encoder, rate=sample_rate)
        self._frames = _Framed(name, self._stream.codec_context, sample_rate)  # type: ignore[arg-type]
        self._container.start_encoding()

    def write(self, samples: Samples) -> bytes:
        """Bytes that are complete."""
        for packet in self._frames.write(samples):
            self._mux(packet)
        return self._sink.take() if isinstance(self._sink, _Pipe) else b""

    def end(self) -> bytes:
        """The rest."""
        for packet in self._frames.end():
            if self._frames.num_samples == 0 and packet.pts is not None and packet.duration:
                if packet.pts >= 0:
                    continue
                packet.duration = -packet.pts  # ends where the sound would begin: none
            self._mux(packet)
        self._container.close()
        return self._sink.take() if isinstance(self._sink, _Pipe) else self._sink.getvalue()

    def _mux(self, packet: Packet) -> None:
        packet.stream = self._stream
        self._container.mux(packet)


LAME_DELAY = 576
"""Samples that LAME adds in front."""
# So that the delay is whole frames: FFmpeg forgets to skip the rest of one that is the last too.
_MP3_LEAD = -(LAME_DELAY + DECODER_DELAY) % 576


class Mp3Codec:
    """MP3 of constant bit rate.

    Complete files start with a frame that tells players what to leave out at both ends: they play exactly what was pushed.
    ``streaming`` ones can't: a player hears ``delay`` samples before the first, and silence after the last, at most
    three frames of 576 (below 32 kHz) or 1152.
    """

    def __init__(self, sample_rate: int, *, streaming: bool) -> None:
        import av

        context = av.CodecContext.create(SPECS["mp3"].encoder, "w")
        assert isinstance(context, av.AudioCodecContext)
        self.delay = _MP3_LEAD + LAME_DELAY + DECODER_DELAY if streaming else 0
        self._frames = _Framed("mp3", context, sample_rate, _MP3_LEAD)
        self._streaming = streaming
        self._held: list[bytes] = []

    def write(self, samples: Samples) -> bytes:
        """Bytes of complete frames; nothing if their number is awaited."""
        return self._take(self._frames.write(samples))

    def end(self) -> bytes:
        """The rest, or the whole file."""
        rest = self._take(self._frames.end())
        if self._streaming:
            return rest
        frames, size = self._held, self._frames.frame_size
        needed = LAME_DELAY + self._frames.num_samples + DECODER_DELAY
        while len(frames) > 2 and (len(frames) - 1) * size >= needed:  # a lone frame is no file to FFmpeg
            frames.pop()  # padding through and through: more than a frame of it isn't understood everywhere
        sound = b"".join(frames)
        padding = len(frames) * size - needed + DECODER_DELAY
        return info_frame(frames[0], len(frames), len(sound), LAME_DELAY + _MP3_LEAD, padding) + sound

    def _take(self, packets: Iterator[Packet]) -> bytes:
        made = [bytes(packet) for packet in packets]  # a frame each
        if self._streaming:
            return b"".join(made)
        self._held += made
        return b""


class _Pipe(io.RawIOBase):
    """Where a muxer writes that can't go back."""

    def __init__(self) -> None:
        self._data = bytearray()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def write(self, data: Any) -> int:
        self._data += data
        return len(data)

    def take(self) -> bytes:
        """What came since the last time."""
        data, self._data = bytes(self._data), bytearray()
        return data
