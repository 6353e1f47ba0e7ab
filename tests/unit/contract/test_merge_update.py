"""Updates are laid over a request's state field by field (EX-15)."""

import copy

import pytest
import torch

from stagevox.contract import merge_update

pytestmark = pytest.mark.covers("EX-15")


def test_siblings_survive_at_any_depth():
    state = {"a": {"b": {"c": 1, "d": 2}, "e": 3}, "f": 4}
    assert merge_update(state, {"a": {"b": {"c": 10}}}) == {"a": {"b": {"c": 10, "d": 2}, "e": 3}, "f": 4}


def test_new_keys_enter_at_any_depth():
    assert merge_update({"a": {"b": {}}}, {"a": {"b": {"x": 1}, "y": 2}, "z": 3}) == {"a": {"b": {"x": 1}, "y": 2}, "z": 3}


@pytest.mark.parametrize("value", [None, 0, [], (1,), "text"])
def test_any_other_value_replaces(value):
    assert merge_update({"a": {"b": 1}, "c": [1, 2]}, {"a": value, "c": value}) == {"a": value, "c": value}


def test_a_mapping_replaces_a_plain_value():
    assert merge_update({"a": 1}, {"a": {"b": 2}}) == {"a": {"b": 2}}


def test_neither_input_changes():
    state = {"a": {"b": {"c": 1}}, "l": [1]}
    update = {"a": {"b": {"d": 2}}, "n": {"m": 1}}
    before = copy.deepcopy((state, update))
    merge_update(state, update)
    assert (state, update) == before


def test_a_later_merge_into_the_result_leaves_earlier_inputs_alone():
    state, update = {"a": {"b": 1}}, {"n": {"m": {"k": 1}}}
    first = merge_update(state, update)
    second = merge_update(first, {"a": {"b": 2}, "n": {"m": {"k": 2}}})
    assert second == {"a": {"b": 2}, "n": {"m": {"k": 2}}}
    assert first == {"a": {"b": 1}, "n": {"m": {"k": 1}}}
    assert (state, update) == ({"a": {"b": 1}}, {"n": {"m": {"k": 1}}})


def test_tensors_are_kept_by_reference():
    old, new = torch.tensor([1.0]), torch.tensor([2.0])
    merged = merge_update({"keep": old, "swap": old}, {"swap": new})
    assert merged["keep"] is old
    assert merged["swap"] is new
    assert old.item() == 1.0
