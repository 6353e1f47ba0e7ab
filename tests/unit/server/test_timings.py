"""``/v1/timings``: where the time went, with counts that add up."""

from __future__ import annotations

import asyncio

import pytest

from stagevox.pipeline.events import EmitOutput
from stagevox.pipeline.request import StageStats
from stagevox.server.record import RequestRecord
from stagevox.server.timings import MOST_MARKS, RequestTimings
from stagevox.stage.payload import StageOutput
from support.scripted_client import FRAMES, RATE, SAMPLES, ScriptedClient

TEXT = "hello there"


def timing(server, answer):
    found = server.call("GET", f"/v1/timings/{answer.headers['x-request-id']}")
    assert found.status_code == 200
    return found.json()


@pytest.mark.covers("SV-4")
@pytest.mark.parametrize("endpoint", ["chat", "speech"])
def test_one_request_adds_up(serve, endpoint):
    server = serve(client=ScriptedClient(pause=0.002))
    if endpoint == "chat":
        answer = server.chat(TEXT, modalities=["text", "audio"])
    else:
        answer = server.speech(TEXT, response_format="wav")
    assert answer.status_code == 200
    kept = timing(server, answer)
    frames = FRAMES * len(TEXT)
    assert (kept["endpoint"], kept["stream"], kept["finish_reason"], kept["error"]) == (endpoint, False, "stop", None)
    assert (kept["text_tokens"], kept["audio_tokens"]) == (len(TEXT), frames)
    assert kept["audio_seconds"] == pytest.approx(frames * SAMPLES / RATE)
    assert kept["audio_rtf"] == pytest.approx(kept["finished_s"] / kept["audio_seconds"])
    stages = {stage["name"]: stage for stage in kept["stages"]}
    assert list(stages) == ["thinker", "talker", "code2wav"]
    assert (stages["thinker"]["tokens"], stages["talker"]["tokens"], stages["code2wav"]["tokens"]) == (len(TEXT), frames, 0)
    for stage in stages.values():
        assert stage["tokens"] == sum(tokens for _, tokens in stage["marks"])
        times = [at for at, _ in stage["marks"]]
        assert times == sorted(times) and (times[0], times[-1]) == (stage["first_s"], stage["last_s"])
        assert 0 <= kept["queue_s"] <= stage["first_s"] and stage["last_s"] <= kept["finished_s"]
    # The script's clock: at least the pause before each output.
    assert stages["thinker"]["last_s"] - stages["thinker"]["first_s"] >= 0.002 * (len(TEXT) - 1)
    assert kept["first_audio_s"] >= stages["code2wav"]["first_s"] >= stages["thinker"]["last_s"]


def test_a_request_in_flight(serve):
    async def main():
        server = serve()
        server.client.hold = asyncio.Event()
        async with server.http() as http:
            asking = asyncio.ensure_future(http.post("/v1/audio/speech", json={"input": TEXT, "response_format": "wav"}))
            while not server.client.submitted:
                await asyncio.sleep(0)
            req_id = server.client.submitted[0].req_id.rpartition("-")[0]
            kept = (await http.get(f"/v1/timings/{req_id}")).json()
            server.client.hold.set()
            await asking
            return kept, (await http.get(f"/v1/timings/{req_id}")).json()

    during, after = asyncio.run(main())
    assert during["finished_s"] is None and during["finish_reason"] is None and during["audio_rtf"] is None
    assert after["finished_s"] and after["finish_reason"] == "stop"


def test_a_failed_request_is_one(serve):
    from stagevox.errors import RequestFailedError

    server = serve()
    server.client.fail = {TEXT: (RequestFailedError("talker: it broke"), 3)}
    answer = server.speech(TEXT, response_format="pcm")
    assert answer.status_code == 500
    (held,) = server.state.timings._held
    kept = server.call("GET", f"/v1/timings/{held}").json()
    assert kept["finish_reason"] == "error" and kept["error"] and kept["stages"][0]["outputs"] == 3


def test_totals_are_the_pipelines(serve):
    server = serve()
    server.client.stats = lambda: [StageStats("thinker", 3, 5, 0.25), StageStats("talker")]
    assert server.call("GET", "/v1/timings").json() == {
        "object": "timings",
        "stages": [
            {"name": "thinker", "steps": 3, "tokens": 5, "seconds": 0.25},
            {"name": "talker", "steps": 0, "tokens": 0, "seconds": 0.0},
        ],
    }


def test_what_isn_t_kept_is_not_found(serve):
    answer = serve().call("GET", "/v1/timings/speech-nothing")
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "req_id"


def test_a_key_is_needed(serve):
    server = serve(api_keys=("key",))
    assert server.call("GET", "/v1/timings").status_code == 401
    assert server.call("GET", "/v1/timings/x").status_code == 401


def test_only_the_latest_are_kept():
    held = RequestTimings(most=3)
    records = [RequestRecord(f"r{number}", "speech", False) for number in range(5)]
    for record in records[:3]:
        held.started(record)
    records[1].finished_at = records[1].arrived_at + 1
    held.started(records[3])
    assert [req_id for req_id in ("r0", "r1", "r2", "r3") if held.get(req_id)] == ["r0", "r2", "r3"]  # r1 is over
    held.started(records[4])
    assert held.get("r0") is None and held.get("r4")  # none is over: the oldest


@pytest.mark.parametrize("count", [1, MOST_MARKS, MOST_MARKS + 1, MOST_MARKS + 2, 10 * MOST_MARKS])
def test_marks_are_few_and_lose_no_token(count):
    held = RequestTimings()
    record = RequestRecord("r", "speech", False)
    held.started(record)
    for number in range(count):
        held.happened(record, EmitOutput("talker", StageOutput("r", list(range(number % 3)), {})))
    (stage,) = held.get("r").stages
    assert len(stage.marks) <= MOST_MARKS and stage.outputs == count
    assert stage.tokens == sum(tokens for _, tokens in stage.marks) == sum(number % 3 for number in range(count))
    times = [at for at, _ in stage.marks]
    assert times == sorted(times) and stage.last_s == times[-1] >= stage.first_s
