"""All stages in one process: right rows for every request, faults kept to their request (F07, F10, F19, F20)."""

from __future__ import annotations

import random

import pytest

from stagevox.connectors.local import LocalConnector
from stagevox.errors import BadRequestError, ChunkOrderError, DeadlineError, RequestFailedError, StageDiedError
from stagevox.pipeline.events import EmitOutput, FinishRequest
from stagevox.pipeline.inline import IDLE_SLICE, InlineDriver
from stagevox.pipeline.orchestrator import Orchestrator
from stagevox.pipeline.request import OmniRequest
from stagevox.stage.payload import StageRequest

AUDIO = "audio.waveform"


@pytest.fixture
def build(fake_stages, clock):
    def make(**options):
        stages = fake_stages(**options)
        orchestrator = Orchestrator([stage.name for stage in stages])
        driver = InlineDriver(stages, orchestrator, LocalConnector(), clock=clock, sleep=clock.sleep)
        return driver, stages

    return make


def request(req_id, length=3, **sampling):
    return OmniRequest(StageRequest(req_id, list(range(length))), sampling=sampling)


def collect(events):
    """Samples and the end, per request."""
    samples, ends = {}, {}
    for event in events:
        match event:
            case EmitOutput("code2wav", output):
                samples.setdefault(output.req_id, []).extend(output.multimodal.get(AUDIO, []))
            case FinishRequest(req_id):
                assert req_id not in ends
                ends[req_id] = event
    return samples, ends


def spoken(req_id, length=3):
    return [("talker", req_id, n) for n in range(3 * length)]


@pytest.mark.covers("SV-3", "RT-3")
def test_one_request_goes_through(build):
    driver, _ = build()
    driver.submit(request("a"))
    samples, ends = collect(driver.events())
    assert samples == {"a": spoken("a")}
    assert ends["a"].finish_reason == "stop"
    driver.assert_idle()


@pytest.mark.covers("SV-3")
def test_more_requests_than_slots_all_get_their_own_rows(build):
    driver, _ = build(slots=2)
    for n in range(9):
        driver.submit(request(f"r{n}", length=n + 1))
    samples, ends = collect(driver.events())
    assert samples == {f"r{n}": spoken(f"r{n}", n + 1) for n in range(9)}
    assert {end.finish_reason for end in ends.values()} == {"stop"}
    driver.assert_idle()


def test_sound_comes_before_the_talker_has_ended(build):
    driver, (_, talker, _) = build()
    driver.submit(request("a", length=10))
    for event in driver.events():
        if isinstance(event, EmitOutput) and event.stage == "code2wav":
            assert talker.num_requests == 1
            assert len(event.output.multimodal[AUDIO]) == 2
            break
    driver.assert_idle()


def test_no_frames_is_a_clean_end(build):
    driver, (_, talker, _) = build()
    talker.factor = 0
    driver.submit(request("a"))
    samples, ends = collect(driver.events())
    assert samples == {} and ends["a"].finish_reason == "stop"
    driver.assert_idle()


def test_a_capped_talker_is_told(build):
    driver, _ = build()
    driver.submit(request("a", talker={"max_tokens": 5}))
    driver.submit(request("b"))
    samples, ends = collect(driver.events())
    assert samples == {"a": spoken("a")[:5], "b": spoken("b")}
    assert {req_id: end.finish_reason for req_id, end in ends.items()} == {"a": "length", "b": "stop"}


@pytest.mark.parametrize("stage, seq", [("thinker", 0), ("talker", 0), ("talker", 1), ("talker", 2)])
def test_a_lost_chunk_ends_its_request_only(build, clock, stage, seq):
    driver, stages = build()
    {one.name: one for one in stages}[stage].lose.add(("a", seq))
    driver.submit(request("a"))
    driver.submit(request("b"))
    samples, ends = collect(driver.events())
    assert samples["b"] == spoken("b") and ends["b"].finish_reason == "stop"
    assert ends["a"].finish_reason == "error"
    lost_last = stage == "thinker" or seq == 2
    assert isinstance(ends["a"].error, DeadlineError if lost_last else ChunkOrderError)
    assert clock.now == pytest.approx(130.0 if lost_last else 100.0)
    driver.assert_idle()


def test_waiting_sleeps_instead_of_spinning(build, clock):
    driver, (thinker, talker, code2wav) = build()
    thinker.lose.add(("a", 0))
    driver.submit(request("a"))
    collect(driver.events())
    assert len(clock.slept) == pytest.approx(30 / IDLE_SLICE, abs=2)
    assert talker.steps == code2wav.steps == 0


@pytest.mark.covers("EX-16")
@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_error_belongs_to_its_request(build, number):
    driver, stages = build()
    stages[number].fail.add("a")
    for req_id in "abc":
        driver.submit(request(req_id))
    samples, ends = collect(driver.events())
    assert isinstance(ends["a"].error, RequestFailedError)
    assert "the hook raised" in str(ends["a"].error)
    for req_id in "bc":
        assert samples[req_id] == spoken(req_id) and ends[req_id].finish_reason == "stop"
    driver.assert_idle()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_request_a_stage_will_not_take_fails_alone(build, number):
    driver, stages = build()
    stages[number].refuse.add("a")
    driver.submit(request("a"))
    driver.submit(request("b"))
    samples, ends = collect(driver.events())
    assert ends["a"].finish_reason == "error" and "no such sampling parameter" in str(ends["a"].error)
    assert samples == {"b": spoken("b")}
    driver.assert_idle()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_dead_stage_fails_those_who_need_it_and_is_left_alone(build, number):
    driver, stages = build()
    stages[number].die_at = 3
    for req_id in "abc":
        driver.submit(request(req_id))
    _, ends = collect(driver.events())
    assert {type(end.error) for end in ends.values()} == {StageDiedError}
    assert stages[number].steps == 3
    driver.assert_idle()
    driver.submit(request("d"))
    _, ends = collect(driver.events())
    assert f"{stages[number].name}: the engine died: RuntimeError: out of memory" in str(ends["d"].error)
    assert all(not stage.held for stage in stages if stage is not stages[number])


def test_who_is_past_a_dead_stage_is_served(build):
    driver, (thinker, _, _) = build(slots=1)
    driver.submit(request("a"))
    driver.submit(request("b"))
    thinker.die_at = 6
    samples, ends = collect(driver.events())
    assert samples == {"a": spoken("a")}
    assert ends["a"].finish_reason == "stop" and isinstance(ends["b"].error, StageDiedError)
    driver.assert_idle()


def test_a_stage_whose_abort_raises_is_dead(build):
    driver, (_, talker, _) = build()
    driver.submit(request("a"))
    driver.submit(request("b"))

    def broken(req_ids):
        raise RuntimeError("core gone")

    talker.abort = broken
    driver.abort("a")
    _, ends = collect(driver.events())
    assert ends["a"].finish_reason == "abort"
    assert isinstance(ends["b"].error, StageDiedError)


@pytest.mark.covers("RT-8")
@pytest.mark.parametrize("at", range(0, 14, 2))
def test_abort_at_any_time_frees_everything(build, at):
    driver, _ = build(slots=2)
    driver.submit(request("a"))
    driver.submit(request("b"))
    events = []
    for _ in range(at):
        events += driver.step()
    driver.abort("a")
    driver.abort("unknown")
    samples, ends = collect([*events, *driver.events()])
    assert samples["b"] == spoken("b") and ends["b"].finish_reason == "stop"
    assert ends["a"].finish_reason == ("abort" if at < 14 else "stop")
    driver.assert_idle()


@pytest.mark.covers("RT-8")
def test_two_hundred_listeners_that_leave(build):
    driver, stages = build()
    for n in range(200):
        driver.submit(request(f"r{n}"))
        for _ in range(n % 7):
            driver.step()
        driver.abort(f"r{n}")
    collect(driver.events())
    driver.assert_idle()
    assert all(not stage.processor.num_open for stage in stages if stage.processor)


def test_an_id_in_flight_is_refused(build):
    driver, _ = build()
    driver.submit(request("a"))
    with pytest.raises(BadRequestError):
        driver.submit(request("a"))
    samples, _ = collect(driver.events())
    assert samples == {"a": spoken("a")}
    driver.submit(request("a"))
    assert collect(driver.events())[0] == {"a": spoken("a")}
    driver.assert_idle()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_ctrl_c_leaves_a_clean_state(build, number):
    driver, stages = build()
    stages[number].die_at, stages[number].death = 2, KeyboardInterrupt()
    driver.submit(request("a"))
    driver.submit(request("b"))
    with pytest.raises(KeyboardInterrupt):
        collect(driver.events())
    driver.assert_idle()
    driver.submit(request("c"))
    assert collect(driver.events())[0] == {"c": spoken("c")}


def test_giving_up_the_iteration_aborts(build):
    driver, _ = build()
    driver.submit(request("a"))
    events = driver.events()
    next(events)
    events.close()
    driver.assert_idle()


def test_requests_may_come_while_others_run(build):
    driver, _ = build()
    driver.submit(request("a"))
    late, samples = ["b", "c"], {}
    for event in driver.events():
        if isinstance(event, EmitOutput) and event.stage == "code2wav":
            samples.setdefault(event.output.req_id, []).extend(event.output.multimodal[AUDIO])
            if late:
                driver.submit(request(late.pop(0)))
    assert samples == {req_id: spoken(req_id) for req_id in "abc"}


def test_statistics(build, clock):
    def cost(stage):
        clock.now += {"thinker": 0.001, "talker": 0.002, "code2wav": 0.01}[stage.name]

    driver, stages = build(on_step=cost)
    driver.submit(request("a"))
    _, ends = collect(driver.events())
    thinker, talker, code2wav = driver.stats()
    assert [stats.steps for stats in driver.stats()] == [stage.steps for stage in stages]
    assert (thinker.tokens, talker.tokens, code2wav.tokens) == (3, 9, 0)
    assert talker.seconds == pytest.approx(0.02)
    assert talker.ms_per_token == pytest.approx(20 / 9)
    assert code2wav.ms_per_token != code2wav.ms_per_token
    assert talker.since(driver.stats()[1]).steps == 0
    timing = ends["a"].timing
    assert timing.arrived_at == 100.0
    assert timing.first_output_at - timing.arrived_at == pytest.approx(4 * 0.001 + 2 * 0.002 + 0.01)
    assert timing.finished_at == pytest.approx(clock.now)


def test_no_stage_starves_another(build):
    driver, stages = build(slots=64)
    for n in range(30):
        driver.submit(request(f"r{n}", length=10))
    rounds = 0
    while driver.num_requests:
        before = [stage.steps for stage in stages]
        ready = [stage.has_work() for stage in stages]
        driver.step()
        rounds += 1
        assert all(stage.steps > was for stage, was, had in zip(stages, before, ready, strict=True) if had)
    assert rounds < 60


def test_stages_must_be_those_of_the_orchestrator(fake_stages):
    with pytest.raises(ValueError, match="stages"):
        InlineDriver(fake_stages(), Orchestrator(["talker"]), LocalConnector())


@pytest.mark.covers("RT-8")
@pytest.mark.parametrize("seed", range(60))
def test_any_mix_of_faults_leaves_the_others_right(build, seed):
    rng = random.Random(seed)
    driver, stages = build(slots=rng.randint(1, 4))
    lengths = {f"r{n}": rng.randint(0, 6) for n in range(12)}
    bad = set(rng.sample(sorted(lengths), 4))
    for req_id in bad:
        stage = rng.choice(stages)
        rng.choice([stage.fail.add, stage.refuse.add, stage.mute.add, lambda one: stages[0].lose.add((one, 0))])(req_id)
    aborted = set(rng.sample(sorted(lengths), 2))
    events = []
    for req_id, length in lengths.items():
        driver.submit(request(req_id, length=length))
        for _ in range(rng.randint(0, 4)):
            events += driver.step()
    for req_id in aborted:
        driver.abort(req_id)
    samples, ends = collect([*events, *driver.events()])
    assert set(ends) == set(lengths)
    driver.assert_idle()
    for req_id in set(lengths) - bad - aborted:
        assert ends[req_id].finish_reason == "stop"
        assert samples.get(req_id, []) == spoken(req_id, lengths[req_id])
