"""The driver with a process a stage, on stages without engines: what comes out, and that nothing outlives its time."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stagevox.contract import WAVEFORM
from stagevox.errors import (
    BadParameterError,
    BadRequestError,
    CapabilityError,
    ClosedError,
    DeadlineError,
    RequestFailedError,
    StageDiedError,
)
from stagevox.pipeline import fleet
from stagevox.pipeline.client import StageHealth
from stagevox.pipeline.events import ClockTicked, EmitOutput, FinishRequest
from stagevox.pipeline.fleet import MOST_LOADS, OnDeath
from stagevox.pipeline.process import ProcessClient
from tests.support.scripted import ENGINE, STAGES, blueprint, samples_of

TEXTS = ["a", "hello", "one two three", "x" * 150]


def client(overrides=None, **options):
    return ProcessClient(blueprint(**(overrides or {})), engine=ENGINE, start_deadline=60.0, **options)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


async def say(pipeline, req_id, text, sampling=None, last_stage=None, **options):
    """A request from its start to its end: (samples, tokens, end)."""
    request = pipeline.blueprint.admit(req_id, {"text": text, **options}, sampling)
    samples, tokens = [np.zeros(0)], []
    async for event in pipeline.submit(replace(request, last_stage=last_stage)):
        match event:
            case EmitOutput(stage, output):
                if stage == "thinker":
                    tokens += output.new_token_ids
                if WAVEFORM in output.multimodal:
                    samples.append(output.multimodal[WAVEFORM])
            case FinishRequest():
                end = event
    return np.concatenate(samples), tokens, end


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


def wait_until(true, seconds=10.0):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.02)


async def nothing_held(pipeline):
    """Every map of every stage is empty, within a second."""
    until = time.monotonic() + 1.0
    while any(value for held in (await pipeline.held()).values() for value in held.values()):
        assert time.monotonic() < until, await pipeline.held()
        await asyncio.sleep(0.01)
    assert not pipeline.num_requests


def left_behind(folder):
    """What a run leaves: its folder, its segments."""
    name = Path(folder).name
    return [path for path in (Path(folder), *Path("/dev/shm").glob(f"{name}*")) if path.exists()]


@pytest.fixture(scope="module")
def shared():
    """``shared(scenario)`` runs a coroutine function on a pipeline that many tests use, and checks that it left nothing."""
    with asyncio.Runner() as runner:
        pipeline = client(deadline=3.0)
        runner.run(pipeline.start())

        async def scene(scenario):
            await asyncio.wait_for(scenario(pipeline), 60)
            await nothing_held(pipeline)
            assert all(health is StageHealth.READY for health in pipeline.health().values())

        yield lambda scenario: runner.run(scene(scenario))
        folder, pids = pipeline._fleet.owner.map.folder, pipeline.pids()
        started = time.monotonic()
        runner.run(pipeline.close())
    assert time.monotonic() - started < 5
    assert all(map(gone, pids.values())) and not left_behind(folder)


@pytest.mark.covers("EX-2", "SV-3")
def test_many_at_once_speak_each_its_own(shared):
    @shared
    async def _(pipeline):
        texts = TEXTS * 8
        answers = await asyncio.gather(*(say(pipeline, f"r{n}", text) for n, text in enumerate(texts)))
        for text, (samples, tokens, end) in zip(texts, answers, strict=True):
            assert (end.finish_reason, end.error) == ("stop", None)
            assert "".join(map(chr, tokens)) == text
            assert np.array_equal(samples, samples_of(text).astype(samples.dtype))


def test_a_road_may_end_early_and_a_cap_is_told(shared):
    @shared
    async def _(pipeline):
        samples, tokens, end = await say(pipeline, "text", "hello", last_stage="thinker")
        assert (len(samples), len(tokens), end.finish_reason) == (0, 5, "stop")
        samples, tokens, end = await say(pipeline, "cut", "hello", sampling={"thinker": {"max_tokens": 2}})
        assert (len(samples), tokens, end.finish_reason) == (40, [ord("h"), ord("e")], "length")


def test_an_id_in_flight_is_refused(shared):
    @shared
    async def _(pipeline):
        stream = pipeline.submit(pipeline.blueprint.admit("twice", "hello", None))
        with pytest.raises(BadRequestError, match="in flight"):
            pipeline.submit(pipeline.blueprint.admit("twice", "hello", None))
        await stream.aclose()


@pytest.mark.covers("RT-8")
def test_listeners_that_leave_free_every_stage(shared):
    @shared
    async def _(pipeline):
        for n in range(60):
            stream = pipeline.submit(pipeline.blueprint.admit(f"r{n}", {"text": "hello there " * 5, "pace": 0.001}, None))
            seen = 0
            async for _ in stream:
                seen += 1
                if seen > n % 40:
                    break
            await stream.aclose()
        await nothing_held(pipeline)
        samples, _, _ = await say(pipeline, "after", "hello")
        assert np.array_equal(samples, samples_of("hello").astype(samples.dtype))


@pytest.mark.covers("EX-16")
@pytest.mark.parametrize("stage", STAGES)
def test_an_error_is_the_guilty_ones_alone(shared, stage):
    @shared
    async def _(pipeline):
        good, refused, raised = await asyncio.gather(
            say(pipeline, "good", "hello"),
            say(pipeline, "refused", "hello", fault=f"refuse@{stage}"),
            say(pipeline, "raised", "hello", fault=f"raise@{stage}"),
        )
        assert good[2].finish_reason == "stop" and len(good[0]) == 100
        assert isinstance(refused[2].error, BadParameterError)
        assert (refused[2].error.field, refused[2].error.allowed) == ("seed", ("1", "2"))
        assert type(raised[2].error) is RequestFailedError and "as the script says" in str(raised[2].error)


def test_one_that_is_never_served_ends_at_its_deadline(shared):
    @shared
    async def _(pipeline):
        *mute, good = await asyncio.gather(
            *(say(pipeline, f"mute-{stage}", "hello", fault=f"mute@{stage}") for stage in STAGES), say(pipeline, "good", "hello")
        )
        for stage, (_, _, end) in zip(STAGES, mute, strict=True):
            assert isinstance(end.error, DeadlineError) and stage in str(end.error)
        assert good[2].finish_reason == "stop"


@pytest.mark.parametrize(
    ("how", "stage"), [("kill", "thinker"), ("kill", "talker"), ("kill", "code2wav"), ("break", "talker"), ("exit", "talker")]
)
def test_a_stage_that_dies_fails_what_needs_it_at_once(stage, how):
    async def scenario():
        deaths = []
        pipeline = client(told_of_death=lambda *what: deaths.append(what))
        await pipeline.start()
        try:
            fault = {} if how == "kill" else {"fault": f"{how}@{stage}"}
            others = [asyncio.create_task(say(pipeline, f"r{n}", "hello " * 20, pace=0.002)) for n in range(3)]
            dying = asyncio.create_task(say(pipeline, "dying", "hello " * 20, pace=0.002, **fault))
            await asyncio.sleep(0.1)
            if how == "kill":
                os.kill(pipeline.pids()[stage], signal.SIGKILL)
            started = time.monotonic()
            ends = [end for _, _, end in await asyncio.gather(dying, *others)]
            assert time.monotonic() - started < 5
            assert isinstance(ends[0].error, StageDiedError)
            reason = {"kill": "killed by SIGKILL", "break": "as the script says", "exit": "exit status 7"}[how]
            assert stage in str(ends[0].error) and reason in str(ends[0].error)
            for end in ends[1:]:
                assert end.finish_reason == "stop" or isinstance(end.error, StageDiedError)
            assert pipeline.health()[stage] is StageHealth.DEAD
            assert [name for name, _ in deaths] == [stage]
            with pytest.raises(StageDiedError):
                pipeline.submit(pipeline.blueprint.admit("late", "hello", None))
        finally:
            folder, pids = pipeline._fleet.owner.map.folder, pipeline.pids()
            await pipeline.close()
        assert all(map(gone, pids.values())) and not left_behind(folder)

    run(scenario())


def test_a_stage_that_dies_may_be_started_again():
    async def scenario():
        pipeline = client(on_death=OnDeath.RESTART)
        await pipeline.start()
        try:
            for turn, stage in enumerate([*STAGES, "talker"]):
                doomed = asyncio.create_task(say(pipeline, f"doomed{turn}", "hello " * 30, pace=0.005))
                await asyncio.sleep(0.1)
                os.kill(pipeline.pids()[stage], signal.SIGKILL)
                assert isinstance((await doomed)[2].error, StageDiedError)
                assert pipeline.health()[stage] is StageHealth.RESTARTING
                with pytest.raises(StageDiedError):
                    pipeline.submit(pipeline.blueprint.admit("meanwhile", "hello", None))
                while pipeline.health()[stage] is not StageHealth.READY:
                    await asyncio.sleep(0.02)
                samples, _, end = await say(pipeline, f"after{turn}", "x" * 100)
                assert end.finish_reason == "stop"
                assert np.array_equal(samples, samples_of("x" * 100).astype(samples.dtype))
                await nothing_held(pipeline)
        finally:
            folder = pipeline._fleet.owner.map.folder
            await pipeline.close()
        assert not left_behind(folder)

    run(scenario())


def fails_in(what):
    """A failure in the server's own code, once the pipeline serves: (how to bring it about, why the stage is dead)."""

    def in_watcher(pipeline, monkeypatch):
        def watcher(span):
            if span.stage == "talker":
                raise ZeroDivisionError("watched")

        pipeline.watch(watcher)

    def in_heard(pipeline, monkeypatch):
        heard = pipeline.heard
        monkeypatch.setattr(pipeline, "heard", lambda name, message: 1 / 0 if name == "talker" else heard(name, message))

    def in_receive(pipeline, monkeypatch):
        monkeypatch.setattr("stagevox.pipeline.link.decode_to_server", lambda data: 1 / 0)

    return {"watcher": in_watcher, "heard": in_heard, "receive": in_receive}[what]


@pytest.mark.parametrize("what", ["watcher", "heard", "receive"])
def test_a_stage_that_can_t_be_heard_any_more_is_dead(monkeypatch, caplog, what):
    async def scenario():
        deaths = []
        pipeline = client(told_of_death=lambda *what: deaths.append(what))
        await pipeline.start()
        try:
            fails_in(what)(pipeline, monkeypatch)
            _, _, end = await asyncio.wait_for(say(pipeline, "a", "hello"), 10)
            assert isinstance(end.error, StageDiedError) and "ZeroDivisionError" in str(end.error)
            dead = [name for name, health in pipeline.health().items() if health is StageHealth.DEAD]
            assert dead and (what == "receive" or dead == ["talker"])
            assert [name for name, _ in deaths] == dead and "ZeroDivisionError" in deaths[0][1]
            assert all(gone(pipeline.pids()[name]) for name in dead)
            assert "Traceback" in caplog.text
        finally:
            await pipeline.close()

    run(scenario())


def test_what_a_failure_kept_from_a_listener_is_told_with_the_stage_s_death(monkeypatch):
    """The orchestrator has forgotten the request by then."""

    async def scenario():
        pipeline = client()
        await pipeline.start()
        try:
            carry_out = pipeline._carry_out
            broken = []

            def carry_out_until_the_end(commands):
                if any(isinstance(command, FinishRequest) for command in commands) and not broken:
                    broken.append(commands)
                    raise ZeroDivisionError
                carry_out(commands)

            monkeypatch.setattr(pipeline, "_carry_out", carry_out_until_the_end)
            _, _, end = await asyncio.wait_for(say(pipeline, "a", "hello"), 10)
            assert broken and isinstance(end.error, StageDiedError)
        finally:
            await pipeline.close()

    run(scenario())


@pytest.mark.parametrize("on_death", list(OnDeath))
def test_without_its_clock_a_pipeline_is_dead(caplog, on_death):
    async def scenario():
        deaths = []
        pipeline = client(told_of_death=lambda *what: deaths.append(what), on_death=on_death)
        await pipeline.start()
        try:
            saying = asyncio.create_task(say(pipeline, "a", "hello " * 100, pace=0.01))
            await asyncio.sleep(0.1)
            assert pipeline.num_requests == 1
            pipeline._orchestrator._handlers[ClockTicked] = lambda event: 1 / 0
            _, _, end = await asyncio.wait_for(saying, 10)
            assert isinstance(end.error, StageDiedError) and "clock" in str(end.error) and "ZeroDivisionError" in str(end.error)
            assert set(pipeline.health().values()) == {StageHealth.DEAD} and pipeline.num_requests == 0
            while len(deaths) < 3:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.2)  # nothing is started again
            assert set(pipeline.health().values()) == {StageHealth.DEAD} and all(map(gone, pipeline.pids().values()))
            assert "Traceback" in caplog.text
            with pytest.raises(StageDiedError):
                pipeline.submit(pipeline.blueprint.admit("late", "hello", None))
        finally:
            await pipeline.close()

    run(scenario())


def test_chunks_that_a_dead_stage_never_took_are_forgotten_with_its_return():
    async def scenario():
        pipeline = client(on_death=OnDeath.RESTART)
        await pipeline.start()
        try:
            await say(pipeline, "before", "hello")  # the stages are connected
            pid = pipeline.pids()["code2wav"]
            os.kill(pid, signal.SIGSTOP)
            doomed = [asyncio.create_task(say(pipeline, f"doomed{n}", "hello " * 30)) for n in range(4)]
            await asyncio.sleep(0.5)  # their chunks are on the way, and nobody takes them
            os.kill(pid, signal.SIGKILL)
            assert all(isinstance(end.error, StageDiedError) for _, _, end in await asyncio.gather(*doomed))
            assert (await pipeline._fleet.ask("talker", "held")).held["road"] == len(doomed)
            await becomes(pipeline, "code2wav", StageHealth.READY)
            await nothing_held(pipeline)
            samples, _, _ = await say(pipeline, "after", "x" * 100)
            assert np.array_equal(samples, samples_of("x" * 100).astype(samples.dtype))
        finally:
            await pipeline.close()

    run(scenario())


async def kill_while_it_loads(pipeline, stage, seen):
    """Wait for a process of ``stage`` that was not ``seen``, and kill it before it is ready."""
    while (pid := pipeline.pids()[stage]) in seen:
        await asyncio.sleep(0.001)
    seen.add(pid)
    assert pipeline.health()[stage] is StageHealth.RESTARTING
    os.kill(pid, signal.SIGKILL)


async def becomes(pipeline, stage, health):
    until = time.monotonic() + 60
    while pipeline.health()[stage] is not health:
        assert time.monotonic() < until, f"{stage} is {pipeline.health()[stage]}"
        await asyncio.sleep(0.02)


def test_a_stage_that_dies_again_while_it_loads_is_started_again(monkeypatch):
    monkeypatch.setattr(fleet, "PAUSES", (0.0, 0.1, 0.1, 0.1))

    async def scenario():
        pipeline = client(on_death=OnDeath.RESTART)
        await pipeline.start()
        try:
            for _ in range(2):  # a success counts anew
                seen = {pipeline.pids()["talker"]}
                os.kill(*seen, signal.SIGKILL)
                for _ in range(MOST_LOADS - 1):
                    await kill_while_it_loads(pipeline, "talker", seen)
                await becomes(pipeline, "talker", StageHealth.READY)
                samples, _, _ = await say(pipeline, "after", "x" * 100)
                assert np.array_equal(samples, samples_of("x" * 100).astype(samples.dtype))
        finally:
            folder = pipeline._fleet.owner.map.folder
            await pipeline.close()
        assert not left_behind(folder)

    run(scenario())


@pytest.mark.parametrize("what", ["fork", "watch"])
@pytest.mark.parametrize("times", [2, 1 << 30])
def test_a_stage_whose_process_can_t_be_started_again_is_tried_again_and_dead_in_the_end(monkeypatch, what, times):
    monkeypatch.setattr(fleet, "PAUSES", (0.0, 0.05, 0.05, 0.05))

    async def scenario():
        deaths, failed, children = [], [], []
        pipeline = client(on_death=OnDeath.RESTART, told_of_death=lambda *what: deaths.append(what))
        await pipeline.start()
        try:
            real = {"fork": subprocess.Popen, "watch": os.pidfd_open}[what]

            def fail(*args, **options):
                if len(failed) == times:
                    return real(*args, **options)
                failed.append(args)
                raise OSError(12, "Cannot allocate memory")

            if what == "fork":
                monkeypatch.setattr(subprocess, "Popen", fail)
            else:
                monkeypatch.setattr(os, "pidfd_open", lambda pid: children.append(pid) or fail(pid))
            sockets = set(Path(pipeline._fleet.owner.map.folder).glob("c*"))
            os.kill(pipeline.pids()["talker"], signal.SIGKILL)
            await becomes(pipeline, "talker", StageHealth.RESTARTING)
            await becomes(pipeline, "talker", StageHealth.READY if times == 2 else StageHealth.DEAD)
            if times == 2:
                assert len(failed) == 2 and len(deaths) == 3
                samples, _, _ = await say(pipeline, "after", "x" * 100)
                assert np.array_equal(samples, samples_of("x" * 100).astype(samples.dtype))
            else:
                assert len(failed) == MOST_LOADS and len(deaths) == 1 + MOST_LOADS
                assert "Cannot allocate memory" in deaths[-1][1]
                with pytest.raises(StageDiedError):
                    pipeline.submit(pipeline.blueprint.admit("late", "hello", None))
            # One for each stage that is alive: those of the failed tries are gone, and so are their processes.
            now = set(Path(pipeline._fleet.owner.map.folder).glob("c*"))
            assert len(now) == (len(sockets) if times == 2 else len(sockets) - 1)
            assert what == "fork" or (all(map(gone, children[: len(failed)])) and len(children) >= len(failed))
        finally:
            folder = pipeline._fleet.owner.map.folder
            await pipeline.close()
        assert not left_behind(folder)

    run(scenario())


def test_what_stages_are_asked_ends_in_an_error_by_name(monkeypatch):
    monkeypatch.setattr(fleet, "ANSWER_SECONDS", 0.3)

    async def scenario():
        pipeline = client()
        with pytest.raises(ClosedError):
            await pipeline.held()
        await pipeline.start()
        try:
            os.kill(pipeline.pids()["talker"], signal.SIGSTOP)
            with pytest.raises(DeadlineError, match=r"talker: no answer in 0\.3 s"):
                await pipeline.held()
            monkeypatch.setattr(fleet, "ANSWER_SECONDS", 30.0)
            os.kill(pipeline.pids()["talker"], signal.SIGKILL)
            await becomes(pipeline, "talker", StageHealth.DEAD)
            with pytest.raises(StageDiedError, match="talker"):
                await asyncio.wait_for(pipeline.trace(), 1)
            os.kill(pipeline.pids()["thinker"], signal.SIGSTOP)
            asking = asyncio.create_task(pipeline._fleet.ask("thinker", "held"))
            await asyncio.sleep(0)
            closing = asyncio.create_task(pipeline.close())
            with pytest.raises(ClosedError):
                await asyncio.wait_for(asking, 1)
            await closing
            with pytest.raises(ClosedError):
                await pipeline.held()
        finally:
            await pipeline.close()

    run(scenario())


@pytest.mark.parametrize("how", ["killed", "late"])
def test_a_stage_that_can_t_be_loaded_again_is_dead_in_the_end(monkeypatch, how):
    monkeypatch.setattr(fleet, "PAUSES", (0.0, 0.1, 0.1, 0.1))

    async def scenario():
        deaths = []
        pipeline = client(on_death=OnDeath.RESTART, told_of_death=lambda *what: deaths.append(what))
        await pipeline.start()
        try:
            seen = {pipeline.pids()["talker"]}
            if how == "late":
                pipeline._fleet._start_deadline = 0.1
            os.kill(*seen, signal.SIGKILL)
            for _ in range(MOST_LOADS if how == "killed" else 0):
                await kill_while_it_loads(pipeline, "talker", seen)
            await becomes(pipeline, "talker", StageHealth.DEAD)
            assert deaths == [("talker", "killed by SIGKILL")] * (1 + MOST_LOADS)
            with pytest.raises(StageDiedError):
                pipeline.submit(pipeline.blueprint.admit("late", "hello", None))
        finally:
            folder = pipeline._fleet.owner.map.folder
            await pipeline.close()
        assert not left_behind(folder)

    run(scenario())


def test_closing_while_a_stage_loads_does_not_wait_for_it(monkeypatch):
    """It can't hear that it is to end, so it isn't asked: with the usual wait the end would be an hour away."""
    monkeypatch.setattr(fleet, "STOP_SECONDS", 3600.0)

    async def scenario():
        pipeline = client({"talker": {"load": 3600.0}})
        starting = asyncio.create_task(pipeline.start())
        while pipeline.health()["thinker"] is not StageHealth.READY:
            await asyncio.sleep(0.02)
        pids = pipeline.pids()
        starting.cancel()
        await asyncio.wait({starting})
        assert pipeline.health()["talker"] is StageHealth.DEAD and all(map(gone, pids.values()))

    run(scenario())


def test_closing_while_a_stage_waits_to_be_loaded_again(monkeypatch):
    monkeypatch.setattr(fleet, "PAUSES", (0.3, 0.3, 0.3, 0.3))

    async def scenario():
        pipeline = client(on_death=OnDeath.RESTART)
        await pipeline.start()
        dead = pipeline.pids()["talker"]
        os.kill(dead, signal.SIGKILL)
        await becomes(pipeline, "talker", StageHealth.RESTARTING)
        await pipeline.close()
        await asyncio.sleep(0.5)
        assert pipeline.pids()["talker"] == dead and not left_behind(pipeline._fleet.owner.map.folder)

    run(scenario())


def test_a_stage_that_hangs_ends_its_requests_at_their_deadline_and_is_killed_at_the_end():
    async def scenario():
        pipeline = client(deadline=0.5)
        await pipeline.start()
        pids = pipeline.pids()
        try:
            _, _, end = await say(pipeline, "hangs", "hello", fault="hang@talker")
            assert isinstance(end.error, DeadlineError)
        finally:
            await pipeline.close()
        assert all(map(gone, pids.values()))

    run(scenario())


def test_settings_that_a_stage_refuses_come_back_by_name():
    async def scenario():
        pipeline = client({"talker": {"no_start": True}})
        with pytest.raises(CapabilityError, match="as the script says") as caught:
            await pipeline.start()
        assert (caught.value.field, caught.value.allowed) == ("talker.no_start", ("false",))
        assert all(map(gone, pipeline.pids().values())) and not left_behind(pipeline._fleet.owner.map.folder)

    run(scenario())


def test_a_slow_consumer_gets_every_row_and_holds_its_producer_back():
    """The Talker may have two chunks on the road: it must stop in between, or it would fail for a full queue."""

    async def scenario():
        pipeline = client({"code2wav": {"pace": 0.03}, "talker": {"slots": 1}}, road={"per_request": 2, "queued": 2})
        await pipeline.start()
        try:
            text = "y" * 120
            samples, _, end = await say(pipeline, "slow", text)
            assert end.finish_reason == "stop"
            assert np.array_equal(samples, samples_of(text).astype(samples.dtype))
            await nothing_held(pipeline)
        finally:
            await pipeline.close()

    run(scenario())


@pytest.mark.covers("SV-3")
def test_chunks_over_tcp_are_the_same_also_to_a_stage_that_was_started_again():
    async def scenario():
        addresses = dict.fromkeys(STAGES, "tcp://127.0.0.1:*")
        pipeline = client(addresses=addresses, on_death=OnDeath.RESTART)
        await pipeline.start()
        try:
            for turn in range(2):
                texts = ["hello", "x" * 150]
                for text, (samples, _, end) in zip(
                    texts, await asyncio.gather(*(say(pipeline, f"{turn}-{len(text)}", text) for text in texts)), strict=True
                ):
                    assert end.finish_reason == "stop"
                    assert np.array_equal(samples, samples_of(text).astype(samples.dtype))
                await nothing_held(pipeline)
                os.kill(pipeline.pids()["talker"], signal.SIGKILL)
                while pipeline.health()["talker"] is StageHealth.READY:
                    await asyncio.sleep(0.02)
                while pipeline.health()["talker"] is not StageHealth.READY:
                    await asyncio.sleep(0.02)
            assert all(at.startswith("tcp://127.0.0.1:") for at in pipeline._fleet.owner.map.addresses.values())
        finally:
            await pipeline.close()

    run(scenario())


SERVER = """
import asyncio, sys
from tests.unit.pipeline.test_process import client
async def main():
    pipeline = client()
    await pipeline.start()
    print(pipeline._fleet.owner.map.folder, *pipeline.pids().values(), flush=True)
    async for event in pipeline.submit(pipeline.blueprint.admit("long", {"text": "hello " * 1000, "pace": 0.01}, None)):
        print("speaking", flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_its_server(how):
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        folder, *pids = server.stdout.readline().split()
        assert len(pids) == 3
        assert server.stdout.readline() == "speaking\n"  # a minute's text, from its first event on
        server.send_signal(how)
        server.wait(20)
        wait_until(lambda: all(gone(int(pid)) for pid in pids))
        wait_until(lambda: not left_behind(folder))
    finally:
        server.kill()
        server.stdout.close()
