"""Players, decoders, events, arrivals and prompts, each against what can be counted by hand."""

from __future__ import annotations

import io
import math
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagevox.audio.encode import make_encoder
from stagevox.bench.serve.pace import offsets
from stagevox.bench.serve.player import Arrival, play
from stagevox.bench.serve.prompts import BUILT_IN, read_prompts
from stagevox.bench.serve.sound import BadAudioError, WavDecoder, make_decoder
from stagevox.bench.serve.sse import EventReader
from stagevox.errors import ConfigError

RATE = 1000  # samples are milliseconds
SRC = Path(__file__).resolve().parents[4] / "src"


def arrive(*pairs):
    return [Arrival(at / 1000, samples) for at, samples in pairs]


@pytest.mark.covers("SV-4")
@pytest.mark.parametrize(
    "arrivals, underruns, stalled, head_start",
    [
        ([(500, 100)], 0, 0, 0),
        ([(0, 100), (50, 100), (200, 100)], 0, 0, 0),  # the last comes as the second ends: in time
        ([(0, 100), (150, 100)], 1, 50, 50),
        ([(0, 100), (150, 100), (240, 100)], 1, 50, 50),  # the break made room for the third
        ([(0, 100), (150, 100), (300, 100)], 2, 100, 100),
        ([(0, 100), (400, 1000), (1300, 100)], 1, 300, 300),
        ([(0, 10), (5, 10), (10, 10)], 0, 0, 0),
    ],
)
def test_a_player_that_starts_at_the_first_chunk(arrivals, underruns, stalled, head_start):
    heard = play(arrive(*arrivals), RATE)
    assert heard.underruns == underruns
    assert heard.stalled_seconds == pytest.approx(stalled / 1000, abs=1e-9)
    assert heard.needed_head_start == pytest.approx(head_start / 1000, abs=1e-9)
    total = sum(samples for _, samples in arrivals) / 1000
    assert heard.audio_seconds == pytest.approx(total)
    assert heard.continuity == pytest.approx(total / (total + stalled / 1000))


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200)), min_size=1, max_size=30))
def test_a_player_is_a_clock_that_ticks_a_millisecond_at_a_time(steps):
    """The same, with a buffer that is filled and emptied sample by sample, in whole milliseconds."""
    at, arrivals = 0, []
    for wait, samples in steps:
        at += wait
        arrivals.append((at, samples))
    waiting = list(arrivals)
    now, buffered, underruns, stalled, dry = arrivals[0][0], 0, 0, 0, False
    while waiting or buffered:
        while waiting and waiting[0][0] <= now:
            buffered += waiting.pop(0)[1]
        if buffered:
            buffered -= 1
            dry = False
        else:
            underruns += not dry
            dry = True
            stalled += 1
        now += 1
    heard = play(arrive(*arrivals), RATE)
    assert heard.stalled_seconds * 1000 == pytest.approx(stalled, abs=1e-6)
    assert heard.needed_head_start == pytest.approx(heard.stalled_seconds, abs=1e-9)
    assert heard.underruns == underruns


@settings(deadline=None)
@given(st.data(), st.sampled_from(["wav", "wav whole", "pcm"]))
def test_bytes_cut_anywhere_are_the_same_samples(data, kind):
    samples = np.random.default_rng(1).integers(-32768, 32768, 301).astype(np.int16)
    if kind == "pcm":
        body = samples.astype("<i2").tobytes()
    elif kind == "wav whole":
        file = io.BytesIO()
        with wave.open(file, "wb") as out:
            out.setparams((1, 2, 8000, 0, "NONE", ""))
            out.writeframes(samples.astype("<i2").tobytes())
        body = file.getvalue()
    else:
        encoder = make_encoder("wav", 8000, streaming=True)
        body = encoder.push(samples / np.float32(32767)) + encoder.finish()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=12)))
    decoder = make_decoder(kind.split()[0], 8000)
    parts = [decoder.push(body[a:b]) for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    decoder.finish()
    got = np.concatenate(parts).astype(int)
    assert decoder.sample_rate == 8000 and len(got) == 301
    assert np.abs(got - samples).max() <= (1 if kind == "wav" else 0)  # -32768 is clamped by the encoder


@pytest.mark.parametrize(
    "body",
    [
        b"RIFX" + bytes(40),
        b"RIFF\0\0\0\0WAVX" + bytes(40),
        b"RIFF\0\0\0\0WAVEdata\0\0\0\0",  # samples of no known rate
        b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\1\0\2\0" + bytes(12) + b"data\0\0\0\0",  # stereo
        b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0" + bytes(10) + b"\x10\0data\0\0\0\0",  # 0 Hz
        b"RIFF\0\0\0\0WAVELIST\xff\xff\xff\x7f" + bytes(40),
        b"RIFF\0\0",
        b'{"error": {}}',
    ],
)
def test_what_is_no_sound_is_said_so(body):
    decoder = WavDecoder()
    with pytest.raises(BadAudioError):
        decoder.push(body)
        decoder.finish()


@settings(deadline=None)
@given(st.data())
def test_events_cut_anywhere_are_the_same_events(data):
    body = b'data: {"a": 1}\n\n: a comment\n\nevent: x\ndata: two\ndata:lines\n\ndata: [DONE]\n\n'
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    reader = EventReader()
    found = [event for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True) for event in reader.push(body[a:b])]
    assert found == [b'{"a": 1}', b"two\nlines", b"[DONE]"] and not reader.is_broken
    reader.push(b"data: ha")
    assert reader.is_broken


@settings(deadline=None)
@given(st.data())
def test_events_with_other_line_ends(data):
    body = b"data: one\r\n\r\ndata: two\r\n\r\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    reader = EventReader()
    assert [event for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True) for event in reader.push(body[a:b])] == [
        b"one",
        b"two",
    ]


def test_arrivals_are_a_poisson_process():
    """The same seed gives the same times; gaps have the mean and the spread that a Poisson process has."""
    times = offsets(20_001, rate=50.0, burstiness=1.0, seed=3)
    assert times == offsets(20_001, 50.0, 1.0, 3) != offsets(20_001, 50.0, 1.0, 4)
    gaps = np.diff(times)
    assert times[0] == 0 and gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03) and gaps.std() == pytest.approx(1 / 50, rel=0.03)
    even = np.diff(offsets(20_001, 50.0, 100.0, 3))
    assert even.mean() == pytest.approx(1 / 50, rel=0.03) and even.std() == pytest.approx(1 / 500, rel=0.03)
    assert offsets(3, math.inf, 1.0, 0) == [0, 0, 0] and offsets(1, 2.0, 1.0, 0) == [0]


def test_prompts_are_the_lines_that_aren_t_blank(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n  two  \r\nthr\N{LATIN SMALL LETTER E WITH ACUTE}e")
    assert read_prompts(file) == ("one", "two", "thr\N{LATIN SMALL LETTER E WITH ACUTE}e")
    assert read_prompts(None) == BUILT_IN
    file.write_text(" \n\n")
    for path in (file, tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="prompts"):
            read_prompts(path)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_prompts(file)


def test_neither_torch_nor_vllm_is_loaded():
    code = "import sys, stagevox.cli.main, stagevox.bench.serve.run, stagevox.bench.serve.compare\n"
    code += "print({'torch', 'vllm', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(SRC)}, check=True)
    assert done.stdout.strip() == "set()"
