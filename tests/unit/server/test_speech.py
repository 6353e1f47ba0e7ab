"""The speech endpoint: formats, headers, streams."""

from __future__ import annotations

import base64
import io
import json
import wave

import numpy as np
import pytest

from stagevox.audio.encode import encoded
from stagevox.audio.wav import pcm16
from stagevox.errors import DeadlineError, TextTooLongError
from support.scripted_client import FRAMES, RATE, SAMPLES, samples_of

TEXT = "hello there"
MIMES = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "pcm16": "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}


@pytest.mark.covers("SV-1")
@pytest.mark.parametrize("format", [*MIMES, None])
def test_each_format_is_what_it_says(serve, format):
    """F41: magic and Content-Type; mp3 is the default, as OpenAI's."""
    answer = serve().speech(TEXT, **({} if format is None else {"response_format": format}))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == MIMES[format or "mp3"]
    rate = 24_000 if format in ("pcm", "pcm16") else None
    assert answer.content == encoded(format or "mp3", samples_of(TEXT.encode()), RATE, encoded_rate=rate)
    assert answer.headers["x-sample-rate"] == {"pcm": "24000", "pcm16": "24000"}.get(format, "16000")


def test_a_whole_wav_has_true_sizes(serve):
    """F40."""
    answer = serve().speech(TEXT, response_format="wav")
    assert int(answer.headers["content-length"]) == len(answer.content)
    with wave.open(io.BytesIO(answer.content)) as file:
        assert (file.getframerate(), file.getnframes()) == (RATE, len(TEXT) * FRAMES * SAMPLES)
        assert len(answer.content) == 44 + 2 * file.getnframes()
    assert answer.headers["x-finish-reason"] == "stop"


def test_a_streamed_wav_has_one_header_of_unknown_sizes(serve):
    """F40."""
    answer = serve().speech(TEXT, response_format="wav", stream_format="audio")
    assert "content-length" not in answer.headers
    assert answer.content[:4] == b"RIFF" and answer.content.count(b"RIFF") == 1
    assert int.from_bytes(answer.content[40:44], "little") >= 2**31 - 1
    assert answer.content[44:] == pcm16(samples_of(TEXT.encode()))


@pytest.mark.parametrize("format", ["wav", "pcm", "mp3"])
def test_events(serve, format):
    answer = serve().speech(TEXT, response_format=format, stream_format="sse")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n") if event]
    assert {event["type"] for event in events[:-1]} == {"speech.audio.delta"} and len(events) > 2
    assert events[-1] == {
        "type": "speech.audio.done",
        "usage": {"input_tokens": 11, "output_tokens": 33, "total_tokens": 44},
        "finish_reason": "stop",
    }
    audio = b"".join(base64.b64decode(event["audio"]) for event in events[:-1])
    assert audio == serve().speech(TEXT, response_format=format, stream_format="audio").content


@pytest.mark.parametrize("speed", [0.5, 1.0, 2.0])
def test_speed_changes_the_length(serve, speed):
    answer = serve().speech(TEXT, response_format="pcm", sample_rate=RATE, speed=speed)
    frames = len(TEXT) * FRAMES * SAMPLES
    assert len(answer.content) == 2 * int(np.ceil(frames / speed))


def test_a_rate_of_one_s_own(serve):
    answer = serve().speech(TEXT, response_format="wav", sample_rate=8000)
    with wave.open(io.BytesIO(answer.content)) as file:
        assert file.getframerate() == 8000
    assert answer.headers["x-sample-rate"] == "8000"


def test_voice_seed_and_stage_params_reach_the_pipeline(serve):
    server = serve()
    answer = server.speech(TEXT, voice="kal", seed=7, response_format="wav", stage_params={"talker": {"temperature": 0.3}})
    assert answer.content == encoded("wav", samples_of(TEXT.encode(), "kal", 7), RATE)
    assert server.client.submitted[0].sampling["talker"] == {"temperature": 0.3, "seed": 7}


@pytest.mark.parametrize("stream_format", [None, "audio", "sse"])
@pytest.mark.parametrize("error", [TextTooLongError("text", "too long"), DeadlineError("talker: no output")])
def test_the_same_error_in_every_mode(serve, stream_format, error):
    """F37: what fails before there is sound is a status, whatever was asked for."""
    server = serve()
    server.client.fail[TEXT] = error, 5
    answer = server.speech(TEXT, stream_format=stream_format, response_format="pcm" if stream_format == "audio" else "wav")
    assert answer.status_code == (400 if isinstance(error, TextTooLongError) else 504)
    assert answer.json()["error"]["param"] == ("input" if isinstance(error, TextTooLongError) else None)


@pytest.mark.parametrize("stream_format", [None, "audio", "sse"])
@pytest.mark.parametrize("length", [500, 5000])
def test_long_text_without_a_point_is_judged_alike(serve, stream_format, length):
    """F37: all of it, or an error before the headers."""
    answer = serve().speech("a" * length, stream_format=stream_format, response_format="wav")
    assert answer.status_code == (200 if length == 500 else 400)
    if length == 500 and stream_format != "sse":
        assert answer.content[44:] == pcm16(samples_of(b"a" * length))


def test_an_error_after_sound_is_an_event(serve):
    server = serve()
    server.client.fail[TEXT] = DeadlineError("talker: no output"), len(TEXT) + 4
    events = server.speech(TEXT, stream_format="sse", response_format="pcm").text.split("\n\n")
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "deadline" and len(events) > 3
