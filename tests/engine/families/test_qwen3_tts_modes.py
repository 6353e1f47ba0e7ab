"""Qwen3-TTS says what its reference says in every serving mode, and each mode's hard cases did occur."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from stagevox import Omni
from stagevox.errors import CapabilityError
from stagevox.pipeline.events import EmitOutput
from support.qwen3_tts import assert_all_golden, assert_golden, case, greedy, load, prompt, speak
from support.talker_stage import count_cases

NAMES = ["dialect", "long streaming", "instruct", "plain"]
"""Four speakers, prompts of 10 to 22 positions, speech of 20 to 40 frames."""

TAIL = "two tokens"
"""A prompt of 9 positions: one more than a step of 8 takes."""

PLAIN = 0


class Cell(NamedTuple):
    """One serving mode: token budget, KV blocks, prefix caching, async scheduling."""

    budget: int
    pool: int
    prefix: bool
    asynchronous: bool

    @property
    def overrides(self) -> dict[str, Any]:
        return {
            "max_num_seqs": 4,
            "max_model_len": 96,
            "enable_prefix_caching": self.prefix,
            "async_scheduling": self.asynchronous,
            **({"max_num_batched_tokens": self.budget} if self.budget else {}),
            **({"num_gpu_blocks_override": self.pool} if self.pool else {}),
        }


REPLAYED = {"replay", "replay_past_prompt"}
CELLS = {
    Cell(8, 6, True, False): REPLAYED | {"offset_chunk", "one_token_tail", "reorder"},
    Cell(8, 6, True, True): REPLAYED | {"offset_chunk", "one_token_tail", "reorder", "boundary_replay"},
    Cell(8, 6, False, False): REPLAYED | {"offset_chunk", "one_token_tail", "reorder", "boundary_replay"},
    Cell(8, 6, False, True): REPLAYED | {"offset_chunk", "one_token_tail", "reorder", "boundary_replay"},
    Cell(32, 6, True, False): REPLAYED | {"offset_chunk", "reorder", "boundary_replay"},
    Cell(32, 6, True, True): REPLAYED | {"offset_chunk", "reorder", "boundary_replay"},
    Cell(32, 6, False, False): REPLAYED | {"offset_chunk", "reorder", "boundary_replay", "one_token_replay_tail"},
    Cell(32, 6, False, True): REPLAYED | {"offset_chunk", "reorder", "boundary_replay", "one_token_replay_tail"},
    Cell(8, PLAIN, True, True): {"offset_chunk", "one_token_tail", "reorder"},
    Cell(PLAIN, PLAIN, True, False): {"reorder"},
    Cell(PLAIN, PLAIN, False, True): {"reorder"},
}
"""What four requests at once have to show. Rounds don't depend on time, so the rows repeat."""

SEEDS = [{"seed": 5 + index, "max_tokens": 24} for index in range(len(NAMES))]


def seeded(omni: Omni, order: list[int]) -> list[np.ndarray]:
    """Codes drawn at random, by the checkpoint's own temperatures."""
    results = omni.generate([prompt(NAMES[index]) for index in order], [SEEDS[index] for index in order])
    assert [result.error for result in results] == [None] * len(order)
    return [result.codes for result in results]


@pytest.fixture(scope="module")
def plain():
    with load() as omni:
        yield omni


@pytest.fixture(scope="module")
def drawn(plain):
    """Each request's random codes, alone."""
    return [seeded(plain, [index])[0] for index in range(len(NAMES))]


def test_the_reference_is_clear_of_ties():
    for name in [*NAMES, TAIL]:
        assert min(case(name)["margins"].values()) > 1e-3, name


@pytest.mark.covers("PC-2", "PC-3", "PC-8", "PC-14", "RT-8", "EX-8", "TK-4")
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_codes_and_samples_are_the_references(cell, drawn):
    with load({"talker": cell.overrides}) as omni:
        results, rows = speak(omni, [TAIL])
        assert_all_golden([TAIL], results)
        assert [row.span for row in rows if row.is_prefill] == ([8, 1] if cell.budget == 8 else [9])
        results, rows = speak(omni, NAMES)
        assert_all_golden(NAMES, results)
        found = set(count_cases(rows))
        assert found >= CELLS[cell], CELLS[cell] - found
        for codes, alone in zip(seeded(omni, [0, 1, 2, 3]), drawn, strict=True):
            np.testing.assert_array_equal(codes, alone)
        omni.assert_idle()


def test_every_case_has_its_cell():
    assert set().union(*CELLS.values()) == REPLAYED | {
        *("offset_chunk", "one_token_tail", "boundary_replay", "one_token_replay_tail", "reorder"),
    }


@pytest.mark.covers("TK-4")
def test_random_codes_follow_from_the_seed(plain, drawn):
    again = seeded(plain, [3, 2, 1, 0])[::-1]
    for codes, alone in zip(again, drawn, strict=True):
        np.testing.assert_array_equal(codes, alone)
    name = NAMES[3]
    others = plain.generate([prompt(name)] * 3, [{"seed": 77, "max_tokens": 6}, {"max_tokens": 6}, {"max_tokens": 6}])
    first = [drawn[3][:6], *(result.codes for result in others)]
    assert len({codes.tobytes() for codes in first}) == 4, "seeds, or requests without one, drew alike"
    # Groups past the first are drawn, too: two frames that share their layer-0 code and its position would be equal otherwise.
    likeliest = plain.generate([prompt(name)], {"temperature": 0.0, "max_tokens": 1})[0].codes
    starts = [plain.generate([prompt(name)], {"seed": seed, "max_tokens": 1})[0].codes[0] for seed in range(40)]
    same = [start for start in starts if start[0] == likeliest[0, 0]]
    assert len(same) > 1 and len({start.tobytes() for start in same}) > 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_aborted_request_leaves_the_others_alone(asynchronous):
    with load({"talker": {"async_scheduling": asynchronous, "max_num_batched_tokens": 32}}) as omni:
        steps = 0

        def watch(event):
            nonlocal steps
            if isinstance(event, EmitOutput) and event.stage == "talker" and event.output.req_id == "omni-2":
                steps += 1
                if steps == 10:
                    omni._driver.abort("omni-2")

        results = omni.generate([prompt(name) for name in NAMES], [greedy(name) for name in NAMES], on_event=watch)
        assert results[1].finish_reason == "abort" and 0 < len(results[1].codes) < 38
        for index in (0, 2, 3):
            assert_golden(NAMES[index], results[index])
        omni.assert_idle()
        results, _ = speak(omni, [NAMES[1]])
        assert_golden(NAMES[1], results[0])


LONG = {"text": "the quick brown fox jumps over the lazy dog. " * 2, "voice": "Vivian", "instruct": "speak slowly please"}


@pytest.mark.covers("RT-8", "TK-4")
def test_a_prefix_is_shared_by_what_is_conditioned_alike_and_by_nothing_else(plain):
    """Placeholder ids are the same for all prompts: only the salt tells them apart."""

    def hits(omni, prompts, params):
        found = []
        for one, param in zip(prompts, params, strict=True):
            begin = len(omni.trace()["talker"])
            (result,) = omni.generate([one], param)
            assert result.error is None
            found.append((omni.trace()["talker"][begin].num_computed, result.codes))
        return found

    cold = {"temperature": 0.0, "max_tokens": 12}
    warm = {"seed": 3, "max_tokens": 12}
    prompts = [LONG, LONG, LONG | {"voice": "Ryan"}, LONG | {"language": "German"}, LONG, LONG, LONG]
    params = [cold, cold, cold, cold, warm, warm, warm | {"seed": 4}]
    with load({"talker": {"enable_prefix_caching": True}}) as cached, load({"talker": {"enable_prefix_caching": False}}) as none:
        with_cache, without = hits(cached, prompts, params), hits(none, prompts, params)
    assert [computed for computed, _ in without] == [0] * 7
    assert [computed > 0 for computed, _ in with_cache] == [False, True, False, False, False, True, False]
    for (_, codes), (_, wanted) in zip(with_cache, without, strict=True):
        np.testing.assert_array_equal(codes, wanted)
    assert len({codes.tobytes() for _, codes in without}) == 5


@pytest.mark.parametrize("asynchronous", [False, True])
def test_speculation_is_refused_with_a_reason(asynchronous):
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    with pytest.raises(CapabilityError, match="talker.speculative_config: verify positions lack the hidden state"):
        load({"talker": {"speculative_config": speculation, "async_scheduling": asynchronous}})
