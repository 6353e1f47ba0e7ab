"""Qwen2.5-Omni in every serving mode: the same text ids, codes and samples, and each mode's hard cases did occur."""

import pytest

from stagevox.errors import CapabilityError
from stagevox.models.qwen2_5_omni.topology import topology
from stagevox.pipeline.events import FinishRequest
from support.families import omni
from support.modes import Mode, shown
from support.qwen2_5_omni import AR, CONCURRENT, FAMILY, Answers, check, check_same, codes_of, greedy, prompt

pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = 9
"""Blocks: one request of full length and the null block, so that four of them can't all stay."""

MODES = [
    Mode(budget=8, asynchronous=True),
    Mode(budget=8, blocks=SMALL, prefix=True),
    Mode(budget=32, blocks=SMALL, asynchronous=True),
    Mode(budget=32, prefix=True, asynchronous=True),
]

DRAWN = {"temperature": 0.9, "seed": 5, "min_tokens": 100, "max_tokens": 110}
"""Long speech, most of it past the end of the reply: preempted once there is much to replay."""


def must_show(mode):
    """What the Talker's step log has to show."""
    cases = {"offset_chunk"} if mode.budget else set()
    if mode.budget == 8:
        cases |= {"one_token_tail"}
    if not mode.blocks:
        return cases | {"reorder"}
    cases |= {"replay", "boundary_replay"}
    return cases | ({"replay_past_prompt", "replay_tail", "one_token_replay_tail"} if mode.budget else set())


def test_every_case_has_its_mode():
    assert set().union(*map(must_show, MODES)) == {
        "offset_chunk",
        "one_token_tail",
        "boundary_replay",
        "replay",
        "replay_past_prompt",
        "replay_tail",
        "one_token_replay_tail",
        "reorder",
    }


@pytest.fixture(scope="module")
def oracle(golden):
    return golden(FAMILY)


def engines(checkpoint, **settings):
    settings = {**AR, "max_model_len": 256, **settings}
    return omni(topology(checkpoint(FAMILY)), {"thinker": settings, "talker": settings}, deadline=300)


@pytest.fixture(scope="module")
def drawn(checkpoint, oracle):
    """Long, drawn codes of each request in a plain engine."""
    with engines(checkpoint) as model:
        return {name: Answers(model, oracle, [name], **DRAWN).results[name] for name in CONCURRENT}


@pytest.mark.covers("TK-1", "TK-3", "PC-2", "PC-3", "PC-14", "RT-8", "RT-9")
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_same_in_every_mode(mode, checkpoint, oracle, drawn):
    with engines(checkpoint, **mode.overrides) as model:
        check(oracle, Answers(model, oracle, ["steady"]))  # 57 positions: seven times 8, and a tail of one
        check(oracle, Answers(model, oracle, CONCURRENT))
        for name, result in Answers(model, oracle, CONCURRENT, **DRAWN).results.items():
            assert result.error is None
            check_same(result, drawn[name], name)
        found = shown(model, "talker")
        assert set(found) >= must_show(mode), f"{must_show(mode) - set(found)} did not occur"
        if mode.prefix:
            assert shown(model, "thinker")["prefix_hit"], "no rows of cached positions were asked for"


@pytest.mark.covers("RT-8")
def test_one_is_aborted_half_way_among_others(checkpoint, oracle):
    """The others are as if it had never been there, and so is the same prompt straight after."""
    mode = Mode(budget=32, blocks=SMALL, prefix=True)
    with engines(checkpoint, **mode.overrides) as model:
        driver = model._driver
        for name in CONCURRENT:
            driver.submit(model._blueprint.admit(name, prompt(oracle.cases[name]), greedy(oracle.cases[name])))
        codes = {name: [] for name in CONCURRENT}
        gone, ends = "other_voice", {}
        for event in driver.events():
            if isinstance(event, FinishRequest):
                ends[event.req_id] = event.finish_reason
            elif event.stage == "talker":
                codes[event.output.req_id] += event.output.new_token_ids
                if event.output.req_id == gone and len(codes[gone]) == 10:
                    driver.abort(gone)
        assert ends[gone] == "abort"
        assert codes[gone] == oracle.cases[gone]["codes"][:10]
        for name in CONCURRENT:
            if name != gone:
                assert codes[name] == oracle.cases[name]["codes"], name
        driver.assert_idle()
        check(oracle, Answers(model, oracle, [gone]))


STRESS = Mode(budget=32, blocks=7)
"""For a context of 192: six blocks to use."""
WORDS = ("hello", "world", "what", "do", "you", "see", "hear", "in", "the", "picture", "sound", "quick", "brown", "fox")


def test_sixteen_requests_under_stress(checkpoint):
    """Published Talker sampling, four slots, budget 32, a pool that preempts, twice: the codes of an engine without any of it."""
    texts = [" ".join(WORDS[(3 * n + k) % len(WORDS)] for k in range(1 + n)) for n in range(16)]
    prompts = [{"text": text, "voice": ("Chelsie", "Ethan")[n % 2]} for n, text in enumerate(texts)]
    params = {"thinker": {"max_tokens": 40}, "max_tokens": 100}
    with engines(checkpoint) as model:
        wanted = [codes_of(result) for result in model.generate(prompts, params)]
    assert len({tuple(codes) for codes in wanted}) == 16 and max(map(len, wanted)) > 80
    with engines(checkpoint, max_model_len=192, **STRESS.overrides) as model:
        for _ in range(2):
            results = model.generate(prompts, params)
            assert [result.error for result in results] == [None] * 16
            assert [codes_of(result) for result in results] == wanted
        found = shown(model, "talker")
        assert found["offset_chunk"] and found["boundary_replay"]


SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.mark.covers("RT-8", "TK-1")
def test_verify_spans_get_the_same_rows(checkpoint, oracle):
    """N-gram speculation of Talker and Thinker: spans of several generated positions, some of them past the end of the reply."""
    with engines(checkpoint, speculative_config=SPECULATION) as model:
        check(oracle, Answers(model, oracle, CONCURRENT))
        for stage in ("thinker", "talker"):
            spans = [row for row in model.trace()[stage] if not row.is_prefill and row.span > 1]
            assert len(spans) >= 3, stage


def test_speculation_with_async_scheduling_is_refused(checkpoint):
    with pytest.raises(CapabilityError, match=r"talker\.speculative_config: hooks with speculation need synchronous scheduling"):
        topology_ = topology(checkpoint(FAMILY))
        omni(topology_, {"thinker": AR, "talker": {**AR, "async_scheduling": True, "speculative_config": SPECULATION}})
