"""A stage that hands rows to the next one: every position once, as the oracle has it (EX-4, EX-5, RT-9)."""

import pytest
import torch

from tests.engine.stage.harness import SMALL_POOL

pytestmark = pytest.mark.covers("EX-4", "EX-5", "PC-14")

MODES = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 16},
    "preempted": {"max_num_batched_tokens": 16, "enable_prefix_caching": False, **SMALL_POOL},
    "async-preempted": {"async_scheduling": True, "max_num_batched_tokens": 16, "enable_prefix_caching": False, **SMALL_POOL},
}
REQUESTS = {"a": (33, 30), "b": (17, 44), "c": (45, 40)}


class Catcher:
    """A chunk processor's view: keeps the inter-stage tensors of each request."""

    requires_token_updates = False

    def __init__(self):
        self.onward = {}

    def push(self, req_id, token_ids, payload, finish_reason):
        self.onward.setdefault(req_id, []).append(dict(payload))
        return []

    def drop(self, req_id):
        pass


@pytest.mark.parametrize("mode", MODES)
def test_each_position_once(engine, oracle, prompt, mode):
    stage = engine("ToyExporting", **MODES[mode])
    catcher = stage.scheduler._chunks = Catcher()
    try:
        for seed, (name, (length, count)) in enumerate(REQUESTS.items()):
            stage.add(name, prompt(length, seed), count, who=name)
        stage.run()
    finally:
        stage.scheduler._chunks = None
    chunked = [row for name in REQUESTS for row in stage.trace(name) if row.is_prefill and row.num_computed]
    assert bool(chunked) == (mode != "whole")
    assert bool(stage.preempted()) == ("preempted" in mode)
    for seed, (name, (length, count)) in enumerate(REQUESTS.items()):
        said = oracle.say(prompt(length, seed), count)
        assert stage.tokens[name] == said.tokens
        rows = catcher.onward[stage.ids[name]]
        assert torch.cat([row["position"] for row in rows]).tolist() == list(range(length + count - 1))
        hidden = torch.cat([row["hidden"] for row in rows])
        torch.testing.assert_close(hidden, said.hidden, atol=1e-5, rtol=1e-4)
        assert {row["who"] for row in rows} == {name}
        assert stage.named(name, "position").tolist() == list(range(length + count - 1))
        assert all("hidden" not in out.multimodal for out in stage.outputs[name])  # never to a client


@pytest.mark.covers("EX-4", "EX-15")
def test_spans_are_unequal_and_rows_are_their_owners(engine, prompt):
    stage = engine("ToyExporting")
    for seed, (name, length) in enumerate([("a", 40), ("b", 3), ("c", 21)]):
        stage.add(name, prompt(length, seed), 3, who=name)
    stage.step()
    assert {name: len(stage.outputs[name][0].multimodal["position"]) for name in "abc"} == {"a": 40, "b": 3, "c": 21}
    assert {name: stage.outputs[name][0].multimodal["who"] for name in "abc"} == {"a": "a", "b": "b", "c": "c"}
    assert {row.step for name in "abc" for row in stage.trace(name)} == {stage.runner._step}  # all in one step
    stage.run()
