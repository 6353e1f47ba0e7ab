"""The Talker's codes equal the oracle's in every serving mode, and each mode's hard cases did occur.

Cells: token budget {5 = prompt length - 1, 6, plain} x KV pool {8 blocks, plain} x prefix caching x scheduling x {1, 4 requests}.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
from mini_reference import TinyOmni

from support.margins import least_margin
from support.talker_stage import PROMPT_LEN, cases, speak, talker_engine

TEXTS = {
    "short": "zero nine five",
    "medium": "the answer is thirty five",
    "long": "five six five one seven nine",
    "longest": "sixty two minus nineteen equals forty three",
}
"""Speech of 45, 60, 77 and 108 frames; the oracle's choices stay clear of ties (asserted below)."""

SEEDS = {name: {"temperature": 0.9, "top_k": 50, "seed": 11 + i} for i, name in enumerate(TEXTS)}
PLAIN = 0
BUDGETS = [PROMPT_LEN - 1, PROMPT_LEN, PLAIN]
POOLS = [8, PLAIN]


class Cell(NamedTuple):
    """One serving mode."""

    budget: int
    pool: int
    prefix: bool
    asynchronous: bool

    @property
    def overrides(self) -> dict[str, object]:
        """As engine arguments."""
        return {
            "max_num_seqs": 4,
            "enable_prefix_caching": self.prefix,
            "async_scheduling": self.asynchronous,
            **({"max_num_batched_tokens": self.budget} if self.budget else {}),
            **({"num_gpu_blocks_override": self.pool} if self.pool else {}),
        }


CELLS = [Cell(*values) for values in itertools.product(BUDGETS, POOLS, [True, False], [False, True])]

ALL_CASES = {
    "offset_chunk",
    "one_token_tail",
    "replay",
    "boundary_replay",
    "replay_past_prompt",
    "one_token_replay_tail",
    "reorder",
}


PREEMPTED: dict[tuple[int, bool, bool], set[str]] = {
    # token budget, prefix caching, async scheduling: beside "replay" itself
    (5, True, False): set(),
    (5, True, True): {"replay_past_prompt", "reorder"},
    (5, False, False): {"replay_past_prompt"},
    (5, False, True): {"boundary_replay", "replay_past_prompt", "reorder"},
    (6, True, False): {"one_token_replay_tail", "replay_past_prompt", "reorder"},
    (6, True, True): {"boundary_replay", "replay_past_prompt", "reorder"},
    (6, False, False): {"boundary_replay", "replay_past_prompt", "reorder"},
    (6, False, True): {"boundary_replay", "replay_past_prompt", "reorder"},
    (PLAIN, True, False): {"replay_past_prompt", "reorder"},
    (PLAIN, True, True): {"boundary_replay", "replay_past_prompt", "reorder"},
    (PLAIN, False, False): {"boundary_replay", "reorder"},
    (PLAIN, False, True): {"boundary_replay", "reorder"},
}
"""What four requests in the small pool have to show."""


def must_show(cell: Cell, requests: int) -> set[str]:
    """The table: which cases a cell's step log has to show."""
    if requests == 1:
        return {"offset_chunk", "one_token_tail"} if cell.budget == PROMPT_LEN - 1 else set()
    shown = {"offset_chunk", "one_token_tail"} if cell.budget else set()
    if cell.pool:
        return shown | {"replay"} | PREEMPTED[cell.budget, cell.prefix, cell.asynchronous]
    return shown | {"reorder"}


@pytest.fixture(scope="module")
def oracle() -> TinyOmni:
    torch.set_num_threads(1)
    return TinyOmni()


@pytest.fixture(scope="module")
def expected(oracle: TinyOmni) -> dict[str, torch.Tensor]:
    return {name: oracle.generate(text) for name, text in TEXTS.items()}


@pytest.fixture(scope="module")
def ids(oracle: TinyOmni) -> dict[str, list[int]]:
    return {name: oracle.tokenize(text) for name, text in TEXTS.items()}


@pytest.fixture(scope="module")
def seeded(ids: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Sampled codes of each text alone in a plain engine."""
    engine = talker_engine()
    alone = {name: speak(engine, {name: ids[name]}, SEEDS)[name].codes for name in TEXTS}
    engine.close()
    return alone


@pytest.mark.covers("PC-13")
def test_the_oracle_is_clear_of_ties(oracle: TinyOmni, expected: dict[str, torch.Tensor]) -> None:
    for name, text in TEXTS.items():
        assert least_margin(oracle, text, expected[name]) > 1e-3, text


@pytest.mark.covers("PC-14")
def test_every_case_has_its_cell() -> None:
    assert set().union(*(must_show(cell, requests) for cell in CELLS for requests in (1, 4))) == ALL_CASES


@pytest.mark.covers("PC-2", "PC-3", "PC-8", "PC-13", "PC-14", "EX-8", "RT-1", "RT-8", "TK-3")
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_codes_equal_the_oracle(
    cell: Cell, expected: dict[str, torch.Tensor], ids: dict[str, list[int]], seeded: dict[str, torch.Tensor]
) -> None:
    engine = talker_engine(**cell.overrides)
    for requests in (1, 4):
        begin = len(engine.trace())
        chosen = dict(list(ids.items())[-requests:])
        spoken = speak(engine, chosen)
        found = cases(engine.trace()[begin:])
        assert found >= must_show(cell, requests), f"{requests} requests: {must_show(cell, requests) - found} did not occur"
        for name, result in spoken.items():
            assert result.finish_reason == "stop", (name, result)
            assert torch.equal(result.codes, expected[name]), name
    for name, result in speak(engine, ids, SEEDS).items():
        assert torch.equal(result.codes, seeded[name]), f"seeded {name}"
    assert engine.num_requests == 0
    assert not any(engine.state_size().values())
    engine.close()
