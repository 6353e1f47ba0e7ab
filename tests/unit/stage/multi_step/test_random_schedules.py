"""Random arrivals, stops, aborts, refusals, cut windows and allocation failures through planner and reconcile (MS-3 to MS-5).

The book runner compares its written slots with every step that is scheduled, the integrity check looks at all counters after every step,
and in the end each request has said what it always says.
"""

import dataclasses
import random
from collections import Counter

import pytest
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import RequestStatus

import stagevox.stage.ar_scheduler as scheduler_module
from stagevox.stage.multi_step.gates import Refusal
from stagevox.stage.multi_step.integrity import check_integrity
from tests.unit.stage.multi_step.books import BookRunner, Drive, request_of, scheduler_of, story, token

SEEDS = range(40)


def written_as_booked(drive):
    """Between two steps: computed tokens are the KV slots that were written, and those that are on their way."""
    check_integrity(drive.scheduler, len(drive.flight))
    for request in drive.scheduler.running:
        held = drive.runner.held[request.request_id]
        window = drive.scheduler.windows.outstanding.get(request.request_id)
        if not request.num_in_flight_tokens:
            assert request.num_computed_tokens == held.written, request.request_id
            assert request.num_tokens == held.known
        elif window is None:  # an ordinary step that the runner has made and the scheduler has not heard of
            assert request.num_computed_tokens == held.written, request.request_id


class Play:
    """One random run; ``steps`` 0 and 8 with the same seed see the same arrivals."""

    def __init__(self, seed, scheduler, check=lambda drive: None):
        self.dice = random.Random(seed)
        self.drive = Drive(scheduler, BookRunner(), check)
        self.counts, self.aborted = {}, set()

    def unfair(self, monkeypatch, chance=0.15):
        """Refuse and cut windows, and fail allocations for them."""
        dice, runner, manager = random.Random(self.dice.random()), self.drive.runner, self.drive.scheduler.kv_cache_manager
        runner.refuse = lambda plan: dice.choice(["batch", "slots"]) if dice.random() < chance else None
        runner.cut = lambda steps: dice.randint(1, steps) if dice.random() < chance else steps
        plan, allocate = scheduler_module.plan_multi_step_window, manager.allocate_slots
        planning = []

        def planned(scheduler, output):
            planning.append(True)
            try:
                return plan(scheduler, output)
            finally:
                planning.pop()

        def failing(*args, **kwargs):
            return None if planning and dice.random() < chance / 4 else allocate(*args, **kwargs)

        monkeypatch.setattr(scheduler_module, "plan_multi_step_window", planned)
        monkeypatch.setattr(manager, "allocate_slots", failing)

    def run(self, requests=14):
        dice, drive = self.dice, self.drive
        while requests or drive.flight or drive.scheduler.has_requests():
            if requests and dice.random() < 0.2:
                requests -= 1
                name = f"r{requests}"
                self.counts[name] = count = dice.randint(1, 60)
                drive.add(request_of(name, prompt=dice.randint(1, 60), count=count))
            if drive.scheduler.requests and dice.random() < 0.03:
                name = dice.choice(list(drive.scheduler.requests))
                drive.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
                self.aborted.add(name)
            drive.step()
        return self

    def assert_told(self):
        for name, count in self.counts.items():
            told, whole = self.drive.tokens[name], story(name, count)
            if name in self.aborted:
                assert told == [token(name, index) for index in range(len(told))], name
            else:
                assert told == whole, name
                assert self.drive.ended[name] == ("stop" if whole[-1] == 7 else "length"), name
        scheduler = self.drive.scheduler
        assert scheduler.kv_cache_manager.usage == 0
        assert not scheduler.windows.outstanding
        assert not scheduler.requests


@pytest.mark.covers("MS-3", "MS-4", "MS-5", "MS-6", "MS-13")
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_every_slot_that_is_booked_is_written(ahead, monkeypatch):
    seen, refusals = Counter(), Counter()
    for seed in SEEDS:
        steps = [2, 4, 8, 16][seed % 4]
        scheduler = scheduler_of(steps, asynchronous=ahead, blocks=[5, 6, 30][seed % 3], context=128, budget=[256, 24][seed % 2])
        play = Play(seed, scheduler, written_as_booked)
        with monkeypatch.context() as patch:
            play.unfair(patch)
            play.run()
        play.assert_told()
        counters = scheduler.windows.counters
        refusals += counters.refusals
        plans = [plan for plan, _ in play.drive.runner.windows]
        seen["windows"] += counters.executed_windows
        seen["refused by the runner"] += sum(reason is not None for _, reason in play.drive.runner.windows)
        seen["shorter than K"] += sum(next(iter(plan.values())) < steps for plan in plans)
        seen["of several requests"] += sum(len(plan) > 1 for plan in plans)
        seen["shortened"] += counters.shortened_windows
        seen["preemptions"] += sum(len(output.scheduled_cached_reqs.resumed_req_ids) for output in play.drive.rounds)
        seen["aborts"] += len(play.aborted)
        seen["stops"] += sum(reason == "stop" for reason in play.drive.ended.values())
    wanted = (
        "windows", "refused by the runner", "shorter than K", "of several requests", "shortened", "preemptions", "aborts", "stops"
    )  # fmt: skip
    assert all(seen[name] >= 20 for name in wanted), seen
    expected = {Refusal.PREFILL, Refusal.WAITING, Refusal.BUDGET, Refusal.KV_CACHE, Refusal.BATCH, Refusal.SLOTS, Refusal.REPLAY}
    assert expected <= refusals.keys(), refusals
    assert Refusal.PLAN_ERROR not in refusals


def plain(value):
    """A step's record as plain values, our subclass's extras left out where they are empty."""
    if isinstance(value, SchedulerOutput):
        fields = {item.name: getattr(value, item.name) for item in dataclasses.fields(SchedulerOutput)}
        return {name: plain(part) for name, part in fields.items()}
    if isinstance(value, NewRequestData | CachedRequestData):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return str(value) if type(value).__module__.startswith("vllm") else value


@pytest.mark.covers("MS-1")
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_off_means_upstream_field_by_field(ahead):
    compared = preempted = 0
    for seed in SEEDS:
        sizes = {"asynchronous": ahead, "blocks": [5, 6, 30][seed % 3], "context": 128, "budget": [256, 24][seed % 2]}
        ours = Play(seed, scheduler_of(0, **sizes)).run()
        theirs = Play(seed, scheduler_of(0, stock=True, **sizes)).run()
        assert all(type(output) is SchedulerOutput for output in ours.drive.rounds)
        assert [plain(output) for output in ours.drive.rounds] == [plain(output) for output in theirs.drive.rounds], seed
        assert (ours.drive.tokens, ours.drive.ended) == (theirs.drive.tokens, theirs.drive.ended)
        compared += len(ours.drive.rounds)
        preempted += sum(len(output.scheduled_cached_reqs.resumed_req_ids) for output in ours.drive.rounds)
    assert compared > 1000 and preempted > 20


def test_the_comparison_sees_a_difference():
    """With windows the records differ, so equality above says something."""
    ours = Play(0, scheduler_of(8)).run()
    theirs = Play(0, scheduler_of(0, stock=True)).run()
    assert ours.drive.tokens == theirs.drive.tokens or ours.aborted
    assert [plain(output) for output in ours.drive.rounds] != [plain(output) for output in theirs.drive.rounds]
