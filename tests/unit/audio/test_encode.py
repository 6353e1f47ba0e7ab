"""Encoded files, heard through decoders that are not the encoder's own wherever there is one."""

from __future__ import annotations

import struct
import wave
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from itertools import pairwise

import numpy as np
import psutil
import pytest
import torch

from stagevox.audio.encode import MIME_TYPES, encoded, make_encoder
from stagevox.audio.filters import resampled
from stagevox.audio.wav import pcm16, wav_bytes
from stagevox.errors import BadParameterError, BadRequestError, ClosedError, ConfigError, SamplesError
from support.sounds import by_ffmpeg, by_libsndfile, pieces, snr, voice_like

RATES = (8000, 16000, 22050, 24000, 44100, 48000)
# 47 and 48, 529, 576, 1105 and 1152 are where MP3 frames and delays end; the rest are of the other codecs' frames.
LENGTHS = (
    1,
    2,
    40,
    47,
    48,
    49,
    120,
    480,
    481,
    528,
    529,
    575,
    576,
    577,
    600,
    960,
    1024,
    1025,
    1104,
    1105,
    1106,
    1151,
    1152,
    1153,
    2304,
)
LOUDEST_NOISE = {"mp3": 20.0, "opus": 17.0, "aac": 16.0}
"""Of a second of voice: dB."""


def streamed(name, samples, rate, **options):
    encoder = make_encoder(name, rate, **options)
    return encoder.push(samples) + encoder.finish()


def int16(samples):
    return np.frombuffer(pcm16(samples), "<i2")


@pytest.mark.parametrize("rate", [*RATES, 11025, 96000])
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("length", [0, 1, 2303, 2304, 2305, 30001])
def test_lossless_files_hold_the_very_samples(streaming, rate, length):
    samples = voice_like(length, rate)
    raw = b"".join([(encoder := make_encoder("pcm", rate, streaming=streaming)).push(samples), encoder.finish()])
    assert raw == streamed("pcm16", samples, rate, streaming=streaming)
    np.testing.assert_array_equal(np.frombuffer(raw, "<i2"), int16(samples))

    flac = streamed("flac", samples, rate, streaming=streaming)
    heard, heard_rate = by_ffmpeg(flac, raw=True)
    np.testing.assert_array_equal(heard, int16(samples))
    assert heard_rate == (rate if length else None)

    wav = streamed("wav", samples, rate, streaming=streaming)
    np.testing.assert_array_equal(np.frombuffer(wav[44:], "<i2"), int16(samples))
    if length:
        for data in (wav, with_length(flac, length)):
            heard, heard_rate = by_libsndfile(data)
            assert heard_rate == rate
            np.testing.assert_array_equal(heard * 32768, int16(samples))


def with_length(flac, length):
    """A streamed FLAC file with the number of its samples filled in, without which libsndfile reads none."""
    data = bytearray(flac)
    fields = int.from_bytes(data[18:26], "big")  # rate, channels, bits, and 36 bits of length
    assert fields % 2**36 in (0, length)
    data[18:26] = (fields // 2**36 * 2**36 + length).to_bytes(8, "big")
    return bytes(data)


def test_headers_say_what_is_known():
    samples = voice_like(777, 24000)
    exact = streamed("wav", samples, 24000, streaming=False)
    assert exact == wav_bytes(samples, 24000)
    with wave.open(BytesIO(exact), "rb") as file:
        assert (file.getnframes(), file.getframerate(), file.getnchannels(), file.getsampwidth()) == (777, 24000, 1, 2)
    open_end = streamed("wav", samples, 24000, streaming=True)
    assert struct.unpack("<I", open_end[4:8]) == struct.unpack("<I", open_end[40:44]) == (0xFFFFFFFF,)
    assert (open_end[:4], open_end[8:40], open_end[44:]) == (exact[:4], exact[8:40], exact[44:])

    def flac_length(data):
        return int.from_bytes(data[18:26], "big") % 2**36

    flac = streamed("flac", samples, 24000, streaming=False)
    assert flac_length(flac) == 777 and any(flac[26:42])  # and a checksum of the samples
    assert flac_length(streamed("flac", samples, 24000, streaming=True)) == 0


@pytest.mark.parametrize(
    ("name", "magic"), [("wav", b"RIFF"), ("flac", b"fLaC"), ("mp3", b"\xff"), ("opus", b"OggS"), ("aac", b"\xff\xf1")]
)
@pytest.mark.parametrize("streaming", [True, False])
def test_the_bytes_are_of_the_format_and_there_is_one_header(name, magic, streaming):
    encoder = make_encoder(name, 24000, streaming=streaming)
    parts = [encoder.push(piece) for piece in np.split(voice_like(24000, 24000), 10)] + [encoder.finish()]
    assert b"".join(parts).startswith(magic)
    assert encoder.mime == MIME_TYPES[name] and encoder.format == name
    if name in ("wav", "flac"):
        assert b"".join(parts).count(magic) == 1
    if name == "opus":
        assert b"".join(parts).count(b"OpusHead") == 1


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("name", ["mp3", "opus", "aac"])
def test_lossy_files_sound_alike_in_place_and_length(name, streaming, rate):
    samples = voice_like(rate + 7, rate)
    encoder = make_encoder(name, rate, streaming=streaming)
    data = encoder.push(samples) + encoder.finish()
    heard, heard_rate = by_ffmpeg(data, container="aac") if name == "aac" else by_libsndfile(data)
    assert heard_rate == encoder.sample_rate
    expected = resampled(samples, rate, heard_rate)
    after = len(heard) - encoder.delay - len(expected)
    if name == "aac":
        assert encoder.delay == 1024 and 0 <= after < 1024
    elif name == "mp3" and streaming:
        assert encoder.delay == 1152 and 0 <= after <= 3 * (576 if rate < 32000 else 1152)
    else:
        assert encoder.delay == after == 0
    heard = heard[encoder.delay :][: len(expected)]
    assert snr(expected, heard) > LOUDEST_NOISE[name]
    # Any other place would be worse.
    assert snr(expected, heard) > max(snr(expected[:-1], heard[1:]), snr(expected[1:], heard[:-1]))


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", ["mp3", "opus"])
def test_every_length_is_kept(name, rate):
    for length in LENGTHS:
        data = encoded(name, voice_like(length, rate), rate)
        heard, heard_rate = by_libsndfile(data)
        assert len(heard) == -(-length * heard_rate // rate), length
        heard, heard_rate = by_ffmpeg(data)
        # Opus counts in 48 kHz: one sample of another rate is several.
        assert len(heard) - -(-length * heard_rate // rate) in ((0,) if name == "mp3" or 48000 % rate == 0 else (0, 1)), length


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("name", ["mp3", "opus", "aac"])
def test_of_no_samples_there_is_a_file_that_plays(name, streaming, rate):
    encoder = make_encoder(name, rate, streaming=streaming)
    data = encoder.finish()
    heard, _ = by_ffmpeg(data, container=name if name != "opus" else None)
    assert data and len(heard) - encoder.delay <= (3 * 1152 if encoder.delay and name == "mp3" else 0)
    assert not np.abs(heard).max(initial=0) > 1e-3


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("rate", [16000, 22050, 24000])
@pytest.mark.parametrize("name", MIME_TYPES)
def test_how_samples_were_cut_leaves_no_trace(name, rate, streaming):
    generator = np.random.default_rng(rate)
    samples = generator.uniform(-1, 1, 20011).astype(np.float32)
    whole = streamed(name, samples, rate, streaming=streaming)
    for largest in (5, 500, 3000):
        encoder = make_encoder(name, rate, streaming=streaming)
        parts = [encoder.push(piece) for piece in pieces(samples, generator, largest)]
        assert b"".join(parts) + encoder.finish() == whole


@pytest.mark.parametrize("name", MIME_TYPES)
def test_a_stream_comes_while_it_is_made(name):
    encoder = make_encoder(name, 24000)
    sizes = [len(encoder.push(piece)) for piece in np.split(voice_like(48000, 24000), 20)]  # 0.1 s each
    assert sum(sizes[:3]) > 0
    assert all(first + second for first, second in pairwise(sizes[2:]))
    rest = len(encoder.finish())
    assert rest < sum(sizes) / 5


@pytest.mark.parametrize(("name", "rate", "wanted", "is_rate"), [
    ("opus", 22050, None, 24000), ("opus", 44100, None, 48000), ("opus", 96000, None, 48000), ("mp3", 96000, None, 48000),
    ("aac", 10000, None, 11025), ("pcm", 16000, 24000, 24000), ("wav", 16000, 24000, 24000), ("flac", 48000, 24000, 24000),
    ("mp3", 16000, 24000, 24000), ("opus", 16000, 22050, 24000),
])  # fmt: skip
def test_rates(name, rate, wanted, is_rate):
    encoder = make_encoder(name, rate, streaming=False, encoded_rate=wanted)
    samples = voice_like(rate, rate)
    data = encoder.push(samples) + encoder.finish()
    assert encoder.sample_rate == is_rate
    if name == "pcm":
        np.testing.assert_array_equal(np.frombuffer(data, "<i2"), int16(resampled(samples, rate, is_rate)))
    else:
        heard, heard_rate = by_ffmpeg(data, container="aac") if name == "aac" else by_libsndfile(data)
        assert heard_rate == is_rate
        assert snr(voice_like(is_rate, is_rate), heard[encoder.delay :][:is_rate]) > LOUDEST_NOISE.get(name, 60)


@pytest.mark.parametrize("name", MIME_TYPES)
@pytest.mark.parametrize("rate", [16000, 22050])
def test_too_loud_is_clamped(name, rate):
    samples = 30 * voice_like(5000, rate)
    assert np.abs(samples).max() > 3
    assert encoded(name, samples, rate) == encoded(name, np.clip(samples, -1, 1), rate)
    assert encoded(name, np.full(5000, 1e30, np.float32), rate) == encoded(name, np.ones(5000, np.float32), rate)


@pytest.mark.parametrize("values", [[np.nan], [np.inf], [0, -np.inf], [[0.0]], 0.0, ["a"], [None, {}], 1e300], ids=str)
@pytest.mark.parametrize("name", MIME_TYPES)
def test_what_is_no_sound_is_refused_and_forgotten(name, values):
    samples = voice_like(3000, 24000)
    encoder = make_encoder(name, 24000)
    parts = [encoder.push(samples[:1500])]
    with pytest.raises(SamplesError, match=r"^samples "):
        encoder.push(values)
    parts += [encoder.push(samples[1500:]), encoder.finish()]
    assert b"".join(parts) == streamed(name, samples, 24000)


def test_tensors_and_other_numbers_are_taken():
    samples = voice_like(3000, 24000)
    assert encoded("flac", torch.from_numpy(samples), 24000) == encoded("flac", samples.astype(np.float64), 24000)
    assert encoded("wav", [1, 0, -1], 24000) == encoded("wav", np.array([1, 0, -1], np.float32), 24000)


@pytest.mark.parametrize("name", MIME_TYPES)
def test_a_pushed_array_may_be_used_again(name):
    samples = voice_like(3000, 24000)
    encoder, reused = make_encoder(name, 24000), samples.copy()
    parts = [encoder.push(reused)]
    reused[:] = 0.9
    assert b"".join([*parts, encoder.finish()]) == streamed(name, samples, 24000)


@pytest.mark.parametrize("name", ["ogg", "WAV", " wav ", "", "pcm24", None, 3, ["wav"]])
def test_other_formats_are_refused_by_name(name):
    with pytest.raises(BadParameterError, match=r"^audio\.format: unsupported audio format .*allowed: wav, pcm") as caught:
        make_encoder(name, 24000, field="audio.format")
    assert isinstance(caught.value, BadRequestError)
    assert caught.value.allowed == tuple(MIME_TYPES)


@pytest.mark.parametrize("rates", [{"sample_rate": 0}, {"sample_rate": 10**6}, {"sample_rate": 24000, "encoded_rate": 1}])
def test_rates_out_of_range_are_refused(rates):
    with pytest.raises(ConfigError, match="rate: .* Hz is not from"):
        make_encoder("mp3", **rates)


@pytest.mark.parametrize("name", MIME_TYPES)
def test_the_end_is_the_end(name):
    encoder = make_encoder(name, 24000)
    encoder.finish()
    for use in (encoder.finish, lambda: encoder.push([0.0])):
        with pytest.raises(ClosedError):
            use()


def test_many_encoders_at_once_share_nothing():
    jobs = [
        (name, 16000 + 2000 * (k % 5), voice_like(9000 + k, 24000, pitch=100 + 5 * k)) for k in range(10) for name in MIME_TYPES
    ]
    jobs = jobs[:64]
    expected = [encoded(name, samples, rate) for name, rate, samples in jobs]
    encoders = [make_encoder(name, rate, streaming=False) for name, rate, _ in jobs]

    def run(k):
        parts = [encoders[k].push(piece) for piece in pieces(jobs[k][2], np.random.default_rng(k), 700)]
        return b"".join(parts) + encoders[k].finish()

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(run, range(64))) == expected


def test_encoders_dropped_half_way_leave_no_memory_behind():
    def drop(times):
        for k in range(times):
            make_encoder(tuple(MIME_TYPES)[k % 7], 22050, streaming=bool(k % 2)).push(voice_like(4000, 22050))
        return psutil.Process().memory_info().rss

    drop(70)
    assert drop(350) - drop(35) < 4 * 2**20
