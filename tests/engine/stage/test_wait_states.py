"""Registered is not ready: requests that wait for upstream (EX-2)."""

import pytest

from stagevox.stage.payload import StageRequest
from stagevox.stage.wait import WaitState

pytestmark = pytest.mark.covers("EX-2")

ADAPTED = {"input_adapter": "tests.engine.stage.toy_models:ToyAdapter"}


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def stage(engine, request):
    return engine("ToyMTP", spec=ADAPTED, async_scheduling=request.param)


def said(oracle, prompt, rows, seed, count=8):
    return oracle.say(prompt(20, seed), count, rows=rows(seed), mtp=True)


def test_registered_then_delivered(stage, oracle, prompt, rows):
    stage.add("a", None, 8)
    assert stage.engine.num_requests == 1
    assert stage.scheduler.wait_room == {stage.ids["a"]: WaitState.WAITING_FOR_INPUT}
    assert not stage.engine.has_work()
    stage.deliver("a", ids=prompt(20, 1), payload={"rows": rows(1)})
    assert stage.engine.has_work()
    stage.run()
    assert stage.tokens["a"] == said(oracle, prompt, rows, 1).tokens
    assert stage.codes["a"] == said(oracle, prompt, rows, 1).codes


def test_one_that_waits_neither_runs_nor_holds_up_the_other(stage, oracle, prompt, rows):
    stage.add("waits", None, 8)
    stage.add("runs", prompt(20, 2), 8, rows=rows(2))
    stage.run()
    assert stage.tokens["runs"] == said(oracle, prompt, rows, 2).tokens
    assert stage.trace("waits") == []
    assert stage.engine.num_requests == 1
    stage.deliver("waits", ids=prompt(20, 1), payload={"rows": rows(1)})
    stage.run()
    assert stage.tokens["waits"] == said(oracle, prompt, rows, 1).tokens


def test_more_wait_than_there_are_slots(stage, oracle, prompt, rows):
    """Waiting takes no slot (F20): nine wait at an engine of four, and are delivered in another order."""
    for seed in range(9):
        stage.add(f"r{seed}", None, 8)
    assert not stage.engine.has_work()
    for seed in reversed(range(9)):
        stage.deliver(f"r{seed}", ids=prompt(20, seed), payload={"rows": rows(seed)})
    stage.run()
    for seed in range(9):
        assert stage.codes[f"r{seed}"] == said(oracle, prompt, rows, seed).codes


def test_aborted_while_it_waits(stage, prompt, rows):
    stage.add("a", None, 8)
    stage.abort("a")
    stage.assert_idle()
    stage.deliver("a", ids=prompt(20, 1), payload={"rows": rows(1)})
    stage.run()
    assert (stage.tokens, stage.finish) == ({}, {})


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_aborted_while_it_runs(stage, oracle, prompt, rows, after):
    stage.add("a", prompt(20, 1), 50, rows=rows(1))
    stage.add("b", prompt(20, 2), 8, rows=rows(2))
    for _ in range(after):
        stage.step()
    stage.abort("a", "a")
    stage.engine.abort(["never heard of"])
    stage.run()
    assert "a" not in stage.finish
    assert len(stage.tokens["a"]) <= after
    assert stage.codes["b"] == said(oracle, prompt, rows, 2).codes


def test_aborted_between_delivery_and_the_next_step(stage, prompt, rows):
    stage.add("a", None, 8)
    stage.deliver("a", ids=prompt(20, 1), payload={"rows": rows(1)})
    stage.abort("a")
    stage.run()
    assert stage.finish == {}


def test_a_chunk_for_an_unknown_request_is_ignored(stage, oracle, prompt, rows):
    stage.ids["ghost"] = "ghost"
    stage.deliver("ghost", ids=[1, 2])
    stage.add("a", prompt(20, 1), 8, rows=rows(1))
    stage.run()
    assert stage.tokens["a"] == said(oracle, prompt, rows, 1).tokens


@pytest.mark.covers("EX-16")
def test_an_adapter_that_raises_fails_only_that_request(stage, oracle, prompt, rows):
    stage.add("bad", None, 8)
    stage.add("good", None, 8)
    stage.deliver("bad", bad=True)
    stage.deliver("good", ids=prompt(20, 1), payload={"rows": rows(1)})
    stage.run()
    assert (stage.finish["bad"], stage.error["bad"]) == ("error", "Boom: unreadable chunk")
    assert stage.tokens["good"] == said(oracle, prompt, rows, 1).tokens


@pytest.mark.covers("EX-16")
def test_an_adapter_that_raises_for_a_running_request(stage, oracle, prompt, rows):
    stage.add("bad", prompt(20, 1), 50, rows=rows(1))
    stage.add("good", prompt(20, 2), 8, rows=rows(2))
    for _ in range(4):
        stage.step()
    stage.deliver("bad", bad=True)
    stage.run()
    assert (stage.finish["bad"], stage.error["bad"]) == ("error", "Boom: unreadable chunk")
    assert stage.codes["good"] == said(oracle, prompt, rows, 2).codes


@pytest.mark.covers("EX-16")
def test_a_payload_that_no_hook_can_be_given_fails_its_request(stage, oracle, prompt, rows):
    stage.add("bad", None, 8)
    stage.add("late", None, 8)
    stage.add("good", prompt(20, 2), 8, rows=rows(2))
    stage.deliver("bad", ids=prompt(20, 1), payload={1: 2})
    stage.deliver("late", ids=prompt(20, 1), payload={"rows": rows(1)})
    stage.step()
    stage.deliver("late", payload={None: 2})
    stage.run()
    for name, key in (("bad", 1), ("late", None)):
        assert stage.error[name] == f"HookShapeError: payload: update has the key {key}, which can't be a keyword"
    assert stage.codes["good"] == said(oracle, prompt, rows, 2).codes


@pytest.mark.covers("EX-16")
def test_an_adapter_that_raises_spares_those_who_share_blocks(stage, oracle, prompt, rows):
    ids = prompt(70, 3)
    stage.add("good", ids, 12, rows=rows(1), salt="spared")
    stage.step()
    stage.add("bad", ids, 50, rows=rows(1), salt="spared")
    for _ in range(3):
        stage.step()
    assert stage.trace("bad")[0].num_computed == 64
    stage.deliver("bad", bad=True)
    stage.run()
    assert stage.error["bad"] == "Boom: unreadable chunk"
    assert stage.codes["good"] == oracle.say(ids, 12, rows=rows(1), mtp=True).codes


@pytest.mark.parametrize("count", [128, 200])
def test_an_input_longer_than_the_context_fails_by_name(stage, prompt, rows, count):
    stage.add("long", None, 8)
    stage.deliver("long", ids=prompt(count), payload={"rows": rows(1)})
    stage.run()
    assert stage.error["long"] == f"TextTooLongError: text: needs {count} positions in stage toy, which has 127"


@pytest.mark.parametrize(
    ("ids", "sampling", "says"),
    [
        (list(range(1, 64)) * 3, {}, "needs 189 positions in stage toy, which has 127"),
        ([1, 2, 3], {"temperature": -1.0}, "temperature must be non-negative"),
        ([], {}, "no positions"),
    ],
)
def test_a_request_refused_at_once_is_not_kept(stage, ids, sampling, says):
    with pytest.raises(Exception, match=says):
        stage.engine.add(StageRequest("refused", ids, sampling))
    stage.assert_idle()


@pytest.mark.covers("EX-16")
@pytest.mark.parametrize("end", [False, True])
def test_a_first_chunk_without_positions(stage, oracle, prompt, rows, end):
    """If more may come the request goes on waiting and keeps what it was given; if not it ends with an error, not the engine."""
    stage.add("a", None, 8, rows=rows(9))  # what the chunk brings lies over this
    stage.add("b", prompt(20, 2), 8, rows=rows(2))
    stage.deliver("a", ids=[], payload={"rows": rows(1)}, end=end)
    stage.run()
    assert stage.codes["b"] == said(oracle, prompt, rows, 2).codes
    if end:
        assert stage.finish["a"] == "error"
        assert "no positions" in stage.error["a"]
        return
    assert stage.engine.num_requests == 1
    stage.deliver("a", ids=prompt(20, 1), end=True)
    stage.run()
    assert stage.codes["a"] == said(oracle, prompt, rows, 1).codes


def test_sampling_that_comes_with_the_input_is_laid_over_the_requests(stage, oracle, prompt, rows):
    stage.add("a", None, 20)
    stage.deliver("a", ids=prompt(20, 1), payload={"rows": rows(1)}, sampling={"max_tokens": 8})
    stage.run()
    assert stage.tokens["a"] == said(oracle, prompt, rows, 1).tokens


def test_bad_sampling_that_comes_with_the_input_fails_the_request(stage, prompt, rows):
    stage.add("a", None, 20)
    stage.deliver("a", ids=prompt(20, 1), payload={"rows": rows(1)}, sampling={"top_p": 7.0})
    stage.run()
    assert stage.finish["a"] == "error"
    assert "top_p" in stage.error["a"]
