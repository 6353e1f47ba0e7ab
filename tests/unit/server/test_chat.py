"""Chat completions: fields, deltas, ends."""

from __future__ import annotations

import base64
import io
import json
import wave

import numpy as np
import pytest

from stagevox.audio.encode import encoded
from stagevox.audio.wav import pcm16
from support.scripted_client import FRAMES, RATE, make_blueprint, samples_of

BOTH = ["text", "audio"]


def chunks(response):
    """The chunks of a stream, whose end is checked."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def joined(streamed, index=0):
    """``(content, audio bytes, transcript)`` of a choice's deltas."""
    deltas = [choice["delta"] for chunk in streamed for choice in chunk["choices"] if choice["index"] == index]
    audios = [delta["audio"] for delta in deltas if delta.get("audio")]
    return (
        "".join(delta.get("content") or "" for delta in deltas),
        b"".join(base64.b64decode(audio.get("data") or "") for audio in audios),
        "".join(audio.get("transcript") or "" for audio in audios),
    )


def test_text_only_ends_at_the_thinker(serve):
    server = serve()
    answer = server.chat("héllo").json()
    assert answer["object"] == "chat.completion" and answer["model"] == "scripted"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "héllo", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["completion_tokens_details"]["audio_tokens"] == 0
    assert server.client.submitted[0].last_stage == "thinker"


@pytest.mark.covers("SV-1")
def test_text_and_audio(serve):
    server = serve()
    answer = server.chat("hello there", modalities=BOTH, audio={"voice": "kal", "format": "wav"}, seed=3).json()
    message = answer["choices"][0]["message"]
    assert message["content"] == message["audio"]["transcript"] == "hello there"
    assert message["audio"]["expires_at"] > answer["created"]
    expected = samples_of(b"hello there", "kal", 3)
    assert base64.b64decode(message["audio"]["data"]) == encoded("wav", expected, RATE)
    details = answer["usage"]["completion_tokens_details"]
    assert (details["text_tokens"], details["audio_tokens"]) == (11, 11 * FRAMES)
    assert answer["usage"]["total_tokens"] == 11 + 11 + 11 * FRAMES


def test_audio_alone_has_no_content(serve):
    message = serve().chat(modalities=["audio"]).json()["choices"][0]["message"]
    assert message["content"] is None and message["audio"]["transcript"] == "hello there"


@pytest.mark.covers("SV-1")
def test_streamed_text_never_shows_half_a_character(serve):
    text = "naïve 日本 \N{MUSICAL SYMBOL G CLEF}!"
    streamed = chunks(serve().chat(text, stream=True))
    pieces = [choice["delta"].get("content") for chunk in streamed for choice in chunk["choices"]]
    assert "".join(filter(None, pieces)) == text
    assert sum(map(bool, pieces)) == len(text) < len(text.encode())
    assert not any("\ufffd" in piece for piece in pieces if piece)


@pytest.mark.parametrize("format", ["wav", "pcm16", "flac", "mp3", "opus", "aac"])
def test_streamed_deltas_join_to_one_file(serve, format):
    """F25, F41: one header; the samples of the joined deltas are those of the whole answer."""
    fields = {"modalities": BOTH, "audio": {"voice": "slt", "format": format}}
    streamed = chunks(serve().chat(stream=True, **fields))
    content, audio, transcript = joined(streamed)
    assert content == transcript == "hello there"
    assert len([1 for chunk in streamed for choice in chunk["choices"] if (choice["delta"].get("audio") or {}).get("data")]) >= 2
    whole = base64.b64decode(serve().chat(**fields).json()["choices"][0]["message"]["audio"]["data"])
    magic = {"wav": b"RIFF", "flac": b"fLaC", "opus": b"OggS", "mp3": (b"\xff", b"ID3"), "aac": b"\xff\xf1", "pcm16": b""}
    for file in (audio, whole):
        assert file.startswith(magic[format])
    if format == "wav":
        with wave.open(io.BytesIO(whole)) as file:
            assert file.getnframes() == 11 * FRAMES * 320
            assert audio[44:] == file.readframes(10**6) and audio.count(b"RIFF") == 1
    elif format == "pcm16":
        assert audio == whole
    if format in ("wav", "pcm16", "flac"):
        return
    assert len(audio) > 0.5 * len(whole)


@pytest.mark.covers("SV-1")
@pytest.mark.parametrize("modalities", [None, BOTH])
@pytest.mark.parametrize("n", [1, 3])
def test_one_end_for_each_choice(serve, modalities, n):
    """F26: null until the end, then one reason a choice, and nothing after it."""
    streamed = chunks(serve().chat(stream=True, modalities=modalities, n=n))
    reasons = {index: [] for index in range(n)}
    for chunk in streamed:
        for choice in chunk["choices"]:
            reasons[choice["index"]].append(choice["finish_reason"])
    for each in reasons.values():
        assert each[-1] == "stop" and set(each[:-1]) == {None} and len(each) > 3
    first = [chunk["choices"][0]["delta"].get("role") for chunk in streamed[:n]]
    assert first == ["assistant"] * n


def test_usage_comes_last_and_only_if_asked_for(serve):
    streamed = chunks(serve().chat(stream=True, modalities=BOTH, stream_options={"include_usage": True}))
    assert [chunk["usage"] for chunk in streamed[:-1]] == [None] * (len(streamed) - 1)
    assert streamed[-1]["choices"] == []
    assert streamed[-1]["usage"] == serve().chat(modalities=BOTH).json()["usage"]
    assert all("usage" not in chunk for chunk in chunks(serve().chat(stream=True)))


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("modalities", [None, BOTH])
def test_plain_fields_reach_the_stage_that_writes(serve, field, modalities):
    """F34: at most five text tokens, the end is ``length``, and the other stages keep their defaults."""
    server = serve()
    answer = server.chat(modalities=modalities, temperature=0.5, top_p=0.9, **{field: 5}).json()
    assert answer["choices"][0]["message"]["content"] == "hello"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens_details"]["text_tokens"] == 5
    assert server.client.submitted[0].sampling == {"thinker": {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9}}


def test_stage_params_are_laid_over(serve):
    server = serve()
    server.chat(
        modalities=BOTH, max_tokens=9, seed=4, stage_params={"talker": {"max_tokens": 3, "seed": 1}, "thinker": {"max_tokens": 4}}
    )
    assert server.client.submitted[0].sampling == {
        "thinker": {"max_tokens": 4, "seed": 4},
        "talker": {"max_tokens": 3, "seed": 1},
        "code2wav": {"seed": 4},
    }


def test_the_seed_is_the_answer_s(serve):
    """F38: the same seed, the same speech; choices count up from it."""
    fields = {"modalities": BOTH, "audio": {"voice": "slt", "format": "pcm16", "sample_rate": RATE}, "n": 2}
    first, again, other = (serve().chat(seed=seed, **fields).json()["choices"] for seed in (5, 5, 6))
    data = [[choice["message"]["audio"]["data"] for choice in choices] for choices in (first, again, other)]
    assert data[0] == data[1] and data[0][0] != data[0][1] and data[0][1] == data[2][0]
    assert base64.b64decode(data[0][0]) == pcm16(samples_of(b"hello there", "slt", 5))


@pytest.mark.parametrize("stream", [False, True])
def test_a_talker_without_a_frame_is_a_clean_end(serve, stream):
    """F28."""
    server = serve()
    server.client.script = lambda request, real=server.client.script: silent(server.client, request)
    answer = server.chat(modalities=BOTH, stream=stream)
    if stream:
        streamed = chunks(answer)
        content, audio, _ = joined(streamed)
        assert streamed[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        message = answer.json()["choices"][0]["message"]
        content, audio = message["content"], base64.b64decode(message["audio"]["data"])
    assert content == "hello there" and audio[:4] == b"RIFF" and len(audio) == 44


async def silent(client, request):
    """A Thinker that writes and a Talker that says nothing."""
    thinking = type(client).script(client, request)
    async for event in thinking:
        if event.stage != "thinker":
            break
        yield event
    client.reasons[request.req_id] = "stop"


@pytest.mark.parametrize("cap, status", [(0, 400), (1, 200)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tiny_cap_of_the_talker(serve, cap, status, stream):
    answer = serve().chat(modalities=BOTH, stream=stream, stage_params={"talker": {"max_tokens": cap}})
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["param"] == "stage_params.talker.max_tokens"
    elif stream:
        assert chunks(answer)[-1]["choices"][0]["finish_reason"] == "length"
    else:
        assert answer.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["there", ["xx", " th"], "o t"])
def test_a_stop_cuts_the_text_and_the_work(serve, stream, stop):
    server = serve()
    answer = server.chat("hello there and then some", stop=stop, stream=stream)
    if stream:
        streamed = chunks(answer)
        text, reason = joined(streamed)[0], streamed[-1]["choices"][0]["finish_reason"]
    else:
        (choice,) = answer.json()["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    first = stop if isinstance(stop, str) else stop[1]
    assert (text, reason) == ("hello there".split(first)[0], "stop")
    assert server.client.aborted == [server.client.submitted[0].req_id] and not server.client.live


def test_text_that_only_begins_like_a_stop_is_kept(serve):
    assert joined(chunks(serve().chat("hello the", stop="there", stream=True)))[0] == "hello the"


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_piece_is_a_status_in_both_modes(serve, stream):
    from stagevox.errors import TextTooLongError

    server = serve()
    server.client.fail["hello there"] = TextTooLongError("text", "too long for the Talker"), 0
    answer = server.chat(stream=stream, modalities=BOTH)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content"


def test_an_error_after_it_is_the_last_event(serve):
    from stagevox.errors import DeadlineError

    server = serve()
    server.client.fail["hello there"] = DeadlineError("talker: no input"), 4
    streamed = chunks(server.chat(stream=True))
    assert streamed[-1]["error"]["type"] == "timeout_error"
    assert joined([chunk for chunk in streamed if "choices" in chunk])[0] == "hell"
    assert all(choice["finish_reason"] is None for chunk in streamed[:-1] for choice in chunk["choices"])


def test_earlier_audio_is_known_by_its_id(serve):
    server = serve()
    message = server.chat("good morning", modalities=BOTH).json()["choices"][0]["message"]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "audio": {"id": message["audio"]["id"]}}]
    answer = server.post("/v1/chat/completions", {"messages": [*turns, {"role": "user", "content": "and now"}]})
    assert answer.json()["choices"][0]["message"]["content"] == "and now"
    turns[1]["audio"]["id"] = "audio-gone"
    answer = server.post("/v1/chat/completions", {"messages": [*turns, {"role": "user", "content": "and now"}]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages[1].audio.id"


def test_pcm16_is_at_openai_s_rate(serve):
    data = serve().chat(modalities=BOTH, audio={"format": "pcm16"}).json()["choices"][0]["message"]["audio"]["data"]
    samples = np.frombuffer(base64.b64decode(data), "<i2")
    assert len(samples) == 11 * FRAMES * 320 * 24_000 // RATE


def test_a_model_that_does_not_write_says_so(serve):
    answer = serve(blueprint=make_blueprint(text_stage=None)).chat()
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "no_text"
