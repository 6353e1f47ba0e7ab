"""The example of docs/contract.md on the production runner: prompt split with a one-token tail, decode, preemption, replay."""

import pytest
import torch

from examples.minimal_talker import MinimalTalker
from stagevox.contract import Capabilities
from tests.unit.stage.toy import HIDDEN, Steps

PROMPT = 3
TEXT = torch.tensor([5, 6, 7, 8, 9])


@pytest.fixture
def steps():
    torch.manual_seed(0)
    made = Steps(MinimalTalker(HIDDEN))
    for name, tag in (("a", 1), ("b", 2)):
        made.add(name, tag, PROMPT, text=TEXT + tag)
    return made


def test_what_the_runner_finds():
    found = Capabilities.of(MinimalTalker)
    assert found.has_preprocess and found.has_postprocess and found.has_decode_batch and found.has_talker_mtp


def test_a_split_prompt_equals_a_whole_one_and_a_replay_the_first_run(steps):
    model = steps.model
    text = {"a": model.text(TEXT + 1).tolist(), "b": model.text(TEXT + 2).tolist()}
    rows = steps.step(("a", 2), ("b", 3))
    assert rows == {"a": text["a"][:2], "b": text["b"][:3]}
    assert steps.step(("a", 1), ("b", 1))["a"] == text["a"][2:3]  # one-token tail beside a decode row
    assert list(steps.codes) == ["b"]
    first = [steps.step(("a", 1), ("b", 1))["a"][0] for _ in range(4)]
    frames = torch.tensor(steps.emitted["a"])
    past_text = [text["a"][min(PROMPT + i, len(TEXT) - 1)] for i in range(4)]
    expected = torch.tensor(past_text) + model.code(frames[:, 0]) + model.rest(frames[:, 1])
    assert torch.tensor(first).allclose(expected)

    steps.preempt("a")
    assert steps.step(("b", 1), ("a", 7), resumed=["a"])["a"] == text["a"][:3] + first
    assert len(steps.emitted["a"]) == 4
    assert steps.step(("a", 1), ("b", 1)) and len(steps.emitted["a"]) == 5


def test_missing_state_costs_its_own_request(steps):
    steps.add("c", 3, PROMPT)
    steps.run(("c", 3), ("a", 3))
    assert str(steps.failed["c"]) == "preprocess: text was never stored" and "a" not in steps.failed
