"""The counters and their line (MS-12)."""

import logging

import pytest

from stagevox.stage.multi_step.counters import LOG_INTERVAL, WindowCounters
from stagevox.stage.multi_step.gates import Refusal

pytestmark = pytest.mark.covers("MS-12")


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "stagevox.multi_step")
    return lambda: [record.getMessage() for record in caplog.records]


def test_the_line(lines):
    now = [0.0]
    counters = WindowCounters("talker", lambda: now[0])
    counters.log(now=True)
    assert lines() == [], "nothing happened yet"
    for _ in range(3):
        counters.plan(shortened=False)
        counters.execute(8, 8, tokens=16, rows=2, derived=0, shortened=False)
    counters.refuse(Refusal.WAITING)
    counters.refuse(Refusal.PREFILL)
    counters.refuse(Refusal.WAITING)
    counters.log()
    assert lines() == []
    now[0] = LOG_INTERVAL
    counters.log()
    line = "talker: Multi-step counters: executed_windows=3 executed_steps=24 refusals={'prefill': 1, 'waiting': 2}"
    assert lines() == [line]
    counters.log(now=True)
    assert lines() == [line], "nothing new"
    counters.refuse(Refusal.WAITING)
    counters.log()
    assert lines() == [line], "one line an interval"
    counters.log(now=True)
    assert len(lines()) == 2


def test_what_counts_as_saved_and_as_shortened():
    counters = WindowCounters("talker")
    counters.plan(shortened=False)
    counters.execute(8, 5, tokens=9, rows=2, derived=3, shortened=False)
    counters.plan(shortened=True)
    counters.execute(4, 3, tokens=3, rows=1, derived=0, shortened=True)
    counters.refuse(Refusal.KV_CACHE)
    assert counters.as_dict() == {
        "planned_windows": 2,
        "executed_windows": 2,
        "executed_steps": 8,
        "shortened_windows": 2,
        "derived_steps": 3,
        "tokens_saved": 7 + 2,
        "refusals": {"kv_cache": 1},
    }
