"""State a model keeps per request."""

import pytest
import torch

from stagevox.stage.buffer import IntermediateBuffer
from tests.unit.stage.toy import ScalarModel, ToyRunner

pytestmark = pytest.mark.covers("EX-3")


def full():
    buffer = IntermediateBuffer()
    for name in "ab":
        buffer.open(name, {"who": name})
        buffer.log(name, 2).append(2, torch.zeros(1, 1), torch.zeros(1, 1), 0)
        buffer.post_seen[name] = 3
        buffer.failed[name] = ValueError(name)
    return buffer


def test_gather_follows_the_given_order():
    assert [state["who"] for state in full().gather(["b", "a"])] == ["b", "a"]


def test_gather_names_what_is_missing():
    with pytest.raises(KeyError, match="c"):
        full().gather(["a", "c"])


def test_drop_leaves_nothing_of_a_request_and_all_of_the_other():
    buffer = full()
    buffer.drop("a")
    buffer.drop("never seen")
    for held in (buffer, buffer.logs, buffer.post_seen, buffer.failed):
        assert list(held) == ["b"]


@pytest.mark.covers("EX-15")
def test_a_later_payload_is_merged_and_is_not_kept_by_reference():
    buffer, first, second = IntermediateBuffer(), {"meta": {"x": 1}}, {"meta": {"y": 2}}
    buffer.open("a", first)
    buffer.open("a", second)
    buffer.apply("a", {"meta": {"x": 3}})
    assert buffer["a"] == {"meta": {"x": 3, "y": 2}}
    assert (first, second) == ({"meta": {"x": 1}}, {"meta": {"y": 2}})


def test_an_empty_update_changes_nothing_at_all():
    buffer = full()
    before = buffer["a"]
    buffer.apply("a", {})
    assert buffer["a"] is before


def test_a_log_begins_at_the_prompt_and_stays():
    buffer = IntermediateBuffer()
    log = buffer.log("a", 7)
    assert log.end == 7
    assert buffer.log("a", 7) is log


def test_the_older_name_is_the_same_buffer():
    runner = ToyRunner(ScalarModel())
    assert runner.runtime_additional_information is runner.model_intermediate_buffer
