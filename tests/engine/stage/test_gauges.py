"""How a real engine says it stands: loads fall to 0 after the last request, preemptions and replays are counted (F47)."""

from __future__ import annotations

import pytest

from tests.engine.stage.harness import SMALL_POOL


def load(gauges):
    return gauges.running, gauges.waiting, gauges.parked, gauges.kv_usage


def test_an_aborted_load_is_gone(engine, prompt, rows):
    stage = engine("ToyConditioned", enable_prefix_caching=False, max_num_seqs=2)
    for number in range(3):
        stage.add(f"r{number}", prompt(20, number), 30, rows=rows(number))
    stage.add("later", None)
    for _ in range(3):
        stage.step()
    running, waiting, parked, usage = load(stage.engine.gauges())
    assert (running, waiting, parked) == (2, 1, 1) and 0 < usage <= 1
    stage.abort("r0", "r1", "r2", "later")
    assert load(stage.engine.gauges()) == (0, 0, 0, 0.0)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_each_replay_is_counted(engine, prompt, rows, async_scheduling):
    options = {"async_scheduling": True} if async_scheduling else {}
    stage = engine("ToyConditioned", enable_prefix_caching=False, max_num_batched_tokens=16, **options, **SMALL_POOL)
    before = stage.engine.gauges()
    for number, length in enumerate((33, 17, 26)):
        stage.add(f"r{number}", prompt(length, number), 40, rows=rows(number))
    stage.run()
    after = stage.engine.gauges()
    resumed = sum(row.is_resumed for row in stage.engine.trace() if row.req_id in stage.names)
    assert stage.preempted() and after.replays - before.replays == resumed > 0
    assert after.preemptions - before.preemptions >= resumed
    assert load(after) == (0, 0, 0, 0.0)
