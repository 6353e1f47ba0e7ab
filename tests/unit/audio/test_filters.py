"""Other rates and other tempos: how long, how alike, how late."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np
import pytest

from stagevox.audio.filters import Resampler, resampled
from stagevox.audio.tempo import Tempo, check_speed
from stagevox.errors import BadParameterError, ClosedError, SamplesError
from support.sounds import pieces, snr, voice_like

PAIRS = [
    (22050, 24000),
    (16000, 24000),
    (44100, 48000),
    (24000, 16000),
    (48000, 16000),
    (44100, 16000),
    (8000, 48000),
    (16000, 44100),
]
SPEEDS = (0.25, 0.3, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0)


def through(stage, parts):
    made = [stage.push(part) for part in parts]
    return np.concatenate([*made, stage.finish()])


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_sine_is_the_same_sine_at_the_other_rate(source, target):
    for frequency in (100, 1000, 0.4 * min(source, target)):
        sine, expected = (0.5 * np.sin(2 * np.pi * frequency * np.arange(rate) / rate) for rate in (source, target))
        made = resampled(sine.astype(np.float32), source, target)
        inside = slice(target // 50, -target // 50)
        assert snr(expected[inside], made[inside]) > 85


@pytest.mark.parametrize(("source", "target"), [(24000, 16000), (48000, 16000), (44100, 16000)])
def test_what_the_lower_rate_can_not_hold_is_gone(source, target):
    sine = 0.5 * np.sin(2 * np.pi * 0.56 * target * np.arange(source) / source)
    made = resampled(sine.astype(np.float32), source, target)
    assert np.abs(made[target // 50 : -target // 50]).max() < 1e-4


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_lengths_are_exact_and_pieces_make_the_whole(source, target):
    generator = np.random.default_rng(source)
    for length in (0, 1, 2, 3, 511, 512, 513, 4097, 20000):
        samples = generator.uniform(-1, 1, length).astype(np.float32)
        whole = resampled(samples, source, target)
        assert len(whole) == ceil(Fraction(length * target, source))
        assert whole.dtype == np.float32
        np.testing.assert_array_equal(through(Resampler(source, target), pieces(samples, generator)), whole)


def test_the_ends_are_silence_not_a_mirror():
    """Linear: what comes after a long silence comes at the start too."""
    samples = voice_like(8000, 24000, pitch=200)[3000:]
    late = resampled(np.concatenate([np.zeros(3000, np.float32), samples]), 24000, 16000)
    np.testing.assert_allclose(resampled(samples, 24000, 16000), late[2000:], atol=1e-5)


@pytest.mark.parametrize("speed", SPEEDS)
def test_the_length_is_exact_at_every_speed(speed):
    generator = np.random.default_rng(3)
    for rate in (8000, 24000):
        for length in (0, 1, 2, 500, 1024, 24001):
            samples = generator.uniform(-1, 1, length).astype(np.float32)
            whole = through(Tempo(rate, speed), [samples])
            assert len(whole) == ceil(length / Fraction(str(speed)))
            np.testing.assert_array_equal(through(Tempo(rate, speed), pieces(samples, generator)), whole)


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("rate", [16000, 24000])
def test_the_pitch_stays_and_the_place_scales(rate, speed):
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate)
    silence = np.zeros(rate)
    made = through(Tempo(rate, speed), [np.concatenate([silence, tone, silence]).astype(np.float32)])
    loud = np.flatnonzero(np.abs(made) > 0.1) / rate
    bound = 0.06 if speed >= 0.5 else 0.15
    assert abs(loud[0] - 1 / speed) < bound and abs(loud[-1] - 2 / speed) < bound
    steady = made[int(1.2 / speed * rate) : int(1.8 / speed * rate)]
    spectrum = np.abs(np.fft.rfft(steady * np.hanning(len(steady)), 2**19))
    assert np.argmax(spectrum) * rate / 2**19 == pytest.approx(440, abs=2)
    assert np.abs(made).max() == pytest.approx(0.5, abs=0.02)
    assert np.sqrt(np.mean(steady**2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.05)


def test_the_last_sound_is_not_lost():
    """FFmpeg's filter by itself drops what is in its window when the end comes."""
    samples = np.zeros(24000, np.float32)
    samples[-1500:] = voice_like(1500, 24000, pitch=300) + 0.3
    for speed in SPEEDS:
        assert np.abs(through(Tempo(24000, speed), [samples])[-int(1000 / speed) :]).max() > 0.2, speed


def test_at_speed_one_nothing_changes():
    samples = voice_like(5000, 24000)
    tempo = Tempo(24000, 1)
    np.testing.assert_array_equal(tempo.push(samples), samples)
    assert len(tempo.finish()) == 0


def test_samples_come_while_they_are_made():
    tempo = Tempo(24000, 0.5)
    made = np.cumsum([len(tempo.push(piece)) for piece in np.split(voice_like(24000, 24000), 10)])
    assert made[1] > 0 and made[-1] > 42000


@pytest.mark.parametrize("speed", [0.2499, 4.0001, 0, -1, float("nan"), float("inf"), "fast", "1", None, True])
def test_other_speeds_are_refused(speed):
    with pytest.raises(BadParameterError, match=r"^speed: .* not a number from 0.25 to 4.0"):
        check_speed(speed)
    with pytest.raises(BadParameterError):
        Tempo(24000, speed)


def test_misuse_is_told():
    for speed in (1.0, 2.0):
        tempo = Tempo(24000, speed)
        with pytest.raises(SamplesError):
            tempo.push([np.nan])
        tempo.finish()
        for use in (tempo.finish, lambda tempo=tempo: tempo.push([0.0])):
            with pytest.raises(ClosedError):
                use()
