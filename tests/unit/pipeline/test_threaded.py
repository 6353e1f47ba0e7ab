"""The inline driver behind an event loop: same rows, faults kept to their request, nothing left behind, nothing waits for ever."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter

import pytest

from stagevox.connectors.chunks import FrameChunks
from stagevox.errors import BadRequestError, ClosedError, ConfigError, RequestFailedError, StageDiedError
from stagevox.pipeline.client import StageHealth
from stagevox.pipeline.events import EmitOutput, FinishRequest
from stagevox.pipeline.request import OmniRequest
from stagevox.pipeline.threaded import ThreadedClient
from stagevox.stage.payload import StageRequest
from tests.unit.conftest import FakeStage, join

AUDIO = "audio.waveform"
NAMES = ("thinker", "talker", "code2wav")


def request(req_id, length=3, last_stage=None, **sampling):
    return OmniRequest(StageRequest(req_id, list(range(length))), sampling=sampling, last_stage=last_stage)


def spoken(req_id, length=3):
    return [("talker", req_id, n) for n in range(3 * length)]


async def collect(stream):
    samples, end = [], None
    async for event in stream:
        assert end is None
        match event:
            case EmitOutput("code2wav", output):
                samples += output.multimodal.get(AUDIO, [])
            case FinishRequest():
                end = event
    return samples, end


async def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.005)


@pytest.fixture
def run(fake_stages):
    """Run ``body(client, stages)`` on a started client; afterwards nothing is left."""

    def start(body, deadline=30.0, warm_up=None, tidy=True, **options):
        stages = fake_stages(**options)

        async def main():
            client = ThreadedClient(NAMES, lambda: stages, deadline=deadline, warm_up=warm_up)
            await client.start()
            try:
                await body(client, stages)
                if tidy:
                    await client.drain(5)
                    assert client.num_requests == 0
                    assert [stage.num_requests for stage in stages] == [0, 0, 0]
            finally:
                await client.close()
            assert all(stage.closed for stage in stages)
            assert "stagevox-stages" not in [thread.name for thread in threading.enumerate() if thread.is_alive()]

        asyncio.run(main())

    return start


@pytest.mark.covers("SV-3")
def test_requests_get_their_own_rows(run):
    async def body(client, stages):
        assert set(client.health().values()) == {StageHealth.READY}
        answers = await asyncio.gather(*(collect(client.submit(request(f"r{n}", n + 1))) for n in range(9)))
        for n, (samples, end) in enumerate(answers):
            assert samples == spoken(f"r{n}", n + 1) and end.finish_reason == "stop"
        assert client.stats()[0].tokens == sum(range(1, 10))

    run(body, slots=2)


def test_the_thread_steps_the_stages_and_sleeps_when_idle(run):
    async def body(client, stages):
        threads = set()
        stages[0].on_step = lambda stage: threads.add(threading.current_thread().name)
        await collect(client.submit(request("a")))
        steps = stages[0].steps
        await asyncio.sleep(0.1)
        assert threads == {"stagevox-stages"} and stages[0].steps == steps

    run(body)


def test_a_road_may_end_early(run):
    async def body(client, stages):
        samples, end = await collect(client.submit(request("a", last_stage="thinker")))
        assert samples == [] and end.finish_reason == "stop"
        assert stages[1].steps == 0

    run(body)


@pytest.mark.parametrize("text_stage", ["thinker", None])
def test_speech_that_ends_first_leaves_the_text_whole(text_stage):
    """The Talker says three rows of forty and ends, as one does that is capped."""

    class Capped(FakeStage):
        def _samples(self, req_id, state):
            output, payload = super()._samples(req_id, state)
            return output._replace(finish_reason="stop" if state.made >= 3 else None), payload

    stages = [FakeStage("thinker", FrameChunks("rows", (2,), concat=join)), Capped("talker", whole=False)]

    async def main():
        client = ThreadedClient(("thinker", "talker"), lambda: stages, text_stage=text_stage)
        await client.start()
        try:
            events = [event async for event in client.submit(request("a", 40))]
        finally:
            await client.close()
        text = [token for event in events[:-1] if event.stage == "thinker" for token in event.output.new_token_ids]
        assert events[-1].finish_reason == ("stop" if text_stage else "length")
        assert len(text) == 40 if text_stage else len(text) < 10

    asyncio.run(main())


@pytest.mark.parametrize("after", [0, 1, 5])
def test_leaving_aborts_everywhere(run, after):
    """F19."""

    async def body(client, stages):
        stages[0].on_step = lambda stage: time.sleep(0.002)
        stream = client.submit(request("a", 500))
        other = asyncio.ensure_future(collect(client.submit(request("b", 20))))
        seen = 0
        if after:
            async for _ in stream:
                seen += 1
                if seen == after:
                    break
        await stream.aclose()
        await stream.aclose()
        started = time.monotonic()
        await until(lambda: client.num_requests == 1)
        assert time.monotonic() - started < 1
        samples, end = await other
        assert samples == spoken("b", 20) and end.finish_reason == "stop"

    run(body)


def test_two_hundred_aborts(run):
    """F19: before the first event, and while each of the stages is at it; no map keeps anything."""

    async def body(client, stages):
        slow, left_at = [""], Counter()
        for stage in stages:
            stage.on_step = lambda stage: time.sleep(0.002 if stage.name == slow[0] else 0)
        for n in range(200):
            slow[0] = place = ("", *NAMES)[n % 4]
            stream = client.submit(request(f"r{n}", 200))
            if place:
                async for event in stream:
                    if event.stage == place:
                        break
                left_at[place] += f"r{n}" in stages[NAMES.index(place)].held
            await stream.aclose()
        await until(lambda: client.num_requests == 0)
        assert all(left_at[name] > 40 for name in NAMES), left_at

    run(body)


def test_a_cancelled_reader_aborts(run):
    async def body(client, stages):
        stages[0].on_step = lambda stage: time.sleep(0.002)
        task = asyncio.ensure_future(collect(client.submit(request("a", 5000))))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: client.num_requests == 0)

    run(body)


def test_an_id_in_flight_is_refused(run):
    async def body(client, stages):
        stages[0].on_step = lambda stage: time.sleep(0.002)
        stream = client.submit(request("a", 50))
        with pytest.raises(BadRequestError):
            client.submit(request("a"))
        assert (await collect(stream))[1].finish_reason == "stop"

    run(body)


def test_a_request_that_a_stage_refuses_fails_alone(run):
    async def body(client, stages):
        stages[1].refuse.add("a")
        (_, failed), (samples, _) = await asyncio.gather(
            collect(client.submit(request("a"))), collect(client.submit(request("b")))
        )
        assert isinstance(failed.error, RequestFailedError) and samples == spoken("b")

    run(body)


def test_a_stage_that_dies_is_told_at_once(run):
    """F29."""

    async def body(client, stages):
        stages[1].die_at = 3
        _, end = await collect(client.submit(request("a", 20)))
        assert isinstance(end.error, StageDiedError)
        assert client.health() == {"thinker": StageHealth.READY, "talker": StageHealth.DEAD, "code2wav": StageHealth.READY}
        with pytest.raises(StageDiedError):
            client.submit(request("b"))
        assert (await collect(client.submit(request("c", last_stage="thinker"))))[1].finish_reason == "stop"

    run(body, tidy=False)


def test_a_driver_that_fails_ends_all(run, monkeypatch):
    async def body(client, stages):
        monkeypatch.setattr("stagevox.pipeline.inline.InlineDriver.step", lambda self: 1 / 0)
        _, end = await collect(client.submit(request("a")))
        assert isinstance(end.error, StageDiedError) and "ZeroDivisionError" in str(end.error)
        await until(lambda: set(client.health().values()) == {StageHealth.DEAD})
        with pytest.raises((StageDiedError, ClosedError)):
            client.submit(request("b"))

    run(body, tidy=False)


def test_a_lost_chunk_ends_by_the_deadline(run):
    """F10."""

    async def body(client, stages):
        stages[0].lose.add(("a", 0))
        _, end = await collect(client.submit(request("a")))
        assert end.finish_reason == "error" and "no input" in str(end.error)

    run(body, deadline=0.2)


def test_drain_waits_and_then_aborts(run):
    async def body(client, stages):
        stages[0].on_step = lambda stage: time.sleep(0.005)
        quick = asyncio.ensure_future(collect(client.submit(request("a", 5))))
        await client.drain(5)
        assert (await quick)[1].finish_reason == "stop"
        slow = asyncio.ensure_future(collect(client.submit(request("b", 5000))))
        await client.drain(0.1)
        assert (await slow)[1].finish_reason == "abort"

    run(body)


def test_closing_ends_what_is_in_flight(run):
    async def body(client, stages):
        stages[0].on_step = lambda stage: time.sleep(0.002)
        task = asyncio.ensure_future(collect(client.submit(request("a", 5000))))
        await asyncio.sleep(0.05)
        await client.close()
        assert (await task)[1].finish_reason == "abort"
        await client.close()
        with pytest.raises(ClosedError):
            client.submit(request("b"))

    run(body, tidy=False)


def test_a_warm_up_is_heard_by_nobody(run):
    async def body(client, stages):
        assert stages[2].steps > 0 and client.num_requests == 0
        assert (await collect(client.submit(request("warm-up"))))[0] == spoken("warm-up")

    run(body, warm_up=request("warm-up"))


@pytest.mark.parametrize(
    "error, seen", [(ConfigError("talker", "can't work"), ConfigError), (RuntimeError("out of memory"), StageDiedError)]
)
def test_a_failed_load_is_an_error_of_start(error, seen):
    def load():
        raise error

    async def main():
        client = ThreadedClient(NAMES, load)
        with pytest.raises(ClosedError):
            client.submit(request("a"))
        with pytest.raises(seen):
            await client.start()
        assert set(client.health().values()) == {StageHealth.DEAD}
        await client.close()

    asyncio.run(main())


def test_who_starts_to_watch_later_is_told_from_then_on(run):
    async def body(client, stages):
        await collect(client.submit(request("a")))
        seen, before = [], client.stats()
        client.watch(seen.append)
        await collect(client.submit(request("b")))
        await client.drain(5)
        for old, new in zip(before, client.stats(), strict=True):
            assert new.steps > old.steps
            assert [span.stage for span in seen].count(new.name) == new.steps - old.steps

    run(body)


def start_with(stages, body=None):
    """Start a client with a warm-up on the stages; ``body(client)`` runs on it."""

    async def main():
        client = ThreadedClient(NAMES, lambda: stages, warm_up=request("warm-up"))
        try:
            await client.start()
            if body is not None:
                await body(client)
        finally:
            assert body is not None or set(client.health().values()) == {StageHealth.DEAD}
            await client.close()
        assert all(stage.closed for stage in stages)

    asyncio.run(main())


def test_a_stage_that_dies_in_the_warm_up_is_an_error_of_start(fake_stages):
    stages = fake_stages()
    stages[1].die_at = 2
    with pytest.raises(StageDiedError, match="talker.*out of memory"):
        start_with(stages)


def test_a_warm_up_that_a_stage_refuses_is_an_error_of_start(fake_stages):
    stages = fake_stages()
    stages[1].refuse.add("warm-up")
    with pytest.raises(RequestFailedError, match="no such sampling parameter"):
        start_with(stages)


def test_a_stage_that_dies_as_the_warm_up_is_tidied_up_is_never_called_ready(fake_stages):
    """The request has ended by then: nobody's error, and nothing wakes the thread."""
    stages = fake_stages()
    late = [stages[0].has_work]
    stages[0].has_work = lambda: late[0]() or bool(stages[2].steps and not any(stage.held for stage in stages))
    stages[0].on_step = lambda stage: 1 / 0 if stages[2].steps and not stage.held else None

    async def body(client):
        await until(lambda: client.health()["thinker"] is StageHealth.DEAD, 1)
        with pytest.raises(StageDiedError):
            client.submit(request("a"))

    start_with(stages, body)


@pytest.mark.parametrize("when", ["loading", "warming up"])
def test_closing_ends_a_start_that_is_under_way(fake_stages, when):
    stages = fake_stages()
    reached, go_on = threading.Event(), threading.Event()

    def wait(*_):
        reached.set()
        assert go_on.wait(10)

    def load():
        if when == "loading":
            wait()
        return stages

    if when == "warming up":
        stages[0].on_step = wait

    async def main():
        client = ThreadedClient(NAMES, load, warm_up=request("warm-up"))
        starting = asyncio.ensure_future(client.start())
        await asyncio.to_thread(reached.wait, 10)
        closing = asyncio.ensure_future(client.close())
        with pytest.raises(ClosedError):
            await asyncio.wait_for(starting, 2)
        go_on.set()
        await closing
        await until(lambda: all(stage.closed for stage in stages))
        assert set(client.health().values()) == {StageHealth.DEAD}

    asyncio.run(main())


def test_a_thread_that_ends_ends_a_start_that_is_under_way(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)  # pytest's would report it

    def load():
        raise SystemExit

    async def main():
        client = ThreadedClient(NAMES, load)
        with pytest.raises(ClosedError):
            await asyncio.wait_for(client.start(), 2)
        client._thread.join(5)

    asyncio.run(main())
