"""Metrics and the timeline over real stage processes, on stages without engines (F47, F50)."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import asynccontextmanager
from itertools import pairwise

import httpx
import pytest

from stagevox.contract import WAVEFORM
from stagevox.observe.figures import RequestWatch
from stagevox.observe.trace import Trace
from stagevox.pipeline.events import EmitOutput
from stagevox.pipeline.fleet import OnDeath
from stagevox.pipeline.process import ProcessClient
from stagevox.server.app import create_app
from stagevox.server.generate import Plan, Run
from stagevox.server.record import RequestRecord
from stagevox.server.settings import ServerSettings
from support.scrape import gauges, samples
from tests.support.scripted import ENGINE, STAGES, blueprint


class Truth:
    """An observer that keeps every event."""

    def __init__(self):
        self.events, self.records = [], []

    def started(self, record):
        pass

    def happened(self, record, event):
        self.events.append(event)

    def finished(self, record):
        self.records.append(record)


class Server:
    """The server over stage processes; requests take the one road of all endpoints."""

    def __init__(self, client, observers=()):
        self.client = client
        self.app = create_app(client, client.blueprint, ServerSettings(observers=observers, max_running=16))
        self.state = self.app.state.server

    async def text(self):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://server") as http:
            answer = await http.get("/metrics")
        assert answer.status_code == 200
        return answer.text

    async def scrape(self):
        return samples(await self.text())

    async def until(self, condition, seconds=5.0):
        end = time.monotonic() + seconds
        while not condition(found := await self.scrape()):
            assert time.monotonic() < end, {name: value for name, value in found.items() if value and "bucket" not in name}
            await asyncio.sleep(0.02)
        return found

    async def say(self, text, number, **prompt):
        run = Run(Plan({"text": text, **prompt}, {}), self.state, RequestRecord(f"speech-{number}", "speech", True))
        return [piece async for piece in run.pieces()]


@asynccontextmanager
async def serving(overrides=None, observers=(), watchers=(), **options):
    client = ProcessClient(blueprint(**(overrides or {})), engine=ENGINE, start_deadline=60.0, **options)
    server = Server(client, observers)
    for watcher in watchers:
        client.watch(watcher)
    await client.start()
    try:
        yield server
    finally:
        await client.close()


READY = {f'stagevox_stage_ready{{stage="{stage}"}}' for stage in STAGES}


def load_of(text):
    """The gauges that are 0 when nobody asks for anything."""
    return {name: value for name, value in gauges(text).items() if name not in READY}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def of_stages(found, name):
    return [found[f'{name}{{stage="{stage}"}}'] for stage in STAGES]


@pytest.mark.covers("SV-1")
def test_after_all_are_aborted_every_gauge_is_0_and_the_aborts_are_counted():
    """Some run, some wait for a slot at a stage, some wait in the server's queue."""
    count, at_once = 20, 16

    async def scenario():
        async with serving({"talker": {"pace": 0.02, "slots": 2}}) as server:
            tasks = [asyncio.ensure_future(server.say("x" * 500, number)) for number in range(count)]
            busy = await server.until(
                lambda found: (
                    found['stagevox_requests_running{endpoint="speech"}'] == at_once
                    and found['stagevox_stage_requests{stage="talker",state="running"}'] == 2
                    and found['stagevox_stage_requests{stage="code2wav",state="parked"}'] > 0
                )
            )
            assert busy['stagevox_requests_waiting{endpoint="speech"}'] == count - at_once
            assert busy["stagevox_pipeline_requests"] == at_once
            assert busy['stagevox_stage_kv_usage_ratio{stage="talker"}'] == 1.0
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            until = time.monotonic() + 10
            while any(load_of(text := await server.text()).values()):
                assert time.monotonic() < until, load_of(text)
                await asyncio.sleep(0.02)
            assert len(load_of(text)) > 10
            found = samples(text)
            assert found['stagevox_requests_aborted_total{endpoint="speech"}'] == count
            assert found['stagevox_requests_finished_total{endpoint="speech",reason="abort"}'] == count
            assert sum(value for name, value in found.items() if name.startswith("stagevox_requests_finished_total")) == count
            await server.say("and on", 99)
            assert (await server.scrape())['stagevox_requests_finished_total{endpoint="speech",reason="stop"}'] == 1

    run(scenario())


def test_one_that_never_ran_is_seen_and_forgotten():
    """A stage that steps for nobody says all the same how it stands."""

    async def scenario():
        async with serving() as server:
            parked = 'stagevox_stage_requests{stage="talker",state="parked"}'
            task = asyncio.ensure_future(server.say("abc", 1, fault="mute@thinker"))
            await server.until(lambda found: found[parked] == 1)
            task.cancel()
            await server.until(lambda found: found[parked] == 0, 2.0)

    run(scenario())


def test_stage_sums_are_those_of_the_events():
    truth = Truth()
    texts = ["a", "hello", "one two three", "x" * 90] * 3

    async def scenario():
        async with serving(observers=[truth]) as server:
            await asyncio.gather(*(server.say(text, number) for number, text in enumerate(texts)))
            return await server.scrape(), server.client.stats()

    found, stats = run(scenario())
    letters = sum(map(len, texts))
    events = [event for event in truth.events if isinstance(event, EmitOutput)]
    tokens, chunks, audio = Counter(), Counter(), 0
    for event in events:
        tokens[event.stage] += len(event.output.new_token_ids) + event.output.positions
        if WAVEFORM in event.output.multimodal:
            chunks[event.output.req_id] += 1
            audio += len(event.output.multimodal[WAVEFORM])
    assert [tokens[stage] for stage in STAGES] == [letters, 2 * letters, 2 * letters]
    assert of_stages(found, "stagevox_stage_ms_per_token_count") == [tokens[stage] for stage in STAGES]
    assert of_stages(found, "stagevox_stage_steps_total") == [one.steps for one in stats]
    assert of_stages(found, "stagevox_stage_step_seconds_count") == [one.steps for one in stats]
    for name, one in zip(STAGES, stats, strict=True):
        seconds = found[f'stagevox_stage_step_seconds_sum{{stage="{name}"}}']
        assert seconds == pytest.approx(one.seconds) and seconds > 0
        assert found[f'stagevox_stage_ms_per_token_sum{{stage="{name}"}}'] == pytest.approx(1e3 * one.seconds)
    assert found['stagevox_audio_chunk_gap_seconds_count{endpoint="speech"}'] == sum(chunks.values()) - len(texts) > 0
    assert found['stagevox_text_tokens_total{endpoint="speech"}'] == letters
    assert found['stagevox_audio_tokens_total{endpoint="speech"}'] == 2 * letters
    assert (
        found['stagevox_audio_seconds_total{endpoint="speech"}']
        == pytest.approx(audio / 1000)
        == pytest.approx(20 * letters / 1000)
    )
    assert found['stagevox_audio_rtf_count{endpoint="speech"}'] == len(texts)
    # int64 ids to the Talker, int64 rows of two to Code2Wav
    assert of_stages(found, "stagevox_stage_payload_bytes_total")[1] >= 2 * 8 * 2 * letters
    assert found['stagevox_requests_finished_total{endpoint="speech",reason="stop"}'] == len(texts)


def test_a_failure_is_counted_by_its_name_and_a_dead_stage_holds_nothing():
    async def scenario():
        async with serving(on_death=OnDeath.EXIT, deadline=20.0) as server:
            for number, (fault, error) in enumerate(
                [
                    ("refuse@talker", "BadParameterError"),
                    ("raise@talker", "RequestFailedError"),
                    ("exit@talker", "StageDiedError"),
                ]
            ):
                with pytest.raises(Exception):  # noqa: B017 - which one the metrics say
                    await server.say("hello", number, fault=fault)
                assert (await server.scrape())[f'stagevox_request_errors_total{{error="{error}"}}'] == 1
            found = await server.scrape()
            assert of_stages(found, "stagevox_stage_ready") == [1, 0, 1]
            assert found['stagevox_stage_requests{stage="talker",state="running"}'] == 0
            assert found['stagevox_requests_finished_total{endpoint="speech",reason="error"}'] == 3

    run(scenario())


def test_the_timeline_has_every_step_of_every_process(tmp_path):
    path, told = tmp_path / "trace.json", []
    trace = Trace(path, STAGES)
    texts = ["hello", "one two three", "x" * 60]

    async def scenario():
        observers = [RequestWatch([trace])]
        async with serving({"thinker": {"pace": 0.003}}, observers, [trace.stepped, told.append]) as server:
            began = time.monotonic()
            await asyncio.gather(*(server.say(text, number) for number, text in enumerate(texts)))
            await asyncio.sleep(0.15)
            await server.say("again", 3)
            return began, time.monotonic(), server.client.stats()

    began, ended, stats = run(scenario())
    trace.close()
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values()) == ["stagevox: requests", *(f"stage: {stage}" for stage in STAGES)]
    origins = []
    for stage, pid in zip(STAGES, (2, 3, 4), strict=True):
        steps = [event["ts"] for event in events if event["pid"] == pid and event.get("cat") == "step"]
        begins = [span.began for span in told if span.stage == stage]
        origins += [begin - step / 1e6 for begin, step in zip(begins, steps, strict=True)]
    origin = origins[0]
    assert max(origins) - min(origins) < 2e-6
    for stage, pid in zip(stats, (2, 3, 4), strict=True):
        track = [event for event in events if event["pid"] == pid and event["ph"] == "X"]
        assert all(before["ts"] + before["dur"] == after["ts"] for before, after in pairwise(track)), stage.name
        steps = [event for event in track if event["cat"] == "step"]
        assert len(steps) == stage.steps and sum(event["args"]["tokens"] for event in steps) == stage.tokens
        assert sum(event["dur"] for event in steps) == pytest.approx(1e6 * stage.seconds, abs=stage.steps + 1)
        # one clock for all processes: what a stage's own process measured lies where the server saw it happen
        assert (
            began - 1e-5 <= origin + track[0]["ts"] / 1e6 and origin + (track[-1]["ts"] + track[-1]["dur"]) / 1e6 <= ended + 1e-5
        )
        assert any(event["name"] == "idle" and event["dur"] > 100_000 for event in track)
    assert any(event["name"] == "waits for input" for event in events)
    ends = {event["args"]["finish_reason"] for event in events if event["ph"] == "e" and event["name"] == "speech"}
    assert ends == {"stop"} and sum(event["ph"] == "b" and event["name"] == "speech" for event in events) == 4
    for number in range(4):
        spans = {event["id"] for event in events if event.get("id", "").startswith(f"speech-{number}")}
        assert spans == {f"speech-{number}", *(f"speech-{number}/{stage}" for stage in STAGES)}
