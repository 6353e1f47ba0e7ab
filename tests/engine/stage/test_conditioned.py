"""Hook models in real engines say what the oracle says, however their requests are cut, batched, preempted or run ahead."""

import pytest

from tests.engine.stage.harness import SMALL_POOL

LENGTHS = {"a": 33, "b": 17, "c": 26}
COUNT = 40

MODES = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
    "preempted": {"max_num_batched_tokens": 16, "enable_prefix_caching": False, **SMALL_POOL},
    "async": {"async_scheduling": True},
    "async-preempted": {"async_scheduling": True, "max_num_batched_tokens": 16, **SMALL_POOL},
}


def play(stage, prompt, rows):
    for seed, (name, length) in enumerate(LENGTHS.items()):
        stage.add(name, prompt(length, seed), COUNT, rows=rows(seed))
    return stage.run()


def offsets(stage, name):
    return [(row.num_computed, row.span) for row in stage.trace(name) if row.is_prefill]


@pytest.mark.covers("PC-12", "PC-14", "RT-8", "EX-3")
@pytest.mark.parametrize("model", ["ToyConditioned", "ToyScalar", "ToyMTP"])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_and_frames(engine, oracle, prompt, rows, model, mode):
    stage = play(engine(model, **MODES[mode]), prompt, rows)
    mtp = model == "ToyMTP"
    for seed, (name, length) in enumerate(LENGTHS.items()):
        said = oracle.say(prompt(length, seed), COUNT, rows=rows(seed), mtp=mtp)
        assert stage.tokens[name] == said.tokens
        assert stage.codes[name] == said.codes
        assert stage.finish[name] == "length"
    chunked = any(computed > 0 for name in LENGTHS for computed, _ in offsets(stage, name))
    assert chunked == ("max_num_batched_tokens" in MODES[mode])
    assert bool(stage.preempted()) == ("preempted" in mode)
    assert any(row.used_mtp for name in LENGTHS for row in stage.trace(name)) == mtp
