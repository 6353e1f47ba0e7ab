"""The generation runner and scheduler: each position yields its sample once, whatever the split (EX-9)."""

import pytest

from stagevox.contract import SAMPLE_RATE, WAVEFORM
from stagevox.stage.wait import WaitState

pytestmark = pytest.mark.covers("EX-9", "EX-2")

ADAPTED = {"input_adapter": "tests.engine.stage.toy_models:ToyAdapter"}


@pytest.fixture(params=[3, 64], ids=["budget-3", "budget-64"])
def stage(engine, request):
    harness = engine("ToyVocoder", spec=ADAPTED, max_num_batched_tokens=request.param, max_num_seqs=3)
    harness.budget = request.param
    return harness


def frames(count, seed=0):
    return [1 + (7 * seed + 3 * n) % 50 for n in range(count)]


def samples(codes):
    """The toy's output, from its definition."""
    return [1000.0 * before + now for before, now in zip([0, *codes], codes, strict=False)]


def spans(stage, name):
    return [(row.num_computed, row.span) for row in stage.trace(name)]


def test_any_split_gives_the_same(stage):
    stage.add("a", None)
    stage.deliver("a", ids=frames(11), end=True)
    stage.run()
    assert stage.named("a", WAVEFORM).tolist() == samples(frames(11))
    assert spans(stage, "a") == ([(0, 11)] if stage.budget == 64 else [(0, 3), (3, 3), (6, 3), (9, 2)])
    assert {out.multimodal[SAMPLE_RATE] for out in stage.outputs["a"]} == {16000}
    assert (stage.finish["a"], stage.tokens["a"]) == ("stop", [])


@pytest.mark.covers("SV-3")
def test_chunks_that_come_late(stage):
    """Between chunks the request keeps its slot and the engine has nothing to do."""
    stage.add("a", None)
    assert stage.scheduler.wait_room == {stage.ids["a"]: WaitState.WAITING_FOR_INPUT}
    assert not stage.engine.has_work()
    codes = frames(13)
    for first, last in [(0, 4), (4, 5), (5, 11)]:
        stage.deliver("a", ids=codes[first:last])
        assert stage.engine.has_work()
        stage.run()
        assert stage.named("a", WAVEFORM).tolist() == samples(codes[:last])
        assert stage.scheduler.wait_room == {stage.ids["a"]: WaitState.WAITING_FOR_CHUNK}
        assert stage.engine.num_requests == 1
        assert "a" not in stage.finish
    stage.deliver("a", ids=codes[11:], end=True)
    stage.run()
    assert stage.named("a", WAVEFORM).tolist() == samples(codes)
    assert stage.finish["a"] == "stop"


def test_one_that_waits_for_a_chunk_does_not_hold_up_another(stage):
    stage.add("slow", None)
    stage.add("quick", None)
    stage.deliver("slow", ids=frames(4, 1))
    stage.run()
    stage.deliver("quick", ids=frames(9, 2), end=True)
    stage.run()
    assert stage.named("quick", WAVEFORM).tolist() == samples(frames(9, 2))
    stage.deliver("slow", ids=frames(6, 1)[4:], end=True)
    stage.run()
    assert stage.named("slow", WAVEFORM).tolist() == samples(frames(6, 1))


def test_chunks_that_arrive_together_are_all_consumed(stage):
    codes = frames(10)
    stage.add("a", None)
    for first in range(0, 10, 2):
        stage.deliver("a", ids=codes[first : first + 2], end=first == 8)
    stage.run()
    assert stage.named("a", WAVEFORM).tolist() == samples(codes)
    assert stage.finish["a"] == "stop"


@pytest.mark.parametrize("before", [0, 5])
def test_an_end_without_frames(stage, before):
    """With nothing at all to say, and after all has been said."""
    stage.add("a", None)
    if before:
        stage.deliver("a", ids=frames(before))
        stage.run()
    stage.deliver("a", ids=[], end=True)
    stage.run()
    assert (stage.finish["a"], stage.error["a"]) == ("stop", None)
    heard = [out.multimodal[WAVEFORM] for out in stage.outputs["a"] if WAVEFORM in out.multimodal]
    assert [sample for part in heard for sample in part.tolist()] == samples(frames(before))


def test_an_end_while_frames_are_still_to_do(stage):
    stage.add("a", None)
    stage.deliver("a", ids=frames(8))
    stage.step()
    stage.deliver("a", ids=[], end=True)
    stage.run()
    assert stage.named("a", WAVEFORM).tolist() == samples(frames(8))
    assert stage.finish["a"] == "stop"
    assert stage.outputs["a"][-1].finish_reason == "stop"


def test_a_payload_that_comes_ahead_of_the_frames_is_kept(stage):
    stage.add("a", None)
    stage.deliver("a", ids=[], payload={"fault": {"hook": "forward", "kind": "raise", "at": 0}})
    stage.run()
    assert stage.engine.num_requests == 1
    stage.deliver("a", ids=frames(4), end=True)
    stage.run()
    assert stage.error["a"] == "HookRaisedError: forward: Boom: marked request"


@pytest.mark.covers("EX-4", "EX-15")
def test_a_batch_of_unequal_spans(engine):
    stage = engine("ToyVocoder", spec=ADAPTED, max_num_batched_tokens=64, max_num_seqs=3)
    lengths = {"a": 21, "b": 1, "c": 30}
    for seed, (name, length) in enumerate(lengths.items()):
        stage.add(name, None)
        stage.deliver(name, ids=frames(length, seed), end=True)
    stage.run()
    assert [21, 1, 30] in stage.runner.model.calls
    for seed, (name, length) in enumerate(lengths.items()):
        assert stage.named(name, WAVEFORM).tolist() == samples(frames(length, seed))


def test_more_requests_than_slots(stage):
    for seed in range(9):
        stage.add(f"r{seed}", None)
        stage.deliver(f"r{seed}", ids=frames(5 + seed, seed), end=True)
    stage.run()
    for seed in range(9):
        assert stage.named(f"r{seed}", WAVEFORM).tolist() == samples(frames(5 + seed, seed))


@pytest.mark.covers("EX-16")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("raise", "HookRaisedError: forward: Boom: marked request"),
        ("type", "ContractError: forward: a generation model returns an OmniOutput, not a NoneType"),
        ("count", "HookCountError: forward: expected 1 values of audio.waveform, got 2"),
    ],
)
@pytest.mark.parametrize("at", [0, 7])
def test_an_error_is_the_guilty_ones_alone(stage, kind, reason, at):
    lengths = {"a": 12, "bad": 10, "b": 9}
    for seed, (name, length) in enumerate(lengths.items()):
        stage.add(name, None)
        fault = {"fault": {"hook": "forward", "kind": kind, "at": at}} if name == "bad" else {}
        stage.deliver(name, ids=frames(length, seed), end=True, payload=fault)
    stage.run()
    for seed, name in [(0, "a"), (2, "b")]:
        assert stage.named(name, WAVEFORM).tolist() == samples(frames(lengths[name], seed))
        assert stage.finish[name] == "stop"
    assert (stage.finish["bad"], stage.error["bad"]) == ("error", reason)
    stage.assert_idle()
    stage.add("again", None)
    stage.deliver("again", ids=frames(10, 1), end=True)
    stage.run()
    assert stage.named("again", WAVEFORM).tolist() == samples(frames(10, 1))


@pytest.mark.covers("EX-16")
@pytest.mark.parametrize("ahead", [0, 4])
def test_a_chunk_the_adapter_cannot_read(stage, ahead):
    stage.add("bad", None)
    stage.add("a", None)
    if ahead:
        stage.deliver("bad", ids=frames(ahead))
        stage.run()
    stage.deliver("bad", bad=True)
    stage.deliver("a", ids=frames(9), end=True)
    stage.run()
    assert (stage.finish["bad"], stage.error["bad"]) == ("error", "Boom: unreadable chunk")
    assert stage.named("a", WAVEFORM).tolist() == samples(frames(9))


def test_more_frames_than_the_context(stage):
    stage.add("long", None)
    stage.deliver("long", ids=frames(100))
    stage.run()
    stage.deliver("long", ids=frames(40), end=True)
    stage.run()
    assert stage.error["long"] == "TextTooLongError: text: needs 140 positions in stage toy, which has 127"
    assert stage.named("long", WAVEFORM).tolist() == samples(frames(100))


@pytest.mark.parametrize("when", ["registered", "delivered", "running", "parked"])
def test_aborted(stage, when):
    stage.add("a", None)
    if when != "registered":
        stage.deliver("a", ids=frames(9))
    if when == "running":
        stage.step()
    if when == "parked":
        stage.run()
        assert not stage.engine.has_work()
    stage.abort("a")
    stage.deliver("a", ids=frames(3), end=True)
    stage.run()
    assert "a" not in stage.finish
    stage.assert_idle()


@pytest.mark.covers("EX-6")
def test_a_second_execute_before_the_first_is_consumed_raises(stage):
    stage.add("a", None)
    stage.deliver("a", ids=frames(3), end=True)
    runner, execute = stage.runner, stage.runner.execute_model
    caught = []

    def twice(scheduler_output, *args, **kwargs):
        result = execute(scheduler_output, *args, **kwargs)
        if scheduler_output.num_scheduled_tokens:
            with pytest.raises(RuntimeError, match="sample_tokens") as error:
                execute(scheduler_output, *args, **kwargs)
            caught.append(error)
        return result

    runner.execute_model = twice
    try:
        stage.run()
    finally:
        del runner.execute_model
    assert len(caught) == 1
    assert stage.named("a", WAVEFORM).tolist() == samples(frames(3))
