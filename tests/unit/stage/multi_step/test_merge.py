"""Several steps as one result: tokens up to each row's end, rows in order, marks of any step (MS-9 to MS-11)."""

import pytest
import torch

from stagevox.stage.multi_step.layout import window_positions, window_slots
from stagevox.stage.multi_step.merge import WindowTokens, merge_outputs

STOPS = [frozenset({7}), frozenset({7}), frozenset()]


def fill(*steps, failed=None):
    tokens = WindowTokens(["a", "b", "c"], STOPS)
    return tokens, [tokens.add(list(ids), (failed or {}).get(step, {})) for step, ids in enumerate(steps)]


@pytest.mark.covers("MS-9", "MS-11")
def test_a_row_ships_up_to_its_stop():
    tokens, done = fill((1, 2, 7), (7, 3, 7), (4, 5, 7))
    assert tokens.shipped() == ([[1, 7], [2, 3, 5], [7, 7, 7]], {})
    assert done == [False, False, False], "7 is no stop of c's"
    assert tokens.columns() == [[1, 7, 4], [2, 3, 5], [7, 7, 7]]


@pytest.mark.covers("MS-9", "MS-11")
def test_a_window_is_over_when_every_row_is():
    error = ValueError()
    _, done = fill((1, 7, 2), (7, 1, 2), (1, 1, 1), failed={2: {"c": error}})
    assert done == [False, False, True]


def test_who_fails_ships_what_came_before():
    error = ValueError()
    tokens, _ = fill((1, 2, 3), (1, 2, 3), (1, 2, 3), failed={0: {"b": error}, 1: {"b": error, "c": error}})
    assert tokens.shipped() == ([[1, 1, 1], [], [3]], {"b": 0, "c": 1})


def test_a_failure_after_the_stop_is_nobody_s():
    error = ValueError()
    tokens, _ = fill((7, 2, 3), (1, 2, 3), failed={1: {"a": error}})
    assert tokens.shipped() == ([[7], [2, 2], [3, 3]], {})


@pytest.mark.covers("MS-10")
def test_outputs_of_a_window():
    steps = [
        {"a": {"codes": torch.tensor([[step, 1]]), "meta.turn_end": step == 1, "meta.duplex_epoch": step, "name": f"n{step}"}}
        for step in range(4)
    ]
    steps[0]["b"] = {"codes": torch.tensor([[9, 9]])}
    merged, faults = merge_outputs(steps, {"a": 3, "b": 1, "c": 4})
    assert merged["a"]["codes"].tolist() == [[0, 1], [1, 1], [2, 1]]
    assert merged["a"]["meta.turn_end"] is True, "held in one of its steps"
    assert (merged["a"]["meta.duplex_epoch"], merged["a"]["name"]) == (2, "n2"), "the last step's"
    assert merged["b"]["codes"].tolist() == [[9, 9]]
    assert "c" not in merged and not faults


@pytest.mark.covers("MS-10")
def test_a_turn_that_ends_after_the_row_s_end_is_not_its_own():
    steps = [{"a": {"meta.turn_end": step == 2}} for step in range(4)]
    assert merge_outputs(steps, {"a": 2})[0] == {"a": {"meta.turn_end": False}}
    assert merge_outputs(steps, {"a": 3})[0] == {"a": {"meta.turn_end": True}}


@pytest.mark.covers("MS-9")
def test_positions_and_slots_are_step_major():
    first = torch.tensor([100, 200])
    assert torch.cat([first.unsqueeze(0), window_positions(first, 2)]).flatten().tolist() == [100, 200, 101, 201]
    positions = window_positions(torch.tensor([30, 64]), 4)
    assert positions.tolist() == [[31, 65], [32, 66], [33, 67]]
    blocks = torch.tensor([[5, 8, 0], [1, 2, 3]], dtype=torch.int32)
    assert window_slots(positions, blocks, 32).tolist() == [
        [5 * 32 + 31, 3 * 32 + 1],
        [8 * 32, 3 * 32 + 2],
        [8 * 32 + 1, 3 * 32 + 3],
    ]


def test_rows_that_don_t_join_are_their_request_s_fault():
    rows = {"a": {"x": torch.zeros(1)}, "b": {"x": torch.zeros(1)}}
    merged, faults = merge_outputs([rows, {**rows, "a": {"x": torch.zeros(1, 2)}}], {"a": 2, "b": 2})
    assert merged["b"]["x"].tolist() == [0, 0] and "a" not in merged
    assert "make_omni_output: returned rows that don't join those before them" in str(faults["a"])
