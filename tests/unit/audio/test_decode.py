"""Clips that people upload, whole and damaged."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile

from stagevox.audio.decode import Clip, decode_clip
from stagevox.audio.encode import encoded, make_encoder
from stagevox.audio.filters import resampled
from stagevox.audio.wav import pcm16
from stagevox.errors import BadMediaError, BadRequestError
from support.sounds import by_libsndfile, snr, voice_like

RATE = 24000
VOICE = voice_like(RATE, RATE)
SRC = Path(__file__).resolve().parents[3] / "src"


def written(samples, name, subtype, rate=RATE):
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=name, subtype=subtype)
    return file.getvalue()


def film(seconds=1):
    """An MP4 of black pictures and of the voice."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        pictures = container.add_stream("mpeg4", rate=10)
        pictures.width = pictures.height = 64
        sound = container.add_stream("aac", rate=RATE, layout="mono")
        for _ in range(10 * seconds):
            container.mux(pictures.encode(av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8))))
        frame = av.AudioFrame.from_ndarray(VOICE[None], format="fltp", layout="mono")
        frame.sample_rate, frame.pts = RATE, 0
        for stream in (sound, pictures):
            container.mux(stream.encode(frame) if stream is sound else [])
            container.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize("channels", [1, 2, 6])
@pytest.mark.parametrize(
    ("name", "subtype"),
    [("WAV", kind) for kind in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")]
    + [("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("AIFF", "PCM_16"), ("W64", "PCM_16"), ("RF64", "PCM_16")],
)
def test_lossless_files_by_another_writer(name, subtype, channels):
    mix = np.stack([VOICE / (k + 1) for k in range(channels)], axis=1)
    data = written(mix, name, subtype)
    clip = decode_clip(data)
    assert isinstance(clip, Clip) and clip.sample_rate == RATE and clip.samples.dtype == np.float32
    heard = by_libsndfile(data)[0].reshape(len(mix), -1).mean(axis=1)
    np.testing.assert_allclose(clip.samples, heard, rtol=0, atol=1e-7)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(
    ("name", "subtype", "short", "noise"),
    [
        ("MP3", "MPEG_LAYER_III", 0, 90),
        ("OGG", "VORBIS", 256, 90),  # FFmpeg places the sound of some files 256 samples late, and cuts as many off at the end
        ("OGG", "OPUS", 0, 15),  # decoders that work at other rates are up to a sample apart
    ],
)
def test_lossy_files_by_another_writer(name, subtype, short, noise, channels):
    data = written(np.stack([VOICE] * channels, axis=1), name, subtype)
    heard = by_libsndfile(data)[0].reshape(RATE, -1).mean(axis=1)
    clip = decode_clip(data, RATE)
    assert clip.sample_rate == RATE
    assert RATE - short <= len(clip.samples) <= RATE
    assert snr(heard[: len(clip.samples)], clip.samples) > noise


@pytest.mark.parametrize("name", ["wav", "flac", "mp3", "opus", "aac"])
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("length", [1, 100, RATE])
def test_our_own_files_come_back(name, streaming, length):
    encoder = make_encoder(name, RATE, streaming=streaming)
    data = encoder.push(VOICE[:length]) + encoder.finish()
    samples, rate = decode_clip(data, RATE)
    assert rate == RATE
    if name in ("wav", "flac"):
        np.testing.assert_array_equal(samples * 32768, np.frombuffer(pcm16(VOICE[:length]), "<i2"))
    elif encoder.delay == 0:
        assert len(samples) == length
    if length == RATE:
        assert snr(VOICE, samples[encoder.delay :][:RATE]) > 17


@pytest.mark.parametrize("wanted", [8000, 16000, 24000, 44100, 48000])
def test_the_rate_wished_for(wanted):
    data = encoded("wav", VOICE, RATE)
    clip = decode_clip(data, wanted)
    assert clip.sample_rate == wanted
    np.testing.assert_array_equal(clip.samples, resampled(decode_clip(data).samples, RATE, wanted))


def test_a_film_gives_its_sound():
    clip = decode_clip(film())
    assert clip.sample_rate == RATE
    assert snr(VOICE, clip.samples[:RATE]) > 20


def test_tags_are_no_sound():
    mp3 = encoded("mp3", VOICE, RATE)
    tagged = b"ID3\x03\0\0\0\0\x0f\x76" + bytes(15 * 128 + 0x76) + mp3 + b"TAG" + b"a" * 125
    np.testing.assert_array_equal(decode_clip(tagged).samples, decode_clip(mp3).samples)


def test_files_one_behind_the_other_are_one_sound():
    opus = encoded("opus", VOICE, RATE)
    twice = decode_clip(opus + opus, RATE).samples
    assert len(twice) == 2 * RATE
    assert snr(np.tile(VOICE, 2), twice) > 15


WAV = encoded("wav", VOICE, RATE)
SPOILED = np.where(np.arange(RATE) == 500, np.nan, VOICE)
PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n%b\n#EXT-X-ENDLIST\n"
DAMAGED = {
    "nothing": (b"", "empty"),
    "one byte": (b"\xff", "no format"),
    "text": (b"hello " * 500, "no format"),
    "zeros": (bytes(5000), "no format"),
    "bare samples": (pcm16(VOICE), "no format"),
    "half a header": (WAV[:30], "damaged"),
    "header without samples": (encoded("wav", VOICE[:0], RATE), "no samples"),
    "half a wav": (WAV[: len(WAV) // 2], "cut off"),
    "half a flac": ((flac := encoded("flac", VOICE, RATE))[: len(flac) // 2], "damaged"),
    "half a film": (film()[:3000], "damaged"),
    "half an opus": (encoded("opus", VOICE[:5000], RATE)[:500], "damaged"),
    "half an mp3": ((mp3 := encoded("mp3", VOICE, RATE))[:4000], "damaged"),
    "half an mp3 with tags": (b"ID3\x03\0\0\0\0\x0f\x76" + bytes(15 * 128 + 0x76) + mp3[:4000], "damaged"),
    "half an aac": (encoded("aac", VOICE, RATE)[:4000], "damaged"),
    "hole in a flac": (flac[:9000] + bytes(range(99)) + flac[9099:], "damaged"),
    "hole in an opus": (
        (opus := (encoder := make_encoder("opus", RATE)).push(VOICE) + encoder.finish())[:4000] + bytes(99) + opus[4099:],
        "damaged",
    ),
    "not finite": (written(SPOILED, "WAV", "FLOAT"), "not finite"),
    "too large for us": (written(np.full(999, 1e300), "WAV", "DOUBLE"), "not finite"),
    "no rate": (WAV[:24] + bytes(4) + WAV[28:], "damaged"),
    "a rate beyond": (WAV[:24] + (10**6).to_bytes(4, "little") + WAV[28:], "samples a second"),
    "no channel": (WAV[:22] + bytes(2) + WAV[24:], "damaged"),
    "a codec that is none": (WAV[:20] + b"\x99\x99" + WAV[22:], "codec"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_told_and_names_the_item(name):
    data, said = DAMAGED[name]
    with pytest.raises(BadMediaError, match=r"^messages\[0\]: the clip.*" + said) as caught:
        decode_clip(data, 16000, field="messages[0]")
    assert isinstance(caught.value, BadRequestError) and "\n" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["", "file://", "file:"])
@pytest.mark.parametrize("kind", ["hls", "concat"])
def test_a_file_can_not_name_others_to_be_read(tmp_path, monkeypatch, kind, scheme):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.wav").write_bytes(WAV)
    target = f"{scheme}{tmp_path}/secret.wav" if scheme else "secret.wav"
    data = PLAYLIST % target.encode() if kind == "hls" else b"ffconcat version 1.0\nfile " + target.encode() + b"\n"
    if kind == "concat" and not scheme:  # the danger is real: FFmpeg left to itself reads it
        (tmp_path / "list.ffconcat").write_bytes(data)
        with av.open("list.ffconcat") as container:
            assert sum(frame.samples for frame in container.decode(audio=0)) == RATE
    with pytest.raises(BadMediaError):
        decode_clip(data)


def test_limits():
    assert len(decode_clip(WAV, max_bytes=len(WAV), max_seconds=1).samples) == RATE
    with pytest.raises(BadMediaError, match=f"has {len(WAV)} bytes, more than the 1000"):
        decode_clip(WAV, max_bytes=1000)
    with pytest.raises(BadMediaError, match=r"longer than the 0.99 seconds"):
        decode_clip(WAV, max_seconds=0.99)


def test_a_small_file_of_long_silence_takes_no_more_memory_than_allowed():
    bomb = encoded("flac", np.zeros(60 * 60 * 8000, np.float32), 8000)
    assert len(bomb) < 700_000
    tracemalloc.start()
    try:
        with pytest.raises(BadMediaError, match="longer than the 10 seconds"):
            decode_clip(bomb, max_seconds=10)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["wav", "flac", "mp3", "opus", "aac"])
def test_bytes_at_random_never_do_worse_than_an_error(name):
    generator = np.random.default_rng(7)
    good = encoded(name, VOICE[:6000], RATE)
    refused = 0
    for k in range(80):
        data = bytearray(good)
        reach = min(len(data), 80) if k % 2 else len(data)
        for _ in range(generator.integers(1, 20)):
            data[generator.integers(reach)] = generator.integers(256)
        if k % 3 == 0:
            del data[generator.integers(1, len(data)) :]
        try:
            assert np.isfinite(decode_clip(bytes(data), 16000, max_seconds=60).samples).all()
        except BadMediaError:
            refused += 1
    assert refused > 10


def test_ffmpeg_is_loaded_only_when_it_is_needed():
    code = "import stagevox, stagevox.audio.encode, stagevox.audio.decode, stagevox.audio.tempo, sys; e = stagevox.audio.encode\n"
    code += "e.make_encoder('wav', 24000).push([0.0]); assert not {'av', 'vllm', 'torch'} & set(sys.modules), 'loaded'\n"
    code += "e.make_encoder('flac', 24000); assert 'av' in sys.modules"
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
