"""Clients that people have: OpenAI's SDK, curl, and a voice agent that reads raw pcm."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
import subprocess
import wave

import httpx
import numpy as np
import openai
import pytest

from stagevox.audio.encode import encoded
from stagevox.audio.wav import pcm16
from support.scripted_client import FRAMES, RATE, SAMPLES, samples_of

TEXT = "hello there"
MESSAGES = [{"role": "user", "content": TEXT}]
BOTH = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}


@pytest.fixture
def server(listen):
    with listen(api_keys=("sk-test",), served_model_names=("voice",)) as server:
        server.options = {"base_url": server.url + "/v1", "api_key": "sk-test", "max_retries": 0, "timeout": 20}
        yield server


@pytest.mark.covers("SV-1")
def test_the_sdk(server):
    with openai.OpenAI(**server.options) as client:
        assert [model.id for model in client.models.list()] == ["voice"]
        assert client.models.retrieve("voice").owned_by == "stagevox"
        answer = client.chat.completions.create(model="voice", messages=MESSAGES, **BOTH)
        message = answer.choices[0].message
        assert message.content == message.audio.transcript == TEXT
        assert base64.b64decode(message.audio.data) == encoded("wav", samples_of(TEXT.encode()), RATE)
        assert answer.usage.completion_tokens_details.audio_tokens == len(TEXT) * FRAMES
        assert answer.choices[0].finish_reason == "stop" and message.audio.expires_at > answer.created
        follow = [*MESSAGES, message.model_dump(), {"role": "user", "content": "again"}]
        assert client.chat.completions.create(model="voice", messages=follow).choices[0].message.content == "again"
        follow[1] = {"role": "assistant", "audio": {"id": message.audio.id}}
        assert client.chat.completions.create(model="voice", messages=follow).choices[0].message.content == "again"


@pytest.mark.covers("SV-1")
def test_the_sdk_streams(server):
    """F25, F26."""
    with openai.OpenAI(**server.options) as client:
        stream = client.chat.completions.create(
            model="voice", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **BOTH
        )
        chunks = list(stream)
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
        assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
        assert chunks[-1].usage.completion_tokens == len(TEXT) * (1 + FRAMES)
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == TEXT
        audios = [delta.audio for delta in deltas if getattr(delta, "audio", None)]
        data = b"".join(base64.b64decode(audio.data or "") for audio in audios)
        assert data[44:] == pcm16(samples_of(TEXT.encode()))
        assert len({audio.id for audio in audios}) == 1 and audios[-1].expires_at


def test_the_sdk_s_own_stream_helper(server):
    with openai.OpenAI(**server.options) as client, client.chat.completions.stream(model="voice", messages=MESSAGES) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert text == final.choices[0].message.content == TEXT and final.choices[0].finish_reason == "stop"


@pytest.mark.covers("SV-1")
def test_the_async_sdk(server):
    async def main():
        async with openai.AsyncOpenAI(**server.options) as client:

            async def streamed(text):
                stream = await client.chat.completions.create(
                    model="voice", messages=[{"role": "user", "content": text}], stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            texts = [f"number {name}" for name in ("one", "two", "three")]
            assert await asyncio.gather(*map(streamed, texts)) == texts
            answer = await client.chat.completions.create(model="voice", messages=MESSAGES, n=2)
            assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]

    asyncio.run(main())


@pytest.mark.parametrize("format", ["mp3", "opus", "aac", "flac", "wav", "pcm"])
def test_the_sdk_speaks(server, format, tmp_path):
    with openai.OpenAI(**server.options) as client:
        whole = client.audio.speech.create(model="voice", voice="alloy", input=TEXT, response_format=format)
        rate = 24_000 if format == "pcm" else None
        assert whole.read() == encoded(format, samples_of(TEXT.encode()), RATE, encoded_rate=rate)
        with client.audio.speech.with_streaming_response.create(
            model="voice", voice="nova", input=TEXT, response_format=format, speed=1.0, stream_format="audio"
        ) as streamed:
            streamed.stream_to_file(tmp_path / "a")
        assert (tmp_path / "a").stat().st_size > 100


def test_the_sdk_raises_its_own_errors(server):
    with openai.OpenAI(**server.options) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.audio.speech.create(model="voice", voice="nobody", input=TEXT)
        assert caught.value.param == "voice" and caught.value.code == "unknown_voice" and "slt" in caught.value.message
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="gpt", messages=MESSAGES)
        server.state.draining = True
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="voice", messages=MESSAGES)
        assert caught.value.status_code == 503
        server.state.draining = False
    with openai.OpenAI(**server.options | {"api_key": "sk-wrong"}) as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_the_sdk_raises_an_error_in_the_middle_of_a_stream(server):
    from stagevox.errors import DeadlineError

    server.client.fail[TEXT] = DeadlineError("talker: no input"), 5
    with openai.OpenAI(**server.options) as client:
        stream = client.chat.completions.create(model="voice", messages=MESSAGES, stream=True)
        text = ""
        with pytest.raises(openai.APIError, match="no input"):
            for chunk in stream:
                text += chunk.choices[0].delta.content or ""
        assert text == TEXT[:5]


def test_429_is_the_sdk_s_rate_limit(listen):
    with listen(max_running=1, max_queue=0, client=held) as server:
        options = {"base_url": server.url + "/v1", "api_key": "x", "max_retries": 0}

        async def main():
            async with openai.AsyncOpenAI(**options) as client:
                first = asyncio.ensure_future(client.chat.completions.create(model="scripted", messages=MESSAGES))
                while not server.state.gate.running:
                    await asyncio.sleep(0.01)
                with pytest.raises(openai.RateLimitError) as caught:
                    await client.chat.completions.create(model="scripted", messages=MESSAGES)
                assert int(caught.value.response.headers["retry-after"]) >= 1
                server.on_loop(server.client.hold.set)
                assert (await first).choices[0].finish_reason == "stop"

        asyncio.run(main())


def held():
    from support.scripted_client import ScriptedClient

    client = ScriptedClient()
    client.hold = asyncio.Event()
    return client


CURL = shutil.which("curl")


def curl(server, *options):
    command = [CURL, "-sS", "--max-time", "20", "-H", "Authorization: Bearer sk-test", *options]
    return subprocess.run(command, capture_output=True, check=True).stdout


@pytest.mark.skipif(CURL is None, reason="curl is not installed")
def test_curl(server, tmp_path):
    json_header = ("-H", "Content-Type: application/json")
    body = json.dumps({"model": "voice", "messages": MESSAGES, "stream": True})
    lines = curl(server, "-N", *json_header, "-d", body, server.url + "/v1/chat/completions").decode().split("\n\n")
    assert lines[-2] == "data: [DONE]" and json.loads(lines[0].removeprefix("data: "))["object"] == "chat.completion.chunk"
    file = tmp_path / "a.wav"
    body = json.dumps({"model": "voice", "input": TEXT, "voice": "alloy", "response_format": "wav"})
    curl(server, *json_header, "-d", body, "-o", str(file), server.url + "/v1/audio/speech")
    with wave.open(str(file)) as audio:
        assert audio.getnframes() == len(TEXT) * FRAMES * SAMPLES
    status = curl(server, "-o", "/dev/null", "-w", "%{http_code}", *json_header, "-d", "{}", server.url + "/v1/audio/speech")
    assert status == b"400"
    assert b'"status":"ok"' in curl(server, server.url + "/health")


@pytest.mark.covers("SV-1")
def test_a_voice_agent_that_reads_raw_pcm(listen):
    """As pipecat's: pieces of any length, joined to even ones, 24 kHz, played from the first one on."""
    with listen(pause=0.002) as server:

        async def main():
            client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
            speech = client.audio.speech.with_streaming_response
            async with client, speech.create(model="scripted", voice="alloy", input=TEXT, response_format="pcm") as response:
                assert response.status_code == 200
                played, rest, pieces = [], b"", 0
                async for piece in response.iter_bytes(1000):
                    pieces += 1
                    if pieces == 1:
                        assert server.client.live  # heard before all is made
                    rest += piece
                    cut = len(rest) // 2 * 2
                    played.append(np.frombuffer(rest[:cut], "<i2"))
                    rest = rest[cut:]
                return np.concatenate(played), rest, pieces

        samples, rest, pieces = asyncio.run(main())
        assert rest == b"" and pieces > 3
        expected = encoded("pcm", samples_of(TEXT.encode()), RATE, encoded_rate=24_000)
        assert samples.tobytes() == expected and len(samples) == len(TEXT) * FRAMES * SAMPLES * 3 // 2


def test_a_wav_reader_in_the_standard_library(server):
    """F40."""
    headers = {"authorization": "Bearer sk-test"}
    answer = httpx.post(server.url + "/v1/audio/speech", json={"input": TEXT, "response_format": "wav"}, headers=headers)
    with wave.open(io.BytesIO(answer.content)) as file:
        assert file.getnframes() / file.getframerate() == len(TEXT) * FRAMES * SAMPLES / RATE
