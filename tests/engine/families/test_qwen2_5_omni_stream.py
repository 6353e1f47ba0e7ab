"""Qwen2.5-Omni as it is produced: the Talker runs while the Thinker writes, the vocoder while the Talker speaks."""

import numpy as np
import pytest

from stagevox.config.blueprint import Blueprint
from stagevox.omni import Omni
from support.families import TINY
from support.modes import Mode, shown
from support.qwen2_5_omni import AR, CONCURRENT, FAMILY, WAVE_TOLERANCE, Answers, check, codes_of, frames, greedy, prompt

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def oracle(golden):
    return golden(FAMILY)


def streaming(folder, sizes, context, ahead, **settings):
    """The stages as an operator lets them stream."""
    settings = {**TINY, **AR, "max_model_len": 256, **settings}
    overrides = {"thinker": {**settings, "num_gpu_blocks_override": 40}, "talker": settings, "code2wav": TINY}
    options = [
        "thinker.chunk_options.stream=true",
        "talker.chunk_options.sizes=[1]",
        f"code2wav.input_options.sizes={list(sizes)}",
        f"code2wav.input_options.context={context}",
        f"code2wav.input_options.ahead={ahead}",
    ]
    return Omni(Blueprint.of(folder, overrides, stage_settings=options), deadline=300)


@pytest.fixture(scope="module")
def model(checkpoint, oracle):
    """Small budget and pool: rows and codes come in pieces, requests wait and are preempted."""
    chunk = oracle.facts["chunk"]
    small = Mode(budget=32, blocks=9).overrides
    with streaming(checkpoint(FAMILY), [chunk["frames"]], chunk["context"], chunk["ahead"], **small) as made:
        yield made


@pytest.mark.covers("SV-3", "EX-2", "TK-1")
def test_text_and_codes_are_those_of_the_whole(model, oracle):
    """Replies in pieces; also the longest ones, of which most is spoken after the last piece."""
    check(oracle, Answers(model, oracle, CONCURRENT), waves=False)
    check(oracle, Answers(model, oracle, ["wordy", "two_tokens", "image", "one_frame"]), waves=False)
    assert {"offset_chunk", "replay"} <= set(shown(model, "talker"))


@pytest.mark.covers("SV-3")
def test_the_talker_speaks_before_the_reply_is_whole(model, oracle):
    """In the order of what clients see: a code comes while text is still to come."""
    order = []
    case = oracle.cases["steady"]

    def note(event):
        if getattr(event, "stage", None) in ("thinker", "talker", "code2wav"):
            order.append((event.stage, len(event.output.new_token_ids)))

    (result,) = model.generate([prompt(case)], [greedy(case)], on_event=note)
    assert codes_of(result) == frames(case)
    stages = [stage for stage, _ in order]
    assert stages.index("talker") < len(stages) - 1 - stages[::-1].index("thinker")
    assert stages.index("code2wav") < len(stages) - 1 - stages[::-1].index("talker")


@pytest.mark.covers("EX-9")
def test_samples_equal_the_references_run_of_the_same_chunks(model, oracle):
    """Chunk, context and what is seen ahead are those that the reference was run with; none is missing, none comes twice."""
    result = Answers(model, oracle, ["steady"]).results["steady"]
    wanted = oracle.waveforms["steady.chunked"]
    assert len(result.audio) == 480 * len(frames(oracle.cases["steady"])) == len(wanted)
    np.testing.assert_allclose(result.audio, wanted, rtol=0, atol=WAVE_TOLERANCE)


def test_borders_of_chunks_do_not_click(model, oracle):
    """A step between the samples on both sides of a border is like the steps elsewhere."""
    audio = Answers(model, oracle, ["wordy"]).results["wordy"].audio
    steps = np.abs(np.diff(audio))
    size = 480 * oracle.facts["chunk"]["frames"]
    borders = steps[size - 1 :: size]
    assert len(borders) >= 4
    assert borders.max() <= np.quantile(steps, 0.999)


@pytest.mark.covers("EX-9")
@pytest.mark.parametrize("sizes", [(17,), (12, 24)])
def test_total_length_is_stated(checkpoint, oracle, sizes):
    """480 samples a frame, whatever the chunks; with all frames in view a chunk's samples are those of the whole."""
    with streaming(checkpoint(FAMILY), sizes, 10_000, 10_000) as model:
        check(oracle, Answers(model, oracle, ["steady", "other_voice"]))
