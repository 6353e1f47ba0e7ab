"""Whatever is wrong with a request is a 4xx in OpenAI's shape that names the field, before the pipeline hears of it."""

from __future__ import annotations

import base64
import json

import pytest
from pydantic import ValidationError

from stagevox.errors import HookRaisedError
from stagevox.server.protocol.chat import ChatRequest
from support.scripted_client import MediaFrontEnd, make_blueprint

BOTH = ["text", "audio"]
USER = [{"role": "user", "content": "hello"}]


def error_of(answer, status=400):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    (key,) = answer.json()
    error = answer.json()[key]
    assert key == "error" and set(error) == {"message", "type", "param", "code"} and error["message"]
    assert "Traceback" not in error["message"]
    return error


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\N{GRINNING FACE}"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, "messages[0].content"),
        ({"messages": USER, "max_token": 5}, "max_token"),
        ({"messages": USER, "max_tokens": 0}, "max_tokens"),
        ({"messages": USER, "max_tokens": 1.5}, "max_tokens"),
        ({"messages": USER, "max_tokens": "5"}, "max_tokens"),
        ({"messages": USER, "max_completion_tokens": -1}, "max_completion_tokens"),
        ({"messages": USER, "max_tokens": 5, "max_completion_tokens": 6}, None),
        ({"messages": USER, "min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"messages": USER, "temperature": 3}, "temperature"),
        ({"messages": USER, "temperature": "hot"}, "temperature"),
        ({"messages": USER, "top_p": 0}, "top_p"),
        ({"messages": USER, "seed": -1}, "seed"),
        ({"messages": USER, "seed": 2**63}, "seed"),
        ({"messages": USER, "n": 0}, "n"),
        ({"messages": USER, "n": 1000}, "n"),
        ({"messages": USER, "stop": ""}, "stop"),
        ({"messages": USER, "stop": ["a"] * 5}, "stop"),
        ({"messages": USER, "stop": "a", "modalities": BOTH}, "stop"),
        ({"messages": USER, "modalities": []}, "modalities"),
        ({"messages": USER, "modalities": ["video"]}, "modalities[0]"),
        ({"messages": USER, "audio": {"voice": "slt"}}, "audio"),
        ({"messages": USER, "modalities": BOTH, "audio": {"voice": ""}}, "audio.voice"),
        ({"messages": USER, "modalities": BOTH, "audio": {"voice": "SLT"}}, "audio.voice"),
        ({"messages": USER, "modalities": BOTH, "audio": {"voice": "nobody"}}, "audio.voice"),
        ({"messages": USER, "modalities": BOTH, "audio": {"voice": {"id": "nobody"}}}, "audio.voice"),
        ({"messages": USER, "modalities": BOTH, "audio": {"voice": 5}}, "audio.voice"),
        ({"messages": USER, "modalities": BOTH, "audio": {"format": "ogg"}}, "audio.format"),
        ({"messages": USER, "modalities": BOTH, "audio": {"format": " WAV "}}, "audio.format"),
        ({"messages": USER, "modalities": BOTH, "audio": {"sample_rate": 1}}, "audio.sample_rate"),
        ({"messages": USER, "stage_params": {"talkr": {}}}, "stage_params.talkr"),
        ({"messages": USER, "stage_params": {"talker": {"heat": 1}}}, "stage_params.talker.heat"),
        ({"messages": USER, "stage_params": {"talker": {"seed": -1}}}, "stage_params.talker.seed"),
        ({"messages": USER, "stage_params": {"talker": 5}}, "stage_params.talker"),
        ({"messages": USER, "logprobs": True}, "logprobs"),
        ({"messages": USER, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": USER, "logit_bias": {"5": 1}}, "logit_bias"),
        ({"messages": USER, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
        ({"messages": USER, "functions": [{}]}, "functions"),
        ({"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": USER, "prediction": {}}, "prediction"),
        ({"messages": USER, "reasoning_effort": "high"}, "reasoning_effort"),
        ({"messages": USER, "web_search_options": {}}, "web_search_options"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_chat(serve, body, param, stream):
    """F11, F31, F34, F41."""
    server = serve()
    error = error_of(server.post("/v1/chat/completions", {**body, "stream": stream}))
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert not server.client.submitted


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": "  \t"}, "input"),
        ({"input": "\N{GRINNING FACE}"}, "input"),
        ({"input": 5}, "input"),
        ({"input": "a", "voice": ""}, "voice"),
        ({"input": "a", "voice": "Alloy"}, "voice"),
        ({"input": "a", "voice": "nobody"}, "voice"),
        ({"input": "a", "response_format": "ogg"}, "response_format"),
        ({"input": "a", "response_format": " WAV "}, "response_format"),
        ({"input": "a", "response_format": ""}, "response_format"),
        ({"input": "a", "speed": 0}, "speed"),
        ({"input": "a", "speed": 5}, "speed"),
        ({"input": "a", "speed": "fast"}, "speed"),
        ({"input": "a", "stream_format": "wav"}, "stream_format"),
        ({"input": "a", "instructions": "whisper"}, "instructions"),
        ({"input": "a", "sample_rate": 10}, "sample_rate"),
        ({"input": "a", "seed": -1}, "seed"),
        ({"input": "a", "stage_params": {"talker": {"max_tokens": 0}}}, "stage_params.talker.max_tokens"),
        ({"input": "a", "voic": "slt"}, "voic"),
    ],
    ids=str,
)
def test_speech(serve, body, param):
    """F31, F41."""
    server = serve()
    assert error_of(server.post("/v1/audio/speech", body))["param"] == param
    assert not server.client.submitted


def test_stream_options_without_a_stream(serve):
    assert error_of(serve().chat(stream_options={"include_usage": True}))["param"] == "stream_options"


def test_voices_are_named_and_the_nearest_field_too(serve):
    assert "slt, kal" in error_of(serve().speech("a", voice="Slt"))["message"]
    assert "max_tokens" in error_of(serve().chat(max_token=5))["message"]


@pytest.mark.parametrize("model", ["scripted", None])
def test_the_model_s_name(serve, model):
    assert serve().chat(model=model).status_code == 200
    assert serve().speech("a", model=model).status_code == 200


def test_another_model_s_name_is_404(serve):
    for answer in (serve().chat(model="gpt"), serve().speech("a", model="gpt"), serve().call("GET", "/v1/models/gpt")):
        assert error_of(answer, 404)["code"] == "model_not_found"


@pytest.mark.parametrize(
    "content, headers",
    [
        (b"", {}),
        (b"{", {"content-type": "application/json"}),
        (b"\xff\xfe", {"content-type": "application/json"}),
        (b"null", {"content-type": "application/json"}),
        (b"[]", {"content-type": "application/json"}),
        (b"[" * 100_000, {"content-type": "application/json"}),
        (b'{"messages": ' + b"1" * 5000 + b"}", {"content-type": "application/json"}),
        (b'{"messages": NaN}', {"content-type": "application/json"}),
        (b'{"input": "a"}', {"content-type": "text/plain"}),
        (b"input=a", {"content-type": "application/x-www-form-urlencoded"}),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/speech"])
def test_bodies_that_are_no_request(serve, path, content, headers):
    error_of(serve().call("POST", path, content=content, headers=headers))


@pytest.mark.parametrize("kind, says", [("text/plain", "sent as 'text/plain', not with"), (None, "sent without")])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/speech"])
def test_a_body_of_another_content_type_is_told_so(serve, path, kind, says):
    headers = {} if kind is None else {"content-type": kind}
    error = error_of(serve().call("POST", path, content=b'{"input": "a"}', headers=headers))
    assert error["message"] == f"the body: {says} Content-Type: application/json"


def test_sampling_parameters_of_speech_have_a_place(serve):
    error = error_of(serve().call("POST", "/v1/audio/speech", json={"input": "a", "temperature": 0.5}))
    assert error["message"] == "temperature: no such field; sampling parameters go into stage_params"


PART = {"type": "text", "text": "a"}
MANY = {
    "messages of nothing": ({"messages": [{}] * 100_000}, "messages[0].role"),
    "messages": ({"messages": USER * 4097}, "messages"),
    "parts of nothing": ({"messages": [{"role": "user", "content": [{}] * 100_000}]}, "messages[0].content[0]"),
    "parts": ({"messages": [{"role": "user", "content": [PART] * 1025}]}, "messages[0].content"),
    "modalities": ({"messages": USER, "modalities": ["video"] * 100_000}, "modalities[0]"),
    "stops": ({"messages": USER, "stop": [1] * 100_000}, "stop"),
    "fields": ({"messages": USER} | {f"a{n}": 1 for n in range(100_000)}, None),
    "fields of a message": ({"messages": [{"role": "user"} | {f"a{n}": 1 for n in range(100_000)}]}, "messages[0]"),
    "stages": ({"messages": USER, "stage_params": {f"a{n}": 1 for n in range(100_000)}}, "stage_params"),
}


@pytest.mark.parametrize("case", MANY)
def test_a_body_of_many_errors_is_refused_for_few(serve, case):
    """Each error that pydantic keeps takes memory and time: they must not go by the body's size."""
    body, param = MANY[case]
    error = error_of(serve().post("/v1/chat/completions", body))
    assert error["param"] == param
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate_json(json.dumps(body))
    assert caught.value.error_count() < 10


def test_as_many_messages_and_parts_as_may_be(serve):
    assert serve().post("/v1/chat/completions", {"messages": USER * 4096}).status_code == 200
    parts = [{"type": "text", "text": ""}] * 1023 + [PART]
    assert serve().post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}).status_code == 200


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/models/", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/health", 405),
        ("GET", "/docs", 404),
    ],
)
def test_wrong_pages_and_methods(serve, method, path, status):
    answer = serve().call(method, path)
    error_of(answer, status)
    assert status != 405 or answer.headers["allow"]


def test_an_unexpected_exception_is_500_in_the_same_shape(serve, caplog):
    server = serve()
    server.blueprint.front_end.admit = lambda req_id, prompt: 1 / 0
    error = error_of(server.chat(), 500)
    assert error["code"] == "internal_error" and "division" not in error["message"]
    assert "ZeroDivisionError" in caplog.text
    del server.blueprint.front_end.admit
    assert server.chat().status_code == 200


def test_a_route_that_breaks_is_500_in_the_same_shape(serve):
    server = serve()
    server.state.client.health = lambda: 1 / 0
    error_of(server.call("GET", "/health"), 500)


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_error_belongs_to_its_request(serve, stream):
    """F11."""
    from stagevox.errors import RequestFailedError

    server = serve()
    server.client.fail["hello there"] = RequestFailedError(f"talker: {HookRaisedError('preprocess', 'oops')}"), 0
    assert error_of(server.chat(stream=stream), 500)["code"] == "request_failed"
    assert server.chat("hello you", stream=stream).status_code == 200


@pytest.mark.parametrize(
    "part, param",
    [
        ({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}, "input_audio.data"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, "image_url.url"),
    ],
)
def test_media_for_a_model_that_takes_none(serve, part, param):
    answer = serve().post("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
    error = error_of(answer)
    assert error["param"] == f"messages[0].content[0].{param}" and error["code"] == "unsupported_media"


BROKEN_JPEG = base64.b64encode(b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01" + bytes(20)).decode()


@pytest.mark.parametrize(
    "part, param",
    [
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "input_audio.data"),
        ({"type": "input_audio", "input_audio": {"data": "%%%", "format": "wav"}}, "input_audio.data"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "input_audio.data"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio.data"),
        ({"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{BROKEN_JPEG}"}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": "data:image/jpeg,abc"}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": "data:image/jpeg"}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": "http://example.invalid/a.jpg"}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": "ftp://example.invalid/a"}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": ""}}, "image_url.url"),
        ({"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,"}}, "audio_url.url"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}, "video_url.url"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_damaged_and_unreachable_media(serve, part, param, stream):
    """F44."""
    server = serve(blueprint=make_blueprint(MediaFrontEnd()))
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is this"}, part]}]
    error = error_of(server.post("/v1/chat/completions", {"messages": messages, "stream": stream}))
    assert error["param"] == f"messages[0].content[1].{param}"
    assert not server.client.submitted
