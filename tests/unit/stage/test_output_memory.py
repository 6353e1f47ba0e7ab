"""Rows of token-aligned outputs go out once each, whatever way their positions were computed."""

from __future__ import annotations

import pytest
import torch

from stagevox.contract import RowPhase
from stagevox.stage.outputs import OutputMemory
from tests.unit.stage.slices import slice_outputs


def step(memory: OutputMemory, *spans: tuple[str, int, int, int, int]) -> dict[str, list[int]]:
    """One step of ``(req_id, num_computed, span, prompt_len, num_known)``; rows carry ``100 * request + position``."""
    rows, values, start = [], [], 0
    for req_id, computed, span, prompt, known in spans:
        rows.append(RowPhase(req_id, start, span, computed, prompt, known))
        values += [100 * ord(req_id) + position for position in range(computed, computed + span)]
        start += span
    outputs = slice_outputs(rows, {"x": torch.tensor(values)}, start, memory)
    return {req_id: (named["x"] - 100 * ord(req_id)).tolist() for req_id, named in outputs.items() if named}


@pytest.mark.covers("EX-5", "EX-15", "PC-14")
def test_chunks_of_a_prompt_go_out_with_the_sampled_one() -> None:
    memory = OutputMemory()
    assert step(memory, ("a", 0, 3, 7, 7), ("b", 5, 1, 4, 6)) == {"b": [5]}
    assert step(memory, ("b", 6, 1, 4, 7), ("a", 3, 3, 7, 7)) == {"b": [6]}
    assert step(memory, ("a", 6, 1, 7, 7)) == {"a": [0, 1, 2, 3, 4, 5, 6]}
    assert not memory.held


@pytest.mark.covers("EX-5", "PC-14")
def test_a_replay_repeats_no_row() -> None:
    memory = OutputMemory()
    assert step(memory, ("a", 0, 4, 4, 4)) == {"a": [0, 1, 2, 3]}
    assert step(memory, ("a", 4, 1, 4, 5)) == {"a": [4]}
    # preempted with six known positions, of which five were computed; replayed in chunks across the prompt's end
    assert step(memory, ("a", 0, 3, 4, 6)) == {}
    assert step(memory, ("a", 3, 3, 4, 6)) == {"a": [5]}


@pytest.mark.covers("EX-3")
def test_a_dropped_request_leaves_nothing() -> None:
    memory = OutputMemory()
    step(memory, ("a", 0, 3, 7, 7))
    memory.drop("a")
    assert not memory.taken and not memory.held
