"""Events in, commands out: every request ends once, truthfully, and leaves nothing behind (F10, F17, F19)."""

from __future__ import annotations

import random

import pytest

from stagevox.connectors.base import Chunk
from stagevox.errors import BadRequestError, ChunkOrderError, DeadlineError, RequestFailedError, StageDiedError
from stagevox.pipeline.events import (
    AbortAtStage,
    AddToStage,
    ChunkProduced,
    ClockTicked,
    EmitOutput,
    FinishRequest,
    ForwardChunk,
    RequestAborted,
    RequestArrived,
    RequestFailed,
    StageDied,
    StageProduced,
)
from stagevox.pipeline.orchestrator import Orchestrator
from stagevox.pipeline.request import OmniRequest
from stagevox.stage.payload import StageOutput, StageRequest

STAGES = ("thinker", "talker", "code2wav")


def request(req_id="a", **fields):
    first = StageRequest(req_id, [1, 2], sampling={"seed": 1}, options={"voice": "slt"})
    return OmniRequest(first, **fields)


def output(stage, reason=None, *, req_id="a", now=0.0, tokens=(), audio=None, error=None):
    return StageProduced(now, stage, StageOutput(req_id, list(tokens), {"audio": audio} if audio else {}, reason, error))


def chunk(stage, seq=0, *, req_id="a", now=0.0, end=True):
    return ChunkProduced(now, stage, Chunk(req_id, seq, end, {}))


def started(*req_ids, now=0.0, **options):
    orchestrator = Orchestrator(STAGES, **options)
    for req_id in req_ids or ("a",):
        orchestrator.handle(RequestArrived(now, request(req_id)))
    return orchestrator


def finish(commands):
    """The one FinishRequest among the commands, which is the last of them."""
    (one,) = [command for command in commands if isinstance(command, FinishRequest)]
    assert commands[-1] is one
    return one


def aborted_at(commands):
    return [command.stage for command in commands if isinstance(command, AbortAtStage)]


def run(orchestrator, events):
    commands = []
    for event in events:
        commands += orchestrator.handle(event)
    return commands


@pytest.mark.covers("RT-3")
def test_a_request_is_registered_at_every_stage_at_once():
    sampling = {"thinker": {"temperature": 0.5}, "talker": {"seed": 7}}
    commands = Orchestrator(STAGES).handle(RequestArrived(0.0, request(sampling=sampling)))
    assert commands == [
        AddToStage("code2wav", StageRequest("a", None, options={"voice": "slt"})),
        AddToStage("talker", StageRequest("a", None, sampling={"seed": 7}, options={"voice": "slt"})),
        AddToStage("thinker", StageRequest("a", [1, 2], sampling={"seed": 1, "temperature": 0.5}, options={"voice": "slt"})),
    ]


def test_a_whole_life():
    orchestrator = started(now=1.0)
    text, sound = output("thinker", "stop", tokens=[5], now=2.0), output("code2wav", audio="x", now=5.0)
    assert orchestrator.handle(text) == [EmitOutput("thinker", text.output)]
    assert orchestrator.handle(chunk("thinker", now=2.0)) == [ForwardChunk("talker", Chunk("a", 0, True, {}))]
    assert orchestrator.handle(chunk("talker", end=False)) == [ForwardChunk("code2wav", Chunk("a", 0, False, {}))]
    assert orchestrator.handle(sound) == [EmitOutput("code2wav", sound.output)]
    assert orchestrator.handle(output("talker", "stop")) == []
    orchestrator.handle(chunk("talker", 1))
    end = finish(orchestrator.handle(output("code2wav", "stop", now=6.0)))
    assert (end.finish_reason, end.error) == ("stop", None)
    assert (end.timing.arrived_at, end.timing.first_output_at, end.timing.finished_at) == (1.0, 5.0, 6.0)
    orchestrator.assert_idle()


def test_the_road_may_end_early():
    orchestrator = Orchestrator(STAGES)
    commands = orchestrator.handle(RequestArrived(0.0, request(last_stage="thinker")))
    assert [command.stage for command in commands] == ["thinker"]
    assert orchestrator.handle(chunk("thinker")) == []
    assert finish(orchestrator.handle(output("thinker", "stop", tokens=[1]))).finish_reason == "stop"


@pytest.mark.parametrize("capped", STAGES)
def test_length_is_told_wherever_the_cap_was(capped):
    orchestrator = started()
    reasons = {stage: "length" if stage == capped else "stop" for stage in STAGES}
    events = [output("thinker", reasons["thinker"]), chunk("thinker"), output("talker", reasons["talker"]), chunk("talker")]
    assert finish(run(orchestrator, [*events, output("code2wav", reasons["code2wav"])])).finish_reason == "length"


def test_an_end_nobody_has_heard_of_is_not_called_stop():
    orchestrator = started()
    run(orchestrator, [output("thinker", "stop"), chunk("thinker"), output("talker", "repetition"), chunk("talker")])
    assert finish(orchestrator.handle(output("code2wav", "stop"))).finish_reason == "length"


def test_no_frames_at_all_ends_cleanly():
    orchestrator = started()
    run(orchestrator, [output("thinker", "stop"), chunk("thinker"), output("talker", "stop"), chunk("talker")])
    end = finish(orchestrator.handle(output("code2wav", "stop")))
    assert (end.finish_reason, end.timing.first_output_at) == ("stop", None)


@pytest.mark.parametrize("seed", range(50))
def test_outputs_and_chunks_may_overtake_each_other(seed):
    """Outputs and chunks travel apart; per road the order holds, between roads nothing does."""
    orchestrator = started()
    roads = [
        [output("thinker", tokens=[1]), output("thinker", "stop")],
        [output("talker", tokens=[1]), output("talker", "length")],
        [
            chunk("thinker"),
            chunk("talker", end=False),
            chunk("talker", 1),
            output("code2wav", audio="x"),
            output("code2wav", "stop"),
        ],
    ]
    rng = random.Random(seed)
    commands = []
    while any(roads):
        commands += orchestrator.handle(rng.choice([road for road in roads if road]).pop(0))
    assert finish(commands).finish_reason == "length"
    assert aborted_at(commands) == []
    orchestrator.assert_idle()


def test_a_capped_last_stage_frees_the_others():
    orchestrator = started()
    commands = orchestrator.handle(output("code2wav", "length"))
    assert aborted_at(commands) == ["thinker", "talker"]
    assert finish(commands).finish_reason == "length"


@pytest.mark.parametrize("talker", ["stop", "length"])
def test_speech_that_ends_before_the_text_does_not_cut_it(talker):
    """Where a client reads the text, the Thinker writes on; how the whole ended is then what each stage says."""
    orchestrator = started(text_stage="thinker")
    run(orchestrator, [chunk("thinker", end=False), output("talker", talker), chunk("talker")])
    assert orchestrator.handle(output("code2wav", "stop")) == []
    (finish,) = orchestrator.handle(output("thinker", "stop"))
    assert (finish.req_id, finish.finish_reason) == ("a", talker)
    assert orchestrator.num_requests == 0


@pytest.mark.parametrize("talker", ["stop", "length"])
def test_a_talker_that_ends_before_the_text_does_not_claim_to_have_spoken_all(talker):
    orchestrator = started()
    run(orchestrator, [chunk("thinker", end=False), output("talker", talker), chunk("talker")])
    commands = orchestrator.handle(output("code2wav", "stop"))
    assert aborted_at(commands) == ["thinker"]
    assert (finish(commands).finish_reason, finish(commands).error) == ("length", None)


@pytest.mark.covers("EX-16")
@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_request_is_freed_elsewhere_and_alone(stage):
    orchestrator = started("a", "b")
    commands = orchestrator.handle(output(stage, "error", error="the hook raised"))
    assert aborted_at(commands) == [name for name in STAGES if name != stage]
    end = finish(commands)
    assert (end.req_id, end.finish_reason, str(end.error)) == ("a", "error", f"{stage}: the hook raised")
    assert type(end.error) is RequestFailedError
    assert orchestrator.req_ids == ["b"]


def test_a_stage_that_aborts_by_itself():
    commands = started().handle(output("talker", "abort"))
    assert aborted_at(commands) == ["thinker", "code2wav"]
    assert (finish(commands).finish_reason, finish(commands).error) == ("abort", None)


@pytest.mark.covers("RT-8")
def test_abort_frees_where_the_request_still_is():
    orchestrator = started()
    run(orchestrator, [output("thinker", "stop"), chunk("thinker")])
    commands = orchestrator.handle(RequestAborted(3.0, "a"))
    assert aborted_at(commands) == ["talker", "code2wav"]
    assert finish(commands).finish_reason == "abort"
    assert orchestrator.handle(RequestAborted(3.0, "a")) == []
    orchestrator.assert_idle()


def test_what_comes_late_is_ignored():
    orchestrator = started()
    orchestrator.handle(RequestAborted(0.0, "a"))
    late = [output("thinker", tokens=[1]), output("talker", "stop"), chunk("thinker"), RequestFailed(0.0, "a", ValueError())]
    assert run(orchestrator, late) == []
    orchestrator.assert_idle()


def test_what_comes_after_a_stage_has_ended_is_ignored():
    orchestrator = started()
    orchestrator.handle(output("thinker", "stop"))
    assert run(orchestrator, [output("thinker", tokens=[9]), output("thinker", "length")]) == []


def test_an_id_in_flight_is_refused_and_its_owner_unharmed():
    orchestrator = started()
    with pytest.raises(BadRequestError, match="req_id: 'a' is already in flight"):
        orchestrator.handle(RequestArrived(1.0, request("a")))
    assert orchestrator.req_ids == ["a"]
    orchestrator.handle(RequestAborted(1.0, "a"))
    assert len(orchestrator.handle(RequestArrived(2.0, request("a")))) == 3


def test_a_named_error_is_passed_on_and_another_is_wrapped():
    named, other = ChunkOrderError("lost"), ValueError("bad")
    orchestrator = started("a", "b")
    assert finish(orchestrator.handle(RequestFailed(0.0, "a", named))).error is named
    end = finish(orchestrator.handle(RequestFailed(0.0, "b", other)))
    assert type(end.error) is RequestFailedError and end.error.__cause__ is other


def test_starved_for_its_first_chunk():
    orchestrator = started(deadline=30.0)
    orchestrator.handle(output("thinker", "stop", now=5.0))
    assert orchestrator.next_deadline() == 35.0
    assert orchestrator.handle(ClockTicked(34.9)) == []
    commands = orchestrator.handle(ClockTicked(35.0))
    assert aborted_at(commands) == ["talker", "code2wav"]
    end = finish(commands)
    assert isinstance(end.error, DeadlineError) and end.finish_reason == "error"
    assert str(end.error) == "talker: no input from thinker in 30 s"
    orchestrator.assert_idle()


def test_starved_for_a_later_chunk():
    orchestrator = started()
    run(orchestrator, [output("thinker", "stop"), chunk("thinker"), chunk("talker", end=False, now=10.0)])
    run(orchestrator, [output("code2wav", audio="x", now=11.0), output("talker", "stop", now=12.0)])
    assert orchestrator.handle(ClockTicked(41.9)) == []
    assert "code2wav: no input from talker" in str(finish(orchestrator.handle(ClockTicked(42.0))).error)


def test_starving_is_not_excused_by_others():
    orchestrator = started("a", "b")
    orchestrator.handle(output("thinker", "stop", req_id="a"))
    for second in range(40):
        orchestrator.handle(output("thinker", tokens=[1], req_id="b", now=float(second)))
        ends = [end.req_id for end in orchestrator.handle(ClockTicked(float(second))) if isinstance(end, FinishRequest)]
        assert ends == (["a"] if second == 30 else [])
    assert orchestrator.req_ids == ["b"]


def test_queueing_behind_others_is_not_starving():
    orchestrator = started("a", "b")
    for second in range(100):
        orchestrator.handle(output("thinker", tokens=[1], req_id="a", now=float(second)))
        assert orchestrator.handle(ClockTicked(float(second))) == []
    assert orchestrator.next_deadline() == 129.0
    commands = orchestrator.handle(ClockTicked(129.0))
    assert sum(isinstance(command, FinishRequest) for command in commands) == 2
    assert "thinker: no output in 30 s" in str(commands[-1].error)


def test_a_long_answer_is_not_starving():
    orchestrator = started()
    for second in range(0, 200, 20):
        orchestrator.handle(output("thinker", tokens=[1], now=float(second)))
        assert orchestrator.handle(ClockTicked(float(second))) == []


def test_no_request_no_deadline():
    assert Orchestrator(STAGES).next_deadline() == float("inf")
    assert Orchestrator(STAGES).handle(ClockTicked(1e9)) == []


@pytest.mark.parametrize("deadline", [0, -1, float("nan")])
def test_a_deadline_that_can_not_be_is_refused(deadline):
    with pytest.raises(ValueError, match="deadline"):
        Orchestrator(STAGES, deadline=deadline)


@pytest.mark.parametrize("stages", [(), ("a", "a")])
def test_stages_need_names_of_their_own(stages):
    with pytest.raises(ValueError, match="names"):
        Orchestrator(stages)


def test_a_dead_stage_ends_those_who_need_it():
    orchestrator = started("a", "b")
    run(orchestrator, [output("thinker", "stop", req_id="a"), chunk("thinker", req_id="a")])
    commands = orchestrator.handle(StageDied(1.0, "thinker", "MemoryError: no"))
    assert aborted_at(commands) == ["talker", "code2wav"]
    assert (finish(commands).req_id, finish(commands).finish_reason) == ("b", "error")
    assert isinstance(finish(commands).error, StageDiedError)
    run(orchestrator, [output("talker", "stop"), chunk("talker")])
    assert finish(orchestrator.handle(output("code2wav", "stop"))).finish_reason == "stop"
    orchestrator.assert_idle()


def test_requests_that_need_a_dead_stage_are_turned_away_at_once():
    orchestrator = Orchestrator(STAGES)
    orchestrator.handle(StageDied(1.0, "talker", "gone"))
    (end,) = orchestrator.handle(RequestArrived(2.0, request()))
    assert isinstance(end.error, StageDiedError) and "talker: the engine died: gone" in str(end.error)
    assert len(orchestrator.handle(RequestArrived(2.0, request(last_stage="thinker")))) == 1


@pytest.mark.covers("RT-8")
@pytest.mark.parametrize("seed", range(200))
def test_any_schedule_ends_every_request_once_and_leaves_nothing(seed):
    """Random events, sensible or not: no request ends twice, none is told anything after its end, all end in the end."""
    rng = random.Random(seed)
    orchestrator = Orchestrator(STAGES, deadline=5.0)
    now, born, ended, held = 0.0, [], {}, {stage: set() for stage in STAGES}

    def carry_out(commands):
        for command in commands:
            match command:
                case AddToStage(stage, one):
                    held[stage].add(one.req_id)
                case AbortAtStage(stage, req_ids):
                    held[stage] -= set(req_ids)
                case ForwardChunk(_, one):
                    assert one.req_id not in ended
                case EmitOutput(_, out):
                    assert out.req_id not in ended
                case FinishRequest(req_id):
                    assert req_id not in ended
                    ended[req_id] = command

    for _ in range(300):
        now += rng.choice([0, 0, 0.1, 1.0])
        stage, req_id = rng.choice(STAGES), f"r{rng.randrange(len(born) + 1)}"
        kind = rng.randrange(12)
        if kind < 3 and len(born) < 20:
            carry_out(orchestrator.handle(RequestArrived(now, request(f"r{len(born)}"))))
            born.append(f"r{len(born)}")
        elif kind < 6:
            carry_out(orchestrator.handle(chunk(stage, req_id=req_id, now=now, end=rng.random() < 0.5)))
        elif kind < 10:
            reason = rng.choice([None, None, None, "stop", "stop", "length", "error", "abort"])
            if reason:
                held[stage].discard(req_id)
            carry_out(orchestrator.handle(output(stage, reason, req_id=req_id, now=now, tokens=[1])))
        elif kind == 10:
            carry_out(orchestrator.handle(RequestAborted(now, req_id)))
        else:
            carry_out(orchestrator.handle(ClockTicked(now)))
        assert orchestrator.num_requests == len(born) - len(ended)
    carry_out(orchestrator.handle(ClockTicked(now + 5.0)))
    orchestrator.assert_idle()
    assert set(ended) == set(born)
    assert held == {stage: set() for stage in STAGES}
    assert all((end.error is not None) == (end.finish_reason == "error") for end in ended.values())
