"""Qwen3-Omni in every serving mode: the reference's codes and samples, and each mode's hard cases did occur."""

from typing import NamedTuple

import pytest

from stagevox.errors import CapabilityError
from stagevox.models.qwen3_omni.topology import topology
from support.families import omni
from support.modes import Mode, shown
from support.qwen3_omni import CASES, ask, check_codes, check_waveform, params, prompt, streamed

FAMILY = "qwen3_omni"

CONCURRENT = ["audio", "short", "image", "goes_on", "long", "turns", "cut_6", "two_tokens"]
"""Eight requests for four slots: prompts of 9 to 49 positions, speech of 5 to 59 frames, three speakers."""

LONG_PROMPTS = 3
"""Of these have prompts of more than one block."""

SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}

ABORTED_AFTER = 12
"""Layer-0 tokens."""


class Cell(NamedTuple):
    """A mode of both AR stages, and what their step logs have to show of it."""

    mode: Mode
    streaming: bool
    thinker: set[str]
    talker: set[str]

    def __str__(self) -> str:
        return f"{self.mode}-{'streaming' if self.streaming else 'whole'}"


THINKER_POOL, TALKER_POOL = 4, 6
"""Blocks: one request of full length and the null block, and in the Talker one more."""

CHUNKS = {"offset_chunk", "one_token_tail"}

CELLS = [
    Cell(Mode(), False, {"reorder"}, set()),
    Cell(Mode(budget=8, prefix=True), False, CHUNKS, CHUNKS | {"reorder"}),
    Cell(Mode(budget=8, blocks=1), False, CHUNKS | {"replay"}, {"offset_chunk", "boundary_replay", "replay_past_prompt"}),
    Cell(
        Mode(budget=32, blocks=1, prefix=True, asynchronous=True),
        False,
        {"offset_chunk", "boundary_replay"},
        {"offset_chunk", "boundary_replay", "one_token_replay_tail"},
    ),
    Cell(Mode(budget=8, asynchronous=True), True, CHUNKS, CHUNKS),
    Cell(
        Mode(budget=32, blocks=1, asynchronous=True),
        True,
        {"offset_chunk", "boundary_replay"},
        CHUNKS | {"boundary_replay", "reorder"},
    ),
    Cell(Mode(budget=8, blocks=1, prefix=True), True, CHUNKS | {"replay"}, {"offset_chunk", "replay_past_prompt", "reorder"}),
]


def model_of(folder, mode, streaming=False, **thinker):
    """Engines of four slots in which the longest prompt and its speech just fit."""
    common = {"max_num_seqs": 4, **mode.overrides}
    pools = [{"num_gpu_blocks_override": blocks} if mode.blocks else {} for blocks in (THINKER_POOL, TALKER_POOL)]
    overrides = {
        "thinker": {
            **common,
            **pools[0],
            "max_model_len": 96,
            "limit_mm_per_prompt": {"image": 1, "audio": 1, "video": 0},
            **thinker,
        },
        "talker": {**common, **pools[1], "max_model_len": 128},
        "code2wav": {"max_model_len": 128},
    }
    return omni(streamed(topology(folder)) if streaming else topology(folder), overrides)


@pytest.fixture(scope="module")
def oracle(golden):
    return golden(FAMILY)


@pytest.mark.covers("TK-4", "RT-8", "RT-9", "PC-8", "PC-13", "PC-14", "EX-7", "EX-8")
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_same_codes_and_samples(cell, checkpoint, oracle):
    with model_of(checkpoint(FAMILY), cell.mode, cell.streaming) as model:
        results = ask(model, oracle, CONCURRENT)
        check_codes(oracle, results, CONCURRENT)
        check_waveform(oracle, results, CONCURRENT)
        since = {stage: len(rows) for stage, rows in model.trace().items()}
        aborted = again_with_one_aborted(model, oracle)
        assert aborted.finish_reason == "abort" and ABORTED_AFTER - 2 <= len(aborted.codes) <= ABORTED_AFTER + 2
        for stage in ("thinker", "talker"):
            must = getattr(cell, stage)
            assert set(shown(model, stage)) >= must, f"{stage}: {must - set(shown(model, stage))} did not occur"
        if cell.mode.prefix and not cell.mode.blocks:  # a small pool keeps nothing for later
            assert cached_prompts(model, "thinker", since["thinker"]) >= LONG_PROMPTS
            if not cell.streaming:
                assert cached_prompts(model, "talker", since["talker"]) >= 1


def again_with_one_aborted(model, oracle):
    """All once more, one of them twice: of these the first is aborted while it speaks. Returns what became of it."""
    names = ["goes_on", *CONCURRENT]
    spoken = {}
    before = model._count
    results = model.generate(
        [prompt(CASES[name]) for name in names],
        [params(oracle, name) for name in names],
        on_event=lambda event: abort_when(model, event, f"omni-{before + 1}", spoken),
    )
    model.assert_idle()
    others = dict(zip(CONCURRENT, results[1:], strict=True))
    check_codes(oracle, others, CONCURRENT)
    check_waveform(oracle, others, CONCURRENT)
    return results[0]


def abort_when(model, event, req_id, spoken):
    if getattr(event, "stage", None) == "talker" and event.output.req_id == req_id:
        spoken[req_id] = spoken.get(req_id, 0) + len(event.output.new_token_ids)
        if spoken[req_id] >= ABORTED_AFTER:
            model._driver.abort(req_id)


def cached_prompts(model, stage, since):
    """Requests whose first row starts past positions that the prefix cache spared them."""
    first = {}
    for row in model.trace()[stage][since:]:
        first.setdefault(row.req_id, row)
    return sum(row.num_computed > 0 for row in first.values())


@pytest.mark.covers("RT-8")
@pytest.mark.filterwarnings(r"ignore:\s*Encountered the use of a type that is scheduled for deprecation")  # vLLM's n-gram kernel
def test_a_drafting_thinker(checkpoint, oracle):
    """Verified and rejected drafts: the Talker gets each position's row once, and says the same."""
    with model_of(checkpoint(FAMILY), Mode(), speculative_config=SPECULATION) as model:
        results = ask(model, oracle, CONCURRENT)
        check_codes(oracle, results, CONCURRENT)
        check_waveform(oracle, results, CONCURRENT)
        spans = [row.span for row in model.trace()["thinker"] if not row.is_prefill]
        assert max(spans) > 1, "nothing was drafted"


@pytest.mark.covers("RT-8")
@pytest.mark.parametrize(
    ("stage", "more", "reason"),
    [("talker", {}, "runner-managed MTP"), ("thinker", {"async_scheduling": True}, "async scheduling is only supported with")],
)
def test_speculation_that_can_not_work(checkpoint, stage, more, reason):
    with pytest.raises(CapabilityError, match=reason):
        omni(topology(checkpoint(FAMILY)), {stage: {"speculative_config": SPECULATION, **more}})


SAMPLED = ("short", "turns", "goes_on")


def seeded(oracle, name, seed):
    return params(oracle, name) | {"temperature": 0.9, "top_k": 50, "seed": seed}


@pytest.mark.covers("PC-14")
def test_seeded_speech_is_the_same_in_any_company(checkpoint, oracle):
    """All groups are drawn at random, replayed positions among them: alone, together, and through preemptions."""
    asked = [(prompt(CASES[name]), seeded(oracle, name, 5 + seed)) for seed, name in enumerate(SAMPLED)]
    with model_of(checkpoint(FAMILY), Mode()) as model:
        alone = [model.generate([one], [how])[0] for one, how in asked]
        again = model.generate([asked[0][0]], [asked[0][1]])[0]
        other = model.generate([asked[0][0]], [asked[0][1] | {"seed": 99}])[0]
        unseeded = [model.generate([asked[0][0]], [{**asked[0][1], "seed": None}])[0] for _ in range(2)]
    greedy = oracle.cases[SAMPLED[0]]["codes"]
    assert again.codes.tolist() == alone[0].codes.tolist()
    assert len({str(codes) for codes in (greedy, *(it.codes.tolist() for it in (alone[0], other, *unseeded)))}) == 5
    with model_of(checkpoint(FAMILY), Mode(budget=8, blocks=1), streaming=True) as model:
        together = model.generate([one for one, _ in asked] * 2, [how for _, how in asked] * 2)
        assert shown(model, "talker")["replay"]
        for index, result in enumerate(together):
            assert result.codes.tolist() == alone[index % len(asked)].codes.tolist(), SAMPLED[index % len(asked)]
