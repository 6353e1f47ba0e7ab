"""Qwen2.5-Omni against its reference: text ids, codes, samples."""

import numpy as np
import pytest

from stagevox.errors import BadMediaError, EmptyTextError
from stagevox.models.qwen2_5_omni.topology import topology
from support.families import LEAST_MARGIN, omni
from support.qwen2_5_omni import (
    AR,
    BATCH_TOLERANCE,
    FAMILY,
    Answers,
    check,
    check_same,
    check_wave,
    codes_of,
    frames,
    greedy,
    prompt,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # what vLLM, torch and transformers warn of is theirs


@pytest.fixture(scope="module")
def model(checkpoint):
    with omni(topology(checkpoint(FAMILY)), {"thinker": AR, "talker": AR}) as made:
        yield made


@pytest.fixture(scope="module")
def oracle(golden):
    return golden(FAMILY)


PLAIN = ("steady", "other_voice", "past_the_reply", "wordy", "short", "bare")
MEDIA = ("image", "audio", "image_and_audio", "video")


def test_the_reference_is_clear_of_ties(oracle):
    margins = [case[key] for case in oracle.cases.values() for key in ("text_margin", "codes_margin") if key in case]
    assert len(margins) > 2 * len(PLAIN + MEDIA)
    assert min(margins) > LEAST_MARGIN
    codes = [code for name in PLAIN + MEDIA for code in frames(oracle.cases[name])]
    assert len(set(codes)) > len(codes) // 2, "codes that hardly vary are no evidence"


@pytest.mark.covers("TK-1")
def test_one_request(model, oracle):
    check(oracle, Answers(model, oracle, ["steady"]))


@pytest.mark.covers("TK-1")
def test_all_at_once(model, oracle):
    """Ten requests in four slots: unequal lengths, both voices, pictures, sounds and a film among them."""
    answers = Answers(model, oracle, [*PLAIN, *MEDIA])
    check(oracle, answers)
    assert {len(oracle.cases[name]["prompt_ids"]) for name in answers.results} >= {47, 58, 62}


def test_media_again(model, oracle):
    """What the processor and the encoder remember of the same media changes nothing; other media are told apart (F13)."""
    for _ in range(2):
        check(oracle, Answers(model, oracle, MEDIA[:2]))


@pytest.mark.parametrize("name", ["two_tokens", "one_frame", "codes_cut_at_20"])
def test_the_shortest(model, oracle, name):
    answers = Answers(model, oracle, [name])
    check(oracle, answers)
    assert answers.results[name].finish_reason == ("length" if "cut" in name else "stop")


def test_every_returned_token_is_spoken(model, oracle):
    """The reference forgets the last token of a reply that is cut: cut at n, ours is what it says cut at n + 1."""
    for ours, reference in (("text_cut_at_6", "text_cut_at_7"), ("text_cut_at_1", "text_cut_at_2")):
        answers = Answers(model, oracle, [ours])
        result, case = answers.results[ours], oracle.cases[reference]
        assert result.error is None and result.finish_reason == "length"
        assert answers.text_ids[ours] == oracle.cases[ours]["text_ids"] == case["text_ids"][:-1]
        assert codes_of(result) == frames(case) != frames(oracle.cases[ours])
        check_wave(oracle, reference, result)


@pytest.mark.parametrize("name", ["one_token", "no_frame"])
def test_nothing_to_speak_is_a_clear_end(model, oracle, name):
    """The reference raises on both: a reply of nothing but its end, and codes that end before the first frame."""
    assert "fault" in oracle.cases[name]
    answers = Answers(model, oracle, [name, "two_tokens"])
    check(oracle, answers, ["two_tokens"])
    result = answers.results[name]
    assert (result.error, result.finish_reason) == (None, "stop")
    assert answers.text_ids[name] == oracle.cases[name]["text_ids"]
    assert len(result.audio) == 0 and codes_of(result) == []


@pytest.mark.covers("TK-1")
def test_a_seed_speaks_the_same_alone_and_among_others(model, oracle):
    """Talker sampling as published, by the request's own generator; the noise of the vocoder by its seed (F38)."""
    drawn = {"temperature": 0.9, "seed": 7, "code2wav": {"seed": 11}}
    (alone,) = Answers(model, oracle, ["steady"], **drawn).results.values()
    among = Answers(model, oracle, ["steady", "short", "wordy"], **drawn).results["steady"]
    check_same(among, alone)
    assert codes_of(alone) != frames(oracle.cases["steady"])
    other = Answers(model, oracle, ["steady"], temperature=0.9, seed=8).results["steady"]
    assert codes_of(other) != codes_of(alone)
    noise = Answers(model, oracle, ["steady"], **{**drawn, "code2wav": {"seed": 12}}).results["steady"]
    assert codes_of(noise) == codes_of(alone) and np.abs(noise.audio - alone.audio).max() > 100 * BATCH_TOLERANCE


def test_media_that_no_processor_can_read_fail_alone(model, oracle):
    """Each by name, and their neighbours speak on (F44)."""
    bad = {"text": "hear", "audios": [np.zeros(3, np.float32)]}, {"text": "see", "images": [b"no image"]}, {"text": " "}
    names = ["two_tokens", "one_frame"]
    asked = [prompt(oracle.cases[names[0]]), *bad, prompt(oracle.cases[names[1]])]
    results = model.generate(asked, [greedy(oracle.cases[names[0]])] * 4 + [greedy(oracle.cases[names[1]])])
    model.assert_idle()
    assert [codes_of(results[index]) for index in (0, 4)] == [frames(oracle.cases[name]) for name in names]
    errors = [result.error for result in results[1:4]]
    assert [type(error) for error in errors] == [BadMediaError, BadMediaError, EmptyTextError]
    assert [error.field for error in errors] == ["audio", "images[0]", "text"]
    assert all(len(str(error).splitlines()) == 1 for error in errors)
