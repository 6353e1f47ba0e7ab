"""``stagevox serve`` with the packaged voice, its stages in processes of their own or in a thread of the server: what a client
hears is what ``Omni`` says."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
import wave
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import openai
import psutil
import pytest

from stagevox.audio.wav import pcm16, wav_bytes
from stagevox.cli.main import main

SRC = Path(__file__).resolve().parents[2] / "src"
TEXT = "12 + 30 = 42"
SAID = "twelve plus thirty equals forty two"
PROMPTS = ["hello there", "good morning", TEXT, "it is 7:30", "see you on 4 july", "the cat and the dog", "5 x 3 = 15", "july 21"]


@contextmanager
def serving(*options):
    """Run the command; yields its process, its address and an HTTP client."""
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "stagevox.cli.main", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        try:
            line = child.stdout.readline()
            assert line.startswith("stagevox: mini is ready at http://127.0.0.1:")
            url = line.split()[5]
            with httpx.Client(base_url=url, timeout=60) as http:
                yield SimpleNamespace(child=child, url=url, http=http, port=int(url.rpartition(":")[2]))
        finally:
            child.terminate()
            try:
                child.wait(20)
            finally:
                child.kill()


@pytest.fixture(scope="module", params=["process", "inline"])
def server(request):
    with serving("--driver", request.param, "--served-model-name", "mini", "voice") as server:
        yield server
        server.child.send_signal(signal.SIGTERM)
        assert server.child.wait(20) == 0


def children(pid):
    """Processes that ``pid`` has started."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


@pytest.mark.covers("SV-3")
def test_a_stage_that_is_killed():
    """F29, F32: who waits is told at once, the server ends, and nothing of it is left."""
    with serving("--driver", "process") as server:
        talker = children(server.child.pid)[1]
        everything = children(server.child.pid)
        assert "libtorch" not in Path(f"/proc/{server.child.pid}/maps").read_text()  # only the stages need it
        body = {"input": "one two three four five six seven eight nine ten", "response_format": "mp3"}
        os.kill(talker, signal.SIGSTOP)  # so that the request is in flight when it dies
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.http.post, "/v1/audio/speech", json=body)
            while not running(server):
                time.sleep(0.01)
            killed = time.monotonic()
            os.kill(talker, signal.SIGKILL)
            assert answer.result(20).status_code == 503 and time.monotonic() - killed < 2
        assert server.child.wait(20) == 1
        assert not [pid for pid in everything if psutil.pid_exists(pid)]
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_loads_leaves_nothing(number):
    """F32."""
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-m", "stagevox.cli.main", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
        end = time.monotonic() + 60
        while len(everything := children(child.pid)) < 3:
            assert time.monotonic() < end, "no stage was started"
            time.sleep(0.02)
        child.send_signal(number)
        assert child.wait(10) == 0
        assert not [pid for pid in everything if psutil.pid_exists(pid)]


def assert_same(data, samples):
    """16-bit samples, to the last bit or the one beside it: sums in another order, as in another batch, may round differently."""
    got, expected = (np.frombuffer(one, "<i2").astype(int) for one in (data, pcm16(samples)))
    assert len(got) == len(expected) and np.abs(got - expected).max(initial=0) <= 1


def running(server):
    return server.http.get("/health").json()["requests_running"]


def chat(server, text=TEXT, **fields):
    return server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}], **fields})


def speech(server, text=TEXT, **fields):
    answer = server.http.post("/v1/audio/speech", json={"input": text, "response_format": "pcm", "sample_rate": 16_000, **fields})
    assert answer.status_code == 200, answer.text
    return answer.content


@pytest.mark.covers("SV-1")
def test_chat_says_what_omni_says(server, omni):
    (result,) = omni.generate(TEXT)
    answer = chat(server, modalities=["text", "audio"], audio={"voice": "alloy", "format": "wav"}).json()
    message, usage = answer["choices"][0]["message"], answer["usage"]["completion_tokens_details"]
    assert message["content"] == message["audio"]["transcript"] == result.text == SAID
    assert base64.b64decode(message["audio"]["data"])[:44] == wav_bytes(result.audio, 16_000)[:44]
    assert_same(base64.b64decode(message["audio"]["data"])[44:], result.audio)
    assert usage["audio_tokens"] == len(result.codes) and usage["text_tokens"] == 7
    assert chat(server).json()["choices"][0]["message"] == {"role": "assistant", "content": SAID, "refusal": None}


@pytest.mark.covers("SV-1", "SV-3")
def test_a_stream_is_heard_while_it_is_made_and_is_the_same(server, omni):
    (result,) = omni.generate(TEXT)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="voice",
            messages=[{"role": "user", "content": TEXT}],
            modalities=["text", "audio"],
            audio={"voice": "alloy", "format": "wav"},
            stream=True,
        )
        chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    audios = [delta.audio for delta in deltas if delta.audio and delta.audio.data]
    assert "".join(delta.content or "" for delta in deltas) == SAID
    assert_same(b"".join(base64.b64decode(audio.data) for audio in audios)[44:], result.audio)
    assert len(audios) >= 4  # the chunks of 6, 12, 36 and 26 frames
    assert [chunk.choices[0].finish_reason for chunk in chunks].count("stop") == 1


@pytest.mark.covers("SV-1")
def test_twice_as_many_as_there_are_slots(server, omni):
    """F20, F07: sixteen at once, eight slots: each hears its own text, whole."""
    expected = [result.audio for result in omni.generate(PROMPTS)]

    async def main():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            bodies = [{"input": text, "response_format": "pcm", "sample_rate": 16_000} for text in PROMPTS * 2]
            return await asyncio.gather(*(http.post("/v1/audio/speech", json=body) for body in bodies))

    answers = asyncio.run(main())
    assert [answer.status_code for answer in answers] == [200] * 16
    for answer, samples in zip(answers, expected * 2, strict=True):
        assert_same(answer.content, samples)
    assert running(server) == 0


def test_a_seed_is_a_promise(server):
    """F38: twice alone, and among three others."""
    fields = {"seed": 11, "stage_params": {"talker": {"temperature": 0.9}}}
    first = np.frombuffer(speech(server, **fields), "<i2")
    assert_same(speech(server, **fields), first / 32767)
    assert len(speech(server, **fields | {"seed": 12})) != len(first) * 2

    async def main():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            body = {"input": TEXT, "response_format": "pcm", "sample_rate": 16_000, **fields}
            bodies = [{**body, "seed": 5}, body, {**body, "input": "hello there"}, {**body, "seed": 6}]
            return await asyncio.gather(*(http.post("/v1/audio/speech", json=one) for one in bodies))

    assert_same(asyncio.run(main())[1].content, first / 32767)


@pytest.mark.parametrize("modalities", [["text"], ["text", "audio"]])
def test_max_tokens(server, omni, modalities):
    """F22, F34: three words are written, and three are spoken."""
    answer = chat(server, modalities=modalities, max_tokens=3).json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "twelve plus thirty" and choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens_details"]["text_tokens"] == 3
    if "audio" in modalities:
        (result,) = omni.generate("twelve plus thirty")
        assert_same(base64.b64decode(choice["message"]["audio"]["data"])[44:], result.audio)


@pytest.mark.parametrize("stream_format", [None, "audio", "sse"])
@pytest.mark.parametrize(
    "text, code",
    [
        ("hello " * 500, "text_too_long"),
        ("five " * 60, "text_too_long"),
        ("\N{GRINNING FACE}", "empty_text"),
        ("xylophone", "vocabulary"),
    ],
    ids=["long", "many words", "emoji", "unknown"],
)
def test_texts_that_can_t_be_spoken(server, text, code, stream_format):
    """F31, F37: a status, in every mode alike."""
    answer = server.http.post("/v1/audio/speech", json={"input": text, "stream_format": stream_format})
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == ("input", code)


@pytest.mark.parametrize("stream", [False, True])
def test_a_talker_of_one_frame(server, stream):
    """F28."""
    answer = chat(server, modalities=["text", "audio"], stream=stream, stage_params={"talker": {"max_tokens": 1}})
    assert answer.status_code == 200 and '"finish_reason":"length"' in answer.text and "twelve" in answer.text


@pytest.mark.parametrize("after", [0, 1000])
def test_a_client_that_leaves_is_forgotten_within_a_second(server, after):
    """F19: others are served meanwhile."""
    for _ in range(5):
        body = b'{"input": "one two three four five six seven eight nine ten", "response_format": "pcm"}'
        head = (
            f"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", server.port)) as wire:
            wire.sendall(head.encode() + body)
            if after:
                assert wire.recv(after)
        left = time.monotonic()
        while running(server):
            assert time.monotonic() - left < 1.0
            time.sleep(0.01)
    assert speech(server)


def test_formats_of_real_speech(server, omni):
    """F41: decoded, they are the same speech."""
    from stagevox.audio.decode import decode_clip

    (result,) = omni.generate(TEXT)
    for name in ("wav", "flac", "mp3", "opus", "aac"):
        answer = server.http.post("/v1/audio/speech", json={"input": TEXT, "response_format": name})
        samples, rate = decode_clip(answer.content, 16_000)
        assert rate == 16_000 and abs(len(samples) - len(result.audio)) < 2100
        assert np.abs(samples).max() > 0.1


@pytest.mark.covers("SV-4")
@pytest.mark.parametrize("endpoint", ["speech", "chat"])
def test_a_benchmark_says_what_is_on_disk(server, omni, tmp_path, capsys, endpoint):
    """F50: durations are those of the WAVs, which hold what ``Omni`` says; the stages' tokens are those of the answers."""
    prompts, saved = tmp_path / "prompts.txt", tmp_path / "result.json"
    prompts.write_text("\n".join(PROMPTS))
    args = [
        "--base-url",
        server.url,
        "--endpoint",
        endpoint,
        "--prompts",
        prompts,
        "--num-prompts",
        len(PROMPTS),
        "--no-progress",
    ]
    args += ["--max-concurrency", 4, "--save-wavs", tmp_path / "wavs", "--save-result", saved]
    assert main(["bench", "serve", *map(str, args)]) == 0
    (run,) = json.loads(saved.read_text())["runs"]
    results = omni.generate(PROMPTS)
    for request, result in zip(run["requests"], results, strict=True):
        with wave.open(str(tmp_path / "wavs" / request["wav"])) as file:
            assert file.getframerate() == 16_000 and request["audio_seconds"] == file.getnframes() / 16_000
            assert_same(file.readframes(file.getnframes()), result.audio)
        assert request["audio_tokens"] == len(result.codes)
    frames = sum(len(result.codes) for result in results)
    assert run["total_audio_seconds"] == pytest.approx(frames / 25) == run["server_audio_seconds"]
    assert run["total_audio_tokens"] == frames
    # A talker also samples the token that ends it.
    assert run["stages"]["talker"]["tokens"] == frames + len(PROMPTS)
    assert run["stages"]["thinker"]["tokens"] == run["total_text_tokens"]
    assert all(0 < run["stages"][stage]["ms_per_token"] < 1e3 for stage in ("thinker", "talker"))
