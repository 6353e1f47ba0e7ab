"""Synchronous n-gram speculation with hooks, without MTP (RT-8): same tokens, each position handed on once."""

import itertools

import pytest
import torch

pytestmark = [
    pytest.mark.covers("RT-8"),
    pytest.mark.filterwarnings(
        r"ignore:\s*Encountered the use of a type that is scheduled for deprecation"
    ),  # vLLM's n-gram kernel
]

SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
COUNT = 40


def drafts(stage, name):
    """Spans of more than one position past the prompt, as ``(span, positions that the step advanced by)``."""
    rows = stage.trace(name)
    return [
        (row.span, after.num_computed - row.num_computed)
        for row, after in itertools.pairwise(rows)
        if not row.is_prefill and row.span > 1
    ]


def repetitive(prompt, seed):
    return prompt(6, seed) * 4


BUDGET = {"max_num_batched_tokens": 16}


def test_same_tokens_with_hooks(engine, oracle, prompt, rows):
    stage = engine("ToyConditioned", speculative_config=SPECULATION, **BUDGET)
    for seed, name in enumerate("abc"):
        stage.add(name, repetitive(prompt, seed), COUNT, rows=rows(seed, 3))
    seen = {}
    for _ in stage.steps():
        for name, req_id in stage.ids.items():
            state = stage.runner.model_intermediate_buffer.get(req_id, {})
            seen[name] = state.get("seen", seen.get(name))
    for seed, name in enumerate("abc"):
        assert stage.tokens[name] == oracle.say(repetitive(prompt, seed), COUNT, rows=rows(seed, 3)).tokens
        # Rejected drafts are no positions of the request: each one is seen once, in order.
        assert seen[name] == list(range(len(seen[name])))
        assert 24 + COUNT - 4 <= len(seen[name]) <= 24 + COUNT + 3  # the last step may have accepted more than was wanted
    made = [draft for name in "abc" for draft in drafts(stage, name)]
    assert any(advanced > 1 for _, advanced in made), "no draft was accepted"
    assert any(advanced < span for span, advanced in made), "no draft was rejected"


def test_last_hidden_is_that_of_the_last_accepted_position(engine, oracle, prompt, rows):
    """What ``postprocess`` keeps comes from a position of the request, not from a rejected draft."""
    stage = engine("ToyConditioned", speculative_config=SPECULATION, **BUDGET)
    stage.add("a", repetitive(prompt, 1), COUNT, rows=rows(1, 3))
    said = oracle.say(repetitive(prompt, 1), COUNT, rows=rows(1, 3))
    checked = 0
    for _ in stage.steps():
        state = stage.runner.model_intermediate_buffer.get(stage.ids["a"])
        if state and "seen" in state:
            last = state["seen"][-1]
            if last < len(said.hidden):
                torch.testing.assert_close(state["last_hidden"][0], said.hidden[last], atol=1e-4, rtol=1e-4)
                checked += 1
    assert checked > 5
    assert any(advanced < span for span, advanced in drafts(stage, "a"))


def test_exported_rows_are_those_of_accepted_positions(engine, oracle, prompt):
    stage = engine("ToyExporting", speculative_config=SPECULATION, **BUDGET)
    stage.add("a", repetitive(prompt, 2), COUNT, who="a")
    stage.run()
    assert stage.tokens["a"] == oracle.say(repetitive(prompt, 2), COUNT).tokens
    assert any(advanced < span for span, advanced in drafts(stage, "a")), "no draft was rejected"
    positions = stage.named("a", "position").tolist()
    assert positions == list(range(len(positions)))
    assert len(positions) >= 24 + COUNT - 1
