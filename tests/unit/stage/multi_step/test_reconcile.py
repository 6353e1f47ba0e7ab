"""Settling windows: shortfalls, and requests that ended or were preempted meanwhile (MS-4, MS-7)."""

from types import SimpleNamespace

import pytest
from vllm.v1.request import RequestStatus

from stagevox.stage.multi_step.integrity import check_integrity
from stagevox.stage.multi_step.reconcile import shrink_refused_multi_step_window
from stagevox.stage.wire import OmniSchedulerOutput
from tests.unit.stage.multi_step.books import Drive, request_of, scheduler_of, story


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def ahead(request):
    return request.param


def in_a_window(scheduler, *names, **fields):
    drive = Drive(scheduler)
    for name in names:
        drive.add(request_of(name, **fields))
    drive.schedule()
    drive.update()
    return drive


@pytest.mark.covers("MS-4")
@pytest.mark.parametrize("came", [1, 2, 5, 7, 8])
def test_a_shortfall_goes_back_to_the_slots_that_were_written(ahead, came):
    scheduler = scheduler_of(8, asynchronous=ahead)
    drive = in_a_window(scheduler, "a", "b", stop_token_ids=[])
    drive.runner.cut = lambda steps: min(came, steps)
    assert drive.schedule().multi_step_plan == {"a": 8, "b": 8}
    drive.update()
    for name in "ab":
        request = scheduler.requests[name]
        assert request.num_computed_tokens == drive.runner.held[name].written == 6 + came
        assert (request.num_in_flight_tokens, request.num_output_placeholders) == (0, 0)
    check_integrity(scheduler)
    counters = scheduler.windows.counters
    assert (counters.executed_windows, counters.executed_steps, counters.tokens_saved) == (1, came, 2 * came - 2)
    drive.run()
    assert all(drive.tokens[name] == drive.runner_story(name) for name in "ab")
    assert len(drive.tokens["a"]) == len(drive.tokens["b"]) == 20


@pytest.mark.covers("MS-4")
def test_a_request_aborted_in_the_middle_is_left_alone(ahead):
    scheduler = scheduler_of(8, asynchronous=ahead)
    drive = in_a_window(scheduler, "a", "b")
    drive.runner.refuse = lambda plan: "slots"
    drive.schedule()
    a = scheduler.requests["a"]
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    booked = a.num_computed_tokens
    drive.update()
    assert a.num_computed_tokens == booked, "what is over is not touched"
    assert scheduler.requests["b"].num_computed_tokens == 7
    assert not scheduler.windows.outstanding
    check_integrity(scheduler)
    drive.run()
    assert drive.tokens["b"] == story("b", 20)
    assert scheduler.kv_cache_manager.usage == 0


@pytest.mark.covers("MS-4")
@pytest.mark.parametrize("refused", [False, True])
def test_a_request_preempted_in_the_middle_is_left_alone(refused):
    """Its counters were reset: nothing is taken from them. The window's tokens still count, as upstream has it."""
    scheduler = scheduler_of(8, asynchronous=True)
    drive = in_a_window(scheduler, "a", "b", stop_token_ids=[])
    if refused:
        drive.runner.refuse = lambda plan: "slots"
    drive.schedule()
    b = scheduler.requests["b"]
    scheduler.running.remove(b)
    scheduler._preempt_request(b, 0.0)
    assert (b.num_computed_tokens, b.num_output_placeholders, b.num_stale_output_tokens) == (0, 0, 8)
    drive.update()
    assert (b.num_computed_tokens, b.num_output_placeholders, b.num_stale_output_tokens) == (0, 0, 0)
    assert b.num_in_flight_tokens == 0
    assert b.num_output_tokens == (2 if refused else 9)
    check_integrity(scheduler)
    drive.runner.refuse = lambda plan: None
    drive.run()
    for name in "ab":
        assert len(drive.tokens[name]) == 20
        assert drive.tokens[name] == drive.runner_story(name)


@pytest.mark.covers("MS-4", "MS-11")
def test_a_stop_ends_the_window_for_its_request_alone(ahead):
    names = [name for name in map(str, range(40)) if 2 < len(story(name, 20)) < 8][:1]
    names += [name for name in map(str, range(40)) if len(story(name, 20)) > 12][:1]
    scheduler = scheduler_of(8, asynchronous=ahead)
    drive = in_a_window(scheduler, *names)
    assert drive.schedule().multi_step_plan == dict.fromkeys(names, 8)
    drive.update()
    short, long = names
    assert drive.ended == {short: "stop"} and drive.tokens[short] == story(short, 20)
    assert len(drive.tokens[long]) == 9
    assert list(scheduler.requests) == [long]
    check_integrity(scheduler)
    drive.run()
    assert drive.tokens[long] == story(long, 20)
    assert scheduler.kv_cache_manager.usage == 0


@pytest.mark.covers("MS-10")
def test_one_that_has_ended_is_reported_with_the_window_of_the_other(ahead):
    scheduler = scheduler_of(8, asynchronous=ahead)
    drive = in_a_window(scheduler, "a", "b", stop_token_ids=[])
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    output = drive.schedule()
    assert output.finished_req_ids == {"a"} and output.multi_step_plan == {"b": 8}
    assert "a" not in drive.runner.held


def planned(counts, plan):
    base = SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=None,
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
    )
    return OmniSchedulerOutput(**vars(base), multi_step_plan=plan, omni_payloads={"r0": {"x": 1}})


@pytest.mark.covers("MS-7")
def test_a_refused_plan_shrinks_a_copy():
    given = planned({"r0": 8, "r1": 8}, {"r0": 8, "r1": 8})
    shrunk = shrink_refused_multi_step_window(given)
    assert shrunk.num_scheduled_tokens == {"r0": 1, "r1": 1}
    assert shrunk.total_num_scheduled_tokens == 2
    assert shrunk.multi_step_plan == {}
    assert shrunk.omni_payloads == {"r0": {"x": 1}}
    assert given.num_scheduled_tokens == {"r0": 8, "r1": 8}
    assert (given.total_num_scheduled_tokens, given.multi_step_plan) == (16, {"r0": 8, "r1": 8})


@pytest.mark.covers("MS-7")
def test_unplanned_requests_are_not_touched():
    shrunk = shrink_refused_multi_step_window(planned({"r0": 8, "r1": 3}, {"r0": 8}))
    assert shrunk.num_scheduled_tokens == {"r0": 1, "r1": 3}
    assert shrunk.total_num_scheduled_tokens == 4


@pytest.mark.covers("MS-7")
def test_without_a_plan_there_is_nothing_to_shrink():
    given = planned({"r0": 3}, {})
    assert shrink_refused_multi_step_window(given) is given
    bare = SimpleNamespace(num_scheduled_tokens={"r0": 3})
    assert shrink_refused_multi_step_window(bare) is bare
