"""A clip that somebody uploaded, to samples. Its bytes are not to be trusted."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stagevox.errors import BadMediaError

from .check import Samples
from .filters import Resampler

if TYPE_CHECKING:
    from av import AudioCodecContext, AudioFrame
    from av.container import InputContainer

MAX_BYTES = 25 * 2**20
MAX_SECONDS = 600.0
LOWEST_RATE, HIGHEST_RATE = 1_000, 192_000
MAX_CHANNELS = 32

# Nothing else is looked into. A playlist would have FFmpeg open whatever it names; a film, run its decoders of pictures.
_CONTAINERS = ("wav", "w64", "aiff", "flac", "mp3", "ogg", "aac", "mov", "mp4", "m4a", "3gp", "3g2", "mj2", "matroska", "webm")
_PCM = ("u8", "s8", "s16le", "s16be", "s24le", "s24be", "s32le", "s32be", "f32le", "f32be", "f64le", "f64be", "mulaw", "alaw")
_PACKED = ("aac", "alac", "flac", "mp1float", "mp2float", "mp3float", "mp3", "opus", "libopus", "vorbis", "libvorbis")
_CODECS = _PACKED + tuple(f"pcm_{kind}" for kind in _PCM)
_GAP_SECONDS = 0.01


class Clip(NamedTuple):
    """Mono ``samples [samples]`` at ``sample_rate`` Hz."""

    samples: Samples
    sample_rate: int


def decode_clip(
    data: bytes,
    sample_rate: int | None = None,
    *,
    max_bytes: int = MAX_BYTES,
    max_seconds: float = MAX_SECONDS,
    field: str = "audio",
    taken: Callable[[int], None] = lambda num_samples: None,
) -> Clip:
    """The sound of a file: WAV, AIFF, FLAC, MP3, Ogg (Opus, Vorbis, FLAC), AAC, MP4 or WebM; of a film, its first sound.

    Channels are averaged. ``sample_rate`` is the rate wanted, by default that of the file (Opus has one: 48 kHz). Memory goes by
    the limits, not by what the file claims. Where a WAV, FLAC or MP3 file states its length it has to have it; one that
    doesn't, and ADTS and Ogg files, may pass for shorter ones when they are cut off. ``taken`` is told how many samples each piece
    adds to what is held; what it raises ends the decoding.

    Raises:
        BadMediaError: no file of these, damaged, cut off, without a sample, or over a limit; ``field`` is its name.
    """
    if not data:
        raise BadMediaError(field, "the clip is empty: 0 bytes")
    if len(data) > max_bytes:
        raise BadMediaError(field, f"the clip has {len(data)} bytes, more than the {max_bytes} allowed")
    if _cut_off_wav(data):
        raise BadMediaError(field, "the clip is damaged: cut off before its end")
    import av

    try:
        with av.open(io.BytesIO(data), format=_format(data), options=_options(), metadata_errors="replace") as container:
            assert isinstance(container, av.container.InputContainer)
            clip = _read(container, sample_rate, max_seconds, _tolerance(data), field, taken)
    except (av.FFmpegError, EOFError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadMediaError(field, f"the clip is damaged, or in no format that is known here: {reason}") from None
    if not len(clip.samples):
        raise BadMediaError(field, "the clip has no samples")
    return clip


def _read(
    container: InputContainer,
    wanted: int | None,
    max_seconds: float,
    tolerance: int | None,
    field: str,
    taken: Callable[[int], None],
) -> Clip:
    stream = next(iter(container.streams.audio), None)
    if stream is None:
        raise BadMediaError(field, "the clip has no sound")
    codec: AudioCodecContext | None = stream.codec_context
    if codec is None or codec.name not in _CODECS:
        raise BadMediaError(field, "the clip's codec is not known here" + (f": {codec.name}" if codec else ""))
    codec.thread_count = 1
    rate = stream.rate
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise BadMediaError(field, f"the clip has {rate} samples a second, not {LOWEST_RATE} to {HIGHEST_RATE}")
    gapless = container.format.name == "ogg"  # pages carry their place, and follow each other unless one was lost
    resampler = Resampler(rate, wanted) if wanted and wanted != rate else None
    parts: list[Samples] = []
    num_samples = 0
    for samples in _frames(container.decode(stream), rate, gapless, field):
        num_samples += len(samples)
        if num_samples > max_seconds * rate:
            raise BadMediaError(field, f"the clip is longer than the {max_seconds:g} seconds allowed")
        parts.append(resampler.push(samples) if resampler else samples)
        taken(len(parts[-1]))
    if resampler:
        parts.append(resampler.finish())
        taken(len(parts[-1]))
    if tolerance is not None and stream.duration and stream.time_base:
        declared = round(stream.duration * stream.time_base * rate)
        if declared > num_samples + tolerance:
            raise BadMediaError(field, f"the clip is damaged: {num_samples} of its {declared} samples are there")
    return Clip(np.concatenate(parts) if parts else np.zeros(0, np.float32), wanted or rate)


def _frames(frames: Iterator[AudioFrame], rate: int, gapless: bool, field: str) -> Iterator[Samples]:
    """Mono samples, frame by frame."""
    due: float | None = None  # when the next frame starts, in seconds
    for frame in frames:
        if frame.sample_rate != rate:
            raise BadMediaError(field, f"the clip changes from {rate} to {frame.sample_rate} samples a second")
        if frame.layout.nb_channels > MAX_CHANNELS:
            raise BadMediaError(field, f"the clip has {frame.layout.nb_channels} channels, more than {MAX_CHANNELS}")
        time = frame.time
        if gapless and due is not None and time is not None and time - due > _GAP_SECONDS:
            raise BadMediaError(field, f"the clip is damaged: something is missing at {due:.2f} s")
        due = time + frame.samples / rate if time is not None else None
        samples = _mono(frame)
        if not np.isfinite(samples).all():
            raise BadMediaError(field, "the clip has samples that are not finite")
        yield samples


def _mono(frame: AudioFrame) -> Samples:
    """The mean of a frame's channels; integers are scaled to [-1, 1)."""
    values = frame.to_ndarray()  # [channels, samples], or [1, samples × channels] if the channels take turns
    if not frame.format.is_planar:
        values = values.reshape(-1, frame.layout.nb_channels).T
    wide = values.astype(np.float64).mean(axis=0)
    if values.dtype == np.uint8:
        wide = wide / 128 - 1
    elif values.dtype.kind == "i":
        wide = wide / 2.0 ** (8 * values.dtype.itemsize - 1)
    with np.errstate(over="ignore"):  # to infinity, which is refused
        return wide.astype(np.float32)


def _options() -> dict[str, str]:
    return {"format_whitelist": ",".join(_CONTAINERS), "codec_whitelist": ",".join(_CODECS), "protocol_whitelist": ""}


def _format(data: bytes) -> str | None:
    """The format of a bare run of frames, which FFmpeg only guesses from several; None: one that FFmpeg knows by its header."""
    if data[0] != 0xFF or len(data) < 2:
        return None
    if data[1] & 0xF6 == 0xF0:
        return "aac"
    return "mp3" if data[1] & 0xE0 == 0xE0 else None


def _tolerance(data: bytes) -> int | None:
    """By how many samples a file may be shorter than FFmpeg says; None: any, since FFmpeg only estimates."""
    if data[:4] == b"fLaC":
        return 0
    start = 0
    if data[:3] == b"ID3":
        start = 10 + sum((byte & 0x7F) << shift for byte, shift in zip(data[6:10], (21, 14, 7, 0), strict=False))
    first = data[start : start + 64]
    return 2 * 1152 if b"Info" in first or b"Xing" in first else None


def _cut_off_wav(data: bytes) -> bool:
    """Whether a WAV file says that it has more samples than it has. Sizes from 2^31 are those of a stream: unknown."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return False
    position = 12
    while position + 8 <= len(data):
        size = int.from_bytes(data[position + 4 : position + 8], "little")
        if data[position : position + 4] == b"data":
            return size < 2**31 - 1 and position + 8 + size > len(data)
        position += 8 + size + size % 2
    return True
