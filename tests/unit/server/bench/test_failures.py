"""Whatever isn't a whole answer is a failure, by its kind; and a player's breaks are those of a script."""

from __future__ import annotations

import base64
import socket

import numpy as np
import pytest

from stagevox.audio.wav import wav_bytes
from support.raw_http import ABORT, END, chunk, delta, events, head, raw_server

SPEECH = np.sin(np.arange(1600)).astype(np.float32)
WAV = wav_bytes(SPEECH, 16_000)
SOUND = {"audio": {"id": "a", "data": base64.b64encode(WAV).decode()}}
JSON_HEAD = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"


def refusal(status, message="no"):
    body = b'{"error": {"message": "%s"}}' % message.encode()
    return [JSON_HEAD % (status, len(body), body)]


BROKEN = {
    "busy": ("speech", refusal(b"429 Too Many Requests"), "HTTP 429"),
    "failed": ("speech", refusal(b"500 Internal Server Error"), "HTTP 500"),
    "an error with status 200": ("speech", refusal(b"200 OK"), "bad audio"),
    "cut off before the head": ("speech", [ABORT], "broken stream"),
    "cut off in the sound": ("speech", [head(), chunk(WAV), ABORT], "broken stream"),
    "nothing": ("speech", [head(), END], "empty audio"),
    "a header alone": ("speech", [head(), chunk(WAV[:44]), END], "empty audio"),
    "half a header": ("speech", [head(), chunk(WAV[:30]), END], "bad audio"),
    "half a sample": ("speech", [head(), chunk(WAV[:-1]), END], "bad audio"),
    "a page": ("speech", [head("text/html"), chunk(b"<p>hello"), END], "bad audio"),
    "noise": ("speech", [head(), chunk(bytes(100)), END], "bad audio"),
    "silence for ever": ("speech", [head(), chunk(WAV), 30.0], "timeout"),
    "chat busy": ("chat", refusal(b"503 Service Unavailable"), "HTTP 503"),
    "chat not streamed": ("chat", refusal(b"200 OK"), "broken stream"),
    "chat without its end": ("chat", events(delta(content="hi"), delta(**SOUND), delta("stop")), "broken stream"),
    "chat without a reason": ("chat", events(delta(content="hi"), delta(**SOUND), "[DONE]"), "broken stream"),
    "chat that goes on": ("chat", events(delta("stop", content="hi", **SOUND), delta("stop"), "[DONE]"), "broken stream"),
    "chat after its end": ("chat", events(delta("stop", content="hi", **SOUND), "[DONE]", delta(content="x")), "broken stream"),
    "chat with an error": ("chat", events(delta(content="hi"), {"error": {"message": "it broke"}}, "[DONE]"), "error event"),
    "chat without sound": ("chat", events(delta(content="hi"), delta("stop"), "[DONE]"), "empty audio"),
    "chat without text": ("chat", events(delta("stop", **SOUND), "[DONE]"), "empty text"),
    "chat of something else": ("chat", events("[1, 2", "[DONE]"), "broken stream"),
    "chat of other things": ("chat", events(["a"], "[DONE]"), "broken stream"),
    "chat with bad base64": ("chat", events(delta(audio={"data": "%%%"}), "[DONE]"), "broken stream"),
}


@pytest.mark.covers("SV-4")
@pytest.mark.parametrize("name", BROKEN)
def test_what_isn_t_whole_is_a_failure(bench, name):
    """F50: alone it makes the run fail; beside a good one it is the one that is counted out."""
    endpoint, steps, kind = BROKEN[name]
    good = [head(), chunk(WAV), END] if endpoint == "speech" else events(delta("stop", content="hi", **SOUND), "[DONE]")
    args = ["--endpoint", endpoint, "--num-warmups", 0, "--timeout", 0.5 if kind == "timeout" else 20]
    with raw_server(lambda path, body: steps) as server:
        alone = bench(server.url, "--num-prompts", 2, *args)
    assert alone.code == 1 and f"2 x {kind}" in alone.err
    (run,) = alone.result["runs"]
    assert (run["completed"], run["failed"], run["failures"]) == (0, 2, {kind: 2})
    assert run["total_audio_samples"] == 0 and "mean_e2el_ms" not in run and run["audio_seconds_per_second"] == 0
    turns = iter([steps, good] * 2)
    with raw_server(lambda path, body: next(turns)) as server:
        mixed = bench(server.url, "--num-prompts", 4, "--max-concurrency", 1, *args)
    assert mixed.code == 0
    (run,) = mixed.result["runs"]
    assert (run["completed"], run["failures"], run["total_audio_samples"]) == (2, {kind: 2}, 2 * len(SPEECH))


def test_no_server_is_a_failure(bench):
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    done = bench(url, "--num-prompts", 2, "--num-warmups", 0)
    assert done.code == 1 and done.result["runs"][0]["failures"] == {"no connection": 2}
    warm = bench(url, "--num-prompts", 2)
    assert warm.code == 1 and warm.result is None and "warm-up 1 of 2" in warm.err
    late = bench(url, "--ready-timeout", 0.3)
    assert late.code == 1 and "was not ready" in late.err


def test_a_server_that_takes_connections_and_says_nothing_is_not_ready(bench):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = bench(url, "--ready-timeout", 0.3)
        assert done.err == f"stagevox: error: {url}/ was not ready within 0.3 s\n"
        assert done.code == 1 and done.result is None
        silent.settimeout(5)
        silent.accept()[0].close()  # it did connect


@pytest.mark.covers("SV-4")
@pytest.mark.parametrize("endpoint", ["speech", "chat"])
def test_breaks_are_those_of_the_script(bench, endpoint):
    """0.1 s of sound at once, nothing for 0.4 s, the header apart, then the rest at once: one break of about 0.3 s."""
    parts = [WAV[:44], WAV[44:], (pcm := WAV[44:]) + pcm + pcm]
    if endpoint == "speech":
        steps = [head(), chunk(parts[0]), 0.2, chunk(parts[1]), 0.4, chunk(parts[2]), END]
    else:
        first, second, third = ({"audio": {"data": base64.b64encode(part).decode()}} for part in parts)
        pieces = events(delta(content="hi"), delta(**first), delta(**second), delta(**third), delta("stop"), "[DONE]")
        steps = [*pieces[:3], 0.2, pieces[3], 0.4, *pieces[4:]]
    with raw_server(lambda path, body: steps) as server:
        done = bench(server.url, "--endpoint", endpoint, "--num-prompts", 1, "--num-warmups", 0, "--save-detailed")
    (run,) = done.result["runs"]
    (request,) = run["requests"]
    assert request["ttfa_s"] >= 0.2  # a header is no sound
    assert endpoint == "speech" or request["ttft_s"] < request["ttfa_s"]
    (at_first, first), (at_rest, rest) = request["arrivals"]
    assert (first, rest) == (1600, 4800) and run["total_audio_samples"] == 6400
    gap = at_rest - at_first
    assert gap >= 0.39 and run["underruns"] == run["requests_with_underruns"] == 1
    assert run["stalled_seconds"] == pytest.approx(gap - 0.1, abs=1e-6)
    assert run["needed_head_start_ms"] == pytest.approx(1e3 * (gap - 0.1), abs=1e-3)
    assert run["continuity"] == pytest.approx(0.4 / (0.4 + gap - 0.1)) == run["worst_continuity"]
    assert run["stages"] is None  # this server doesn't tell


def test_requests_are_what_other_servers_take(bench):
    """OpenAI's fields alone, unless more are asked for."""
    good = [head(), chunk(WAV), END]
    with raw_server(
        lambda path, body: good if "speech" in path else events(delta("stop", content="x", **SOUND), "[DONE]")
    ) as server:
        bench(server.url, "--num-prompts", 1, "--num-warmups", 0, "--voice", "ash", "--model", "tts")
        bench(server.url, "--num-prompts", 1, "--num-warmups", 0, "--endpoint", "chat", "--voice", "ash")
    (speech_path, speech), (chat_path, chat) = server.asked
    prompt = "sixty two minus nineteen equals forty three"
    assert speech_path == "/v1/audio/speech" and chat_path == "/v1/chat/completions"
    assert speech == {"input": prompt, "response_format": "wav", "stream_format": "audio", "model": "tts", "voice": "ash"}
    assert chat == {
        "messages": [{"role": "user", "content": prompt}],
        "modalities": ["text", "audio"],
        "audio": {"format": "wav", "voice": "ash"},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
