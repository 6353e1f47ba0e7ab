"""Voices, models, health, metrics, version; keys, CORS, harmless fields."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter

from stagevox.models.prompts.chat import ROLES
from stagevox.pipeline.client import StageHealth
from stagevox.server.voices import OPENAI_VOICES, aliases
from support.scripted_client import MediaFrontEnd, make_blueprint, samples_of


@pytest.mark.covers("SV-1")
def test_models(serve):
    server = serve(served_model_names=("voice", "org/voice-2"))
    listed = server.call("GET", "/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["voice", "org/voice-2"]
    assert server.call("GET", "/v1/models/org/voice-2").json() == listed["data"][1]
    assert server.chat(model="org/voice-2").json()["model"] == "org/voice-2"
    assert server.chat(model="scripted").status_code == 404


def test_voices(serve):
    listed = serve().call("GET", "/v1/audio/voices").json()
    assert listed["voices"] == ["slt", "kal"]
    assert [voice["default"] for voice in listed["data"]] == [True, False]
    assert sorted(name for voice in listed["data"] for name in voice["aliases"]) == sorted(OPENAI_VOICES)


def test_an_alias_is_a_voice(serve):
    assert aliases(("slt", "kal"))["ash"] == "kal"
    assert "echo" not in aliases(("slt", "echo"))
    server = serve()
    data = server.speech("hello", voice="ash", response_format="pcm", sample_rate=16000).content
    assert server.client.submitted[0].first.options["voice"] == "kal"
    assert len(data) == 2 * len(samples_of(b"hello"))
    for voice in OPENAI_VOICES:
        assert server.speech("hello", voice=voice).status_code == 200


@pytest.mark.covers("SV-1")
def test_health_and_ready_tell_the_truth(serve):
    server = serve()

    def pages():
        answers = [server.call("GET", page) for page in ("/health", "/ready")]
        return [(answer.status_code, answer.json()["status"]) for answer in answers]

    assert pages() == [(200, "ok")] * 2
    server.client.stages["talker"] = StageHealth.STARTING
    assert pages() == [(503, "starting")] * 2
    assert server.chat().status_code == 503 and server.chat().headers["retry-after"]
    server.client.stages["talker"] = StageHealth.RESTARTING
    assert pages() == [(503, "degraded")] * 2
    server.client.stages["talker"] = StageHealth.DEAD
    assert pages() == [(503, "degraded")] * 2
    assert server.call("GET", "/health").json()["stages"] == {"thinker": "ready", "talker": "dead", "code2wav": "ready"}
    server.client.stages["talker"] = StageHealth.READY
    server.state.draining = True
    assert pages() == [(200, "draining"), (503, "draining")]
    assert server.chat().status_code == 503 and server.chat().json()["error"]["code"] == "draining"
    assert server.call("HEAD", "/health").status_code == 200


def test_a_dead_stage_refuses_only_those_that_need_it(serve):
    server = serve()
    server.client.stages["code2wav"] = StageHealth.DEAD
    assert server.chat().status_code == 200
    answer = server.chat(modalities=["text", "audio"])
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "stage_died"


@pytest.mark.covers("SV-1")
def test_metrics_shows_the_registry_it_is_given(serve):
    registry = CollectorRegistry()
    Counter("stagevox_things", "Things.", registry=registry).inc(3)
    answer = serve(registry=registry).call("GET", "/metrics")
    assert "stagevox_things_total 3.0" in answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=")


def test_version(serve):
    assert serve().call("GET", "/version").json().keys() == {"version"}


PROTECTED = [("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("POST", "/v1/audio/speech"), ("GET", "/v1/nothing")]


@pytest.mark.covers("SV-5")
@pytest.mark.parametrize("method, path", PROTECTED)
@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", "Bearer key-on", "Bearer key-one2", "Basic key-one", "key-one", "Bearer \xe9"]
)
def test_no_key_no_answer(serve, method, path, header):
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    answer = serve(api_keys=("key-one", "key-two")).call(method, path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key" and answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["Bearer key-one", "bearer key-two"])
def test_a_key_opens(serve, key):
    server = serve(api_keys=("key-one", "key-two"))
    assert server.call("GET", "/v1/models", headers={"authorization": key}).status_code == 200
    for page in ("/health", "/ready", "/metrics", "/version"):
        assert server.call("GET", page).status_code == 200


@pytest.mark.covers("SV-5")
def test_keys_are_compared_in_constant_time(serve, monkeypatch):
    """All of them, whichever fits, as digests of one length."""
    import hmac

    seen = []
    real = hmac.compare_digest
    monkeypatch.setattr("stagevox.server.auth.hmac.compare_digest", lambda a, b: seen.append((a, b)) or real(a, b))
    server = serve(api_keys=("a", "a much longer key"))
    assert server.call("GET", "/v1/models", headers={"authorization": "Bearer a"}).status_code == 200
    assert [(len(a), len(b)) for a, b in seen] == [(32, 32), (32, 32)]


def test_cors_is_off_unless_asked_for(serve):
    asks = {"origin": "https://page.example", "access-control-request-method": "POST"}
    for method in ("GET", "OPTIONS"):
        answer = serve().call(method, "/v1/models", headers=asks)
        assert not any(name.startswith("access-control") for name in answer.headers)
    server = serve(cors_origins=("https://page.example",), api_keys=("key",))
    answer = server.call("OPTIONS", "/v1/chat/completions", headers={**asks, "access-control-request-headers": "authorization"})
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://page.example"
    answer = server.call("GET", "/v1/models", headers={"origin": "https://page.example"})
    assert answer.status_code == 401 and answer.headers["access-control-allow-origin"] == "https://page.example"
    assert "access-control-allow-origin" not in server.call("GET", "/health", headers={"origin": "https://other.example"}).headers


def test_fields_that_clients_send_and_nothing_depends_on(serve):
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "x",
        "parallel_tool_calls": True,
        "logprobs": False,
        "top_logprobs": 0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "reasoning_effort": "none",
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "stop": None,
    }
    assert serve().chat(**harmless).status_code == 200
    assert serve().chat(stream=True, stream_options={"include_obfuscation": False}).status_code == 200


def test_a_conversation_sent_back_whole(serve):
    """With all the empty fields that SDKs put in."""
    answer = {"role": "assistant", "content": "hi", "refusal": None, "annotations": [], "audio": None, "tool_calls": None}
    turns = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        answer,
        {"role": "user", "content": "more"},
    ]
    given = serve().post("/v1/chat/completions", {"messages": turns})
    assert given.status_code == 200 and given.json()["choices"][0]["message"]["content"] == "more"


def test_a_front_end_that_takes_messages_gets_them_all(serve):
    server = serve(blueprint=make_blueprint(MediaFrontEnd()))
    turns = [
        {"role": "system", "content": "be kind"},
        {"role": "assistant", "content": None, "audio": {"id": "x", "transcript": "earlier"}},
        {"role": "user", "content": [{"type": "text", "text": "more"}]},
    ]
    assert server.post("/v1/chat/completions", {"messages": turns}).status_code == 200
    prompt = server.client.submitted[0].first.options["prompt"]
    assert prompt["messages"] == [
        {"role": "system", "content": [{"type": "text", "text": "be kind"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "earlier"}]},
        {"role": "user", "content": [{"type": "text", "text": "more"}]},
    ]


@pytest.mark.parametrize("content", ["be kind", [{"type": "text", "text": "be kind"}]])
def test_a_developer_s_message_is_the_system_s(serve, content):
    server = serve(blueprint=make_blueprint(MediaFrontEnd()))
    turns = [{"role": "developer", "content": content}, {"role": "user", "content": "hello"}]
    assert server.post("/v1/chat/completions", {"messages": turns}).status_code == 200
    prompt = server.client.submitted[0].first.options["prompt"]
    assert [message["role"] for message in prompt["messages"]] == ["system", "user"]
    assert {message["role"] for message in prompt["messages"]} <= set(ROLES)  # those of published chat templates


def test_pages_of_others(serve):
    from fastapi import APIRouter

    def page(state):
        routes = APIRouter()

        @routes.get("/")
        async def home():
            return {"names": state.names}

        return routes

    assert serve(routers=(page,)).call("GET", "/").json() == {"names": ["scripted"]}


def test_the_description_is_served(serve):
    paths = serve().call("GET", "/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/audio/speech", "/v1/audio/voices", "/v1/models", "/health"} <= paths.keys()
