"""What a window books, when it may open, and what it never does (MS-3, MS-5, MS-6)."""

import pytest
from vllm.v1.request import RequestStatus

from stagevox.stage.multi_step.gates import Refusal
from stagevox.stage.multi_step.integrity import check_integrity
from tests.unit.stage.multi_step.books import Drive, request_of, scheduler_of, story


def after_prefill(scheduler, *requests):
    """A drive whose requests have their first token, nothing in flight."""
    drive = Drive(scheduler)
    for request in requests:
        drive.add(request)
    drive.schedule()
    drive.update()
    check_integrity(scheduler)
    return drive


def refusals(scheduler):
    return dict(scheduler.windows.counters.refusals)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def ahead(request):
    return request.param


@pytest.mark.covers("MS-3")
def test_a_window_books_k_steps(ahead):
    scheduler = scheduler_of(8, asynchronous=ahead)
    drive = after_prefill(scheduler, request_of("a"), request_of("b", prompt=30))
    a, b = (scheduler.requests[name] for name in "ab")
    before = {name: len(scheduler.kv_cache_manager.get_block_ids(name)[0]) for name in "ab"}
    output = drive.schedule()
    assert output.multi_step_plan == {"a": 8, "b": 8}
    assert output.num_scheduled_tokens == {"a": 8, "b": 8}
    assert output.total_num_scheduled_tokens == 16
    assert (a.num_computed_tokens, b.num_computed_tokens) == (6 + 8, 30 + 8)
    assert (a.num_in_flight_tokens, b.num_in_flight_tokens) == (8, 8)
    assert a.num_output_placeholders == (8 if ahead else 0)
    assert a.num_computed_tokens - a.num_output_placeholders == (6 if ahead else 14)
    # b's 8 positions 30..37 cross into a second block, which the runner is told of; a has room.
    assert before == {"a": 1, "b": 1}
    assert [len(scheduler.kv_cache_manager.get_block_ids(name)[0]) for name in "ab"] == [1, 2]
    cached = output.scheduled_cached_reqs
    assert dict(zip(cached.req_ids, cached.new_block_ids, strict=True)) == {
        "a": None,
        "b": (scheduler.kv_cache_manager.get_block_ids("b")[0][1:],),
    }
    drive.update()
    check_integrity(scheduler)
    assert (len(drive.tokens["a"]), a.num_in_flight_tokens, a.num_output_placeholders) == (9, 0, 0)
    assert a.num_computed_tokens == a.num_tokens - 1


@pytest.mark.covers("MS-2", "MS-3")
def test_the_final_prefill_token_opens_no_window(ahead):
    scheduler = scheduler_of(8, asynchronous=ahead, budget=5)
    drive = Drive(scheduler)
    drive.add(request_of("a", prompt=6))
    first, second = drive.schedule(), drive.schedule()
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ({"a": 5}, {"a": 1})
    assert not getattr(second, "multi_step_plan", None)
    assert refusals(scheduler) == {Refusal.PREFILL: 2}


@pytest.mark.covers("MS-6")
def test_a_mixed_round_is_refused_with_its_reason(ahead):
    scheduler = scheduler_of(8, asynchronous=ahead)
    drive = after_prefill(scheduler, request_of("a"))
    drive.add(request_of("b"))
    output = drive.schedule()
    assert output.num_scheduled_tokens == {"a": 1, "b": 6}
    assert not getattr(output, "multi_step_plan", None)
    drive.update()
    assert drive.schedule().multi_step_plan == {"a": 8, "b": 8}
    assert refusals(scheduler) == {Refusal.PREFILL: 2}


@pytest.mark.covers("MS-5")
def test_the_fence(ahead):
    """116 known tokens of which 100 are output, max_tokens 112, context 128, K 8: one window, then nothing until it is settled."""
    scheduler = scheduler_of(8, asynchronous=ahead, context=128)
    drive = after_prefill(scheduler, request_of("a", prompt=16, count=112, stop_token_ids=[], min_tokens=112))
    while drive.scheduler.requests["a"].num_tokens < 116:
        scheduler.windows.steps = min(8, 116 - scheduler.requests["a"].num_tokens)
        drive.schedule()
        drive.update()
    scheduler.windows.steps = 8
    a = scheduler.requests["a"]
    assert (a.num_tokens, a.num_output_tokens, a.max_tokens, scheduler.max_model_len) == (116, 100, 112, 128)
    assert drive.schedule().multi_step_plan == {"a": 8}
    assert a.num_computed_tokens == 123
    again = scheduler.schedule()
    assert not again.num_scheduled_tokens and not getattr(again, "multi_step_plan", None)
    assert not scheduler.has_requests(), "nothing can be scheduled: the engine may wait for the window"
    assert a.num_computed_tokens == 123
    drive.update()
    check_integrity(scheduler)
    assert drive.schedule().multi_step_plan == {"a": 4}, "12 - 8 tokens are left"
    drive.update()
    assert drive.ended == {"a": "length"} and len(drive.tokens["a"]) == 112


@pytest.mark.covers("MS-5", "MS-7")
def test_a_refused_window_then_a_step(ahead):
    """What was queued behind a refused window starts where its slots end: nothing is, until it is settled."""
    scheduler = scheduler_of(8, asynchronous=ahead)
    drive = after_prefill(scheduler, request_of("a"))
    drive.runner.refuse = lambda plan: "batch"
    planned = drive.schedule()
    assert planned.num_scheduled_tokens == {"a": 8}
    assert not scheduler.schedule().num_scheduled_tokens
    drive.update()
    a = scheduler.requests["a"]
    assert (a.num_computed_tokens, a.num_tokens, a.num_in_flight_tokens, a.num_output_placeholders) == (7, 8, 0, 0)
    check_integrity(scheduler)
    drive.runner.refuse = lambda plan: None
    drive.run()  # the runner compares its slots with each schedule
    assert drive.tokens["a"] == story("a", 20)
    assert scheduler.windows.counters.refusals[Refusal.BATCH] == 1


@pytest.mark.covers("MS-5")
@pytest.mark.parametrize("others", [0, 1])
def test_parking_and_fence_don_t_clear_each_other(others):
    """Conditioning for 3 more positions; more arrives while the window is out: the fence holds, the parking ends."""
    from stagevox.stage.payload import StageRequest
    from stagevox.stage.wait import WaitState

    scheduler = scheduler_of(8, asynchronous=True)
    drive = after_prefill(scheduler, *(request_of(name, count=60, stop_token_ids=[]) for name in "ab"[: 1 + others]))
    scheduler.omni_requests["a"] = StageRequest("a", [1])
    scheduler._ready["a"] = 9
    assert drive.schedule().multi_step_plan == dict.fromkeys("ab"[: 1 + others], 3)
    assert scheduler.wait_room == {"a": WaitState.WAITING_FOR_CHUNK}
    assert not scheduler.has_requests()
    scheduler._condition("a", 17)
    assert scheduler.wait_room == {}
    assert not scheduler.has_requests() and not scheduler.schedule().num_scheduled_tokens, "still fenced"
    drive.update()
    assert scheduler.has_requests()
    assert drive.schedule().multi_step_plan["a"] == 8
    drive.update()
    assert not drive.schedule().num_scheduled_tokens.get("a"), "settled, and parked"
    assert scheduler.wait_room == {"a": WaitState.WAITING_FOR_CHUNK}


@pytest.mark.covers("MS-5", "MS-6")
def test_no_window_opens_while_another_one_is_out():
    """Else two requests could run for ever in turn, each in a window of its own: step by step they fall into one."""
    from stagevox.stage.payload import StageRequest

    scheduler = scheduler_of(8, asynchronous=True)
    drive = after_prefill(scheduler, *(request_of(name, count=60, stop_token_ids=[]) for name in "ab"))
    scheduler.omni_requests["a"] = StageRequest("a", [1])
    scheduler._condition("a", 6)
    assert drive.schedule().multi_step_plan == {"b": 8}, "one that is starved neither joins nor blocks"
    scheduler._condition("a", None)
    output = drive.schedule()
    assert output.num_scheduled_tokens == {"a": 1} and not getattr(output, "multi_step_plan", None)
    assert refusals(scheduler)[Refusal.OUTSTANDING] == 1
    drive.update()
    assert drive.schedule().multi_step_plan == {"a": 8, "b": 8}
    drive.run()
    assert all(len(drive.tokens[name]) == 60 for name in "ab")


@pytest.mark.covers("MS-5")
def test_a_refused_window_wakes_who_was_parked_behind_it():
    """Parked for the position after the window, which then computed one: the others have their conditioning and must run."""
    from stagevox.stage.payload import StageRequest
    from stagevox.stage.wait import WaitState

    scheduler = scheduler_of(8)
    drive = after_prefill(scheduler, request_of("a"))
    scheduler.omni_requests["a"] = StageRequest("a", [1])
    scheduler._ready["a"] = 10
    drive.runner.refuse = lambda plan: "batch"
    assert drive.schedule().multi_step_plan == {"a": 4}
    assert scheduler.wait_room == {"a": WaitState.WAITING_FOR_CHUNK}
    drive.update()
    assert scheduler.wait_room == {} and scheduler.has_requests()
    drive.run()
    assert scheduler.requests["a"].num_computed_tokens == 10
    assert scheduler.wait_room == {"a": WaitState.WAITING_FOR_CHUNK}


@pytest.mark.covers("MS-6")
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"logprobs": 2}, Refusal.LOGPROBS),
        ({"prompt_logprobs": 1}, Refusal.LOGPROBS),
        ({"presence_penalty": 0.1}, Refusal.PENALTIES),
        ({"frequency_penalty": -0.1}, Refusal.PENALTIES),
        ({"repetition_penalty": 1.05}, Refusal.PENALTIES),
        ({"bad_words": ["x"]}, Refusal.BAD_WORDS),
        ({"allowed_token_ids": [1, 2]}, Refusal.ALLOWED_IDS),
        ({"thinking_token_budget": 5}, Refusal.THINKING_BUDGET),
    ],
    ids=str,
)
def test_what_a_request_asks_for_may_rule_windows_out(fields, reason):
    scheduler = scheduler_of(8)
    drive = after_prefill(scheduler, request_of("a"), request_of("b", count=4, **fields))
    assert not getattr(drive.schedule(), "multi_step_plan", None)
    drive.update()
    assert refusals(scheduler)[reason] == 1
    drive.run()
    assert scheduler.windows.counters.executed_windows, "once it has ended the other one has windows"
    assert drive.tokens["a"] == story("a", 20)


@pytest.mark.covers("MS-6")
def test_structured_output_rules_windows_out():
    scheduler = scheduler_of(8)
    request = request_of("a")
    drive = after_prefill(scheduler, request)
    request.structured_output_request = object()
    assert request.use_structured_output
    assert not getattr(scheduler.schedule(), "multi_step_plan", None)
    assert refusals(scheduler)[Refusal.STRUCTURED_OUTPUT] == 1
    assert not drive.flight


@pytest.mark.covers("MS-6")
def test_a_request_that_could_be_admitted_is_admitted_first(ahead):
    scheduler = scheduler_of(8, asynchronous=ahead, blocks=5, context=96)  # 4 blocks to use
    drive = after_prefill(scheduler, request_of("a", prompt=40), request_of("b", prompt=40))
    drive.add(request_of("c", prompt=40))
    output = drive.schedule()
    assert output.num_scheduled_tokens == {"a": 1, "b": 1}
    assert refusals(scheduler)[Refusal.WAITING] == 1
    drive.run()
    assert all(drive.tokens[name] == story(name, 20) for name in "abc")


@pytest.mark.covers("MS-6")
def test_one_that_waits_for_a_slot_blocks_nothing(ahead):
    scheduler = scheduler_of(8, asynchronous=ahead, seqs=2)
    drive = after_prefill(scheduler, request_of("a"), request_of("b"), request_of("c"))
    assert drive.schedule().multi_step_plan == {"a": 8, "b": 8}
    drive.update()
    drive.run()
    assert all(drive.tokens[name] == story(name, 20) for name in "abc")


@pytest.mark.covers("MS-6")
def test_no_block_for_the_window_drops_it_whole(ahead):
    """Two rows need a new block each, one is free: neither gets it, and the round goes on by one step."""
    scheduler = scheduler_of(8, asynchronous=ahead, blocks=4, context=64)  # 3 blocks to use
    drive = after_prefill(scheduler, request_of("a", prompt=30), request_of("b", prompt=30))
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert free == 1
    output = drive.schedule()
    assert output.num_scheduled_tokens == {"a": 1, "b": 1} and not getattr(output, "multi_step_plan", None)
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert refusals(scheduler)[Refusal.KV_CACHE] == 1
    drive.run()
    assert all(drive.tokens[name] == story(name, 20) for name in "ab")


@pytest.mark.covers("MS-6")
def test_blocks_that_were_given_before_one_failed_are_told_to_the_runner(ahead, monkeypatch):
    scheduler = scheduler_of(8, asynchronous=ahead)
    drive = after_prefill(scheduler, request_of("a", prompt=28), request_of("b", prompt=28))
    manager, asked = scheduler.kv_cache_manager, []
    allocate = manager.allocate_slots

    def failing(request, count, **kwargs):
        asked.append(request.request_id)
        return None if asked == ["a", "b", "a", "b"] else allocate(request, count, **kwargs)

    monkeypatch.setattr(manager, "allocate_slots", failing)
    output = drive.schedule()
    assert asked == ["a", "b", "a", "b"] and not getattr(output, "multi_step_plan", None)
    blocks = dict(zip(output.scheduled_cached_reqs.req_ids, output.scheduled_cached_reqs.new_block_ids, strict=True))
    assert blocks == {"a": (manager.get_block_ids("a")[0][1:],), "b": None}
    drive.update()
    drive.run()
    assert all(drive.tokens[name] == story(name, 20) for name in "ab")


@pytest.mark.covers("MS-6")
def test_an_exception_while_planning_is_a_refusal(monkeypatch, caplog):
    scheduler = scheduler_of(8)
    drive = after_prefill(scheduler, request_of("a"))
    monkeypatch.setattr(type(scheduler), "window_limits", lambda *args: 1 / 0)
    assert drive.schedule().num_scheduled_tokens == {"a": 1}
    assert refusals(scheduler)[Refusal.PLAN_ERROR] == 1
    assert "ZeroDivisionError" in caplog.text
    drive.update()
    check_integrity(scheduler)


@pytest.mark.covers("MS-6")
@pytest.mark.parametrize(("count", "plans"), [(2, []), (3, [2]), (9, [8]), (10, [8]), (12, [8, 3])])
def test_a_window_never_passes_max_tokens(ahead, count, plans):
    scheduler = scheduler_of(8, asynchronous=ahead)
    drive = after_prefill(scheduler, request_of("a", count=count, stop_token_ids=[]))
    while "a" in scheduler.requests:
        drive.schedule()
        drive.update()
    found = [output.multi_step_plan["a"] for output in drive.rounds if getattr(output, "multi_step_plan", None)]
    assert found == plans
    assert len(drive.tokens["a"]) == count


@pytest.mark.covers("MS-6")
def test_a_window_ends_with_the_context(ahead):
    scheduler = scheduler_of(16, asynchronous=ahead, context=64)
    drive = after_prefill(scheduler, request_of("a", prompt=40, count=100, stop_token_ids=[]))
    drive.check = lambda drive: check_integrity(scheduler, len(drive.flight))
    drive.run()
    assert drive.ended == {"a": "length"}
    assert len(drive.tokens["a"]) == 24, "as many as the context holds"
    assert scheduler.windows.counters.executed_windows == 2


@pytest.mark.covers("MS-7")
def test_an_empty_round_counts_nothing(ahead):
    scheduler = scheduler_of(8, asynchronous=ahead)
    drive = after_prefill(scheduler, request_of("a"))
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    before = refusals(scheduler)
    drive.schedule()
    assert refusals(scheduler) == before
    assert "refusals={'prefill': 1}" in scheduler.windows.counters.line()


def test_a_window_ends_where_the_first_chunk_does():
    """The chunk processor lacks 4 rows, then none: the first sound is not later than without windows."""
    scheduler = scheduler_of(8)
    drive = after_prefill(scheduler, request_of("a"))

    class Rows:
        left = 4

        def rows_to_first_chunk(self, req_id):
            return self.left

    scheduler._chunks = Rows()
    assert drive.schedule().multi_step_plan == {"a": 4}
    drive.update()
    Rows.left = None
    assert drive.schedule().multi_step_plan == {"a": 8}
