"""Conditioning that comes in pieces while its request runs: the same tokens, and never a step past what is on hand (EX-2, RT-8)."""

import random

import pytest

from stagevox.contract import RowsAt
from stagevox.stage.wait import WaitState
from tests.engine.stage.harness import SMALL_POOL

pytestmark = pytest.mark.covers("EX-2", "RT-8")

ADAPTED = {"input_adapter": "tests.engine.stage.toy_models:ToyAdapter"}
LENGTHS = {"a": 33, "b": 17, "c": 26}
COUNT = 40
MODES = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
    "preempted": {"max_num_batched_tokens": 16, **SMALL_POOL},
    "async": {"async_scheduling": True},
    "async-preempted": {"async_scheduling": True, "max_num_batched_tokens": 16, **SMALL_POOL},
}


class Feed:
    """Hands a request its conditioning in pieces of ``size`` rows, the first of them behind the prompt."""

    def __init__(self, stage, name, ids, rows, size):
        self.stage, self.name, self.rows, self.size = stage, name, rows, size
        self.sent = 0
        stage.add(name, None, COUNT)
        self.give(len(ids) + size, ids=ids)

    def give(self, end, **data):
        end = min(end, len(self.rows))
        last = end == len(self.rows)
        piece = {"rows": RowsAt(self.sent, self.rows[self.sent : end])}
        self.stage.deliver(self.name, payload=piece, ready=None if last else end, end=last, **data)
        self.sent = end

    @property
    def is_done(self):
        return self.sent == len(self.rows)


@pytest.mark.parametrize("model", ["ToyConditioned", "ToyMTP"])
@pytest.mark.parametrize("mode", MODES)
def test_same_tokens_as_with_all_of_it(engine, oracle, prompt, rows, model, mode):
    stage = engine(model, spec=ADAPTED, **MODES[mode])
    chance = random.Random(7)
    # Row p conditions position p: the last token sampled is never fed.
    whole = {name: rows(seed, length + COUNT - 1) for seed, (name, length) in enumerate(LENGTHS.items())}
    feeds = [
        Feed(stage, name, prompt(length, seed), whole[name], 1 + 4 * seed) for seed, (name, length) in enumerate(LENGTHS.items())
    ]
    starved = 0
    for _ in range(2000):
        if stage.engine.has_work():
            stage.step()
            hungry = [feed for feed in feeds if not feed.is_done and chance.random() < 0.1]
        else:
            waiting = stage.scheduler.wait_room
            starved += waiting.count(WaitState.WAITING_FOR_CHUNK)
            hungry = [feed for feed in feeds if not feed.is_done]
            if not hungry:
                break
        for feed in hungry:
            feed.give(feed.sent + feed.size)
        for feed in feeds:
            done = [row.num_computed + row.span for row in stage.trace(feed.name)]
            assert max(done, default=0) <= feed.sent
    assert starved, "nobody ever waited for conditioning"
    for seed, (name, length) in enumerate(LENGTHS.items()):
        said = oracle.say(prompt(length, seed), COUNT, rows=whole[name], mtp=model == "ToyMTP")
        assert (stage.tokens[name], stage.codes[name]) == (said.tokens, said.codes)
        assert stage.finish[name] == "length"
    assert bool(stage.preempted()) == ("preempted" in mode)


def test_one_that_waits_holds_up_nobody_and_can_be_aborted(engine, oracle, prompt, rows):
    stage = engine("ToyMTP", spec=ADAPTED)
    feed = Feed(stage, "waits", prompt(20, 1), rows(1, 60), 3)
    stage.run()
    assert stage.scheduler.wait_room == {stage.ids["waits"]: WaitState.WAITING_FOR_CHUNK}
    assert len(stage.tokens["waits"]) == 4  # after the prompt and three more positions
    stage.add("other", None, 8)
    stage.deliver("other", ids=prompt(17, 2), payload={"rows": rows(2)}, end=True)
    stage.run()
    assert stage.tokens["other"] == oracle.say(prompt(17, 2), 8, rows=rows(2), mtp=True).tokens
    assert len(stage.tokens["waits"]) == 4
    stage.abort("waits")
    stage.run()
    feed.give(40)  # late: nobody knows the request
    stage.run()


def test_a_gap_fails_the_request_by_name(engine, prompt, rows):
    stage = engine("ToyConditioned", spec=ADAPTED)
    feed = Feed(stage, "a", prompt(20, 1), rows(1, 60), 3)
    stage.run()
    feed.sent += 1
    feed.give(30)
    stage.run()
    assert stage.finish["a"] == "error"
    assert "rows from 24 on after 23 rows" in stage.error["a"]


def test_a_gap_within_one_step_fails_the_request_by_name(engine, prompt, rows):
    stage = engine("ToyConditioned", spec=ADAPTED)
    feed = Feed(stage, "a", prompt(20, 1), rows(1, 60), 3)
    stage.run()
    feed.give(30)
    feed.sent += 1
    feed.give(35)
    stage.run()
    assert stage.finish["a"] == "error"
    assert "rows from 31 on after 30 rows" in stage.error["a"]
