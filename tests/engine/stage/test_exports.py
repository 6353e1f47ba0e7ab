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


@pytest.fixture
def exporting(engine):
    """An exporting stage and what its next stage would get: ``(harness, onward)``."""
    used = []

    def get(**kwargs):
        stage = engine("ToyExporting", **kwargs)
        stage.scheduler._chunks = catcher = Catcher()
        used.append(stage)
        return stage, lambda name, key: torch.cat([row[key] for row in catcher.onward[stage.ids[name]] if key in row])

    yield get
    for stage in used:
        stage.scheduler._chunks = None


@pytest.mark.covers("RT-9", "RT-8")
@pytest.mark.parametrize(
    "mode", [{}, {"async_scheduling": True}, {"max_num_batched_tokens": 16}], ids=["sync", "async", "chunked"]
)
def test_rows_of_cached_positions_come_too(exporting, oracle, prompt, mode):
    stage, onward = exporting(**mode)
    for name in ("first", "again", "longer"):
        ids = prompt(70, 4) + ([9, 8] if name == "longer" else [])
        stage.add(name, ids, 6, who=name, salt=f"shared {mode}")
        stage.run()
        said = oracle.say(ids, 6)
        assert stage.tokens[name] == said.tokens
        assert onward(name, "position").tolist() == list(range(len(ids) + 5))
        torch.testing.assert_close(onward(name, "hidden"), said.hidden, atol=1e-5, rtol=1e-4)
    assert [stage.trace(name)[0].num_computed for name in ("first", "again", "longer")] == [0, 64, 64]


@pytest.mark.covers("RT-9")
def test_rows_of_blocks_that_were_used_by_others_meanwhile(exporting, oracle, prompt):
    """Ten prompts through a pool for three: every hit finds the rows of its own prompt."""
    stage, onward = exporting(**SMALL_POOL, max_num_batched_tokens=16)
    hits = 0
    for turn in range(12):
        seed = (0, 1, 0, 2, 3, 0)[turn % 6]
        name = f"r{turn}"
        stage.add(name, prompt(40, seed), 4, who=name, salt="pool")
        stage.run()
        hits += stage.trace(name)[0].num_computed > 0
        torch.testing.assert_close(onward(name, "hidden"), oracle.say(prompt(40, seed), 4).hidden, atol=1e-5, rtol=1e-4)
    assert 0 < hits < 12


@pytest.mark.covers("RT-9")
@pytest.mark.parametrize("mode", [{}, {"async_scheduling": True}], ids=["sync", "async"])
def test_with_one_token_more_every_returned_token_has_its_row(exporting, oracle, prompt, mode):
    stage, onward = exporting(spec={"extra_token": True}, **mode)
    ids, said = next(
        (prompt(20, seed), said) for seed in range(5, 99) if len(set((said := oracle.say(prompt(20, seed), 9)).tokens[:8])) == 8
    )
    stage.add("cut", ids, 8)
    stage.add("stopped", ids, None, sampling={"max_tokens": 50, "stop_token_ids": [said.tokens[7]]})
    stage.add("cut before its stop", ids, None, sampling={"max_tokens": 7, "stop_token_ids": [said.tokens[7]]})
    stage.add("one", ids, 1)
    stage.run()
    for name, count, rows, reason in [
        ("cut", 8, 28, "length"),
        ("stopped", 8, 27, "stop"),
        ("cut before its stop", 7, 27, "length"),
        ("one", 1, 21, "length"),
    ]:
        assert (stage.tokens[name], stage.finish[name]) == (said.tokens[:count], reason)
        assert onward(name, "position").tolist() == list(range(rows))
        torch.testing.assert_close(onward(name, "hidden"), said.hidden[:rows], atol=1e-5, rtol=1e-4)


def test_with_one_token_more_the_context_still_bounds_the_reply(exporting, prompt):
    stage, onward = exporting(spec={"extra_token": True})
    stage.add("a", prompt(120, 5), None, sampling={"ignore_eos": True, "max_tokens": 100})
    stage.run()
    assert (len(stage.tokens["a"]), stage.finish["a"]) == (7, "length")  # of 128 positions, one for the token that is thrown away
    assert len(onward("a", "position")) == 127


@pytest.mark.covers("EX-4", "EX-15")
def test_spans_are_unequal_and_rows_are_their_owners(engine, prompt):
    stage = engine("ToyExporting")
    for seed, (name, length) in enumerate([("a", 40), ("b", 3), ("c", 21)]):
        stage.add(name, prompt(length, seed), 3, who=name)
    stage.step()
    assert {name: len(stage.outputs[name][0].multimodal["position"]) for name in "abc"} == {"a": 40, "b": 3, "c": 21}
    assert {name: stage.outputs[name][0].multimodal["who"] for name in "abc"} == {"a": "a", "b": "b", "c": "c"}
    assert {row.step for name in "abc" for row in stage.trace(name)} == {stage.runner.step_log.step}  # all in one step
    stage.run()
