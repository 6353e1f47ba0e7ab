"""The packaged model through the front door: concurrent, capped, aborted, starved, dying (F10, F17, F19, F20)."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("vllm")

from stagevox.errors import DeadlineError, StageDiedError, TextTooLongError, VocabularyError
from stagevox.omni import Omni
from stagevox.pipeline.events import FinishRequest

pytestmark = pytest.mark.filterwarnings("ignore")  # what vLLM and torch warn of while an engine starts is theirs

TEXTS = ["seven plus three is ten", "good morning", "sixty two minus five is fifty seven", "hello"]


@pytest.fixture(scope="module")
def omni():
    with Omni("mini", {"talker": {"max_num_seqs": 4}}, deadline=1.0) as one:
        yield one


@pytest.fixture(scope="module")
def alone(omni):
    return {text: omni.generate(text)[0] for text in TEXTS}


@pytest.fixture(autouse=True)
def idle(omni):
    """After every test, nothing of any request is left at any stage, the runners' state included."""
    yield
    for _ in omni._driver.events():
        pass
    omni.assert_idle()
    for stage in omni._stages:
        assert not any(stage.state_size().values()), stage.name


def same(one, other):
    return np.array_equal(one.codes, other.codes) and np.array_equal(one.audio, other.audio)


@pytest.mark.covers("SV-3")
def test_one_text(alone):
    for text, result in alone.items():
        assert (result.text, result.finish_reason, result.error) == (text, "stop", None)
        assert len(result.audio) == 640 * len(result.codes) > 0
        assert 0 < result.first_audio_seconds < result.seconds


@pytest.mark.covers("SV-3", "EX-15")
def test_more_requests_than_slots_speak_as_if_alone(omni, alone):
    """Greedy codes of the shipped talker are the same alone and among others; their audio is the same samples."""
    texts = TEXTS * 4
    results = omni.generate(texts)
    assert all(same(result, alone[text]) for text, result in zip(texts, results, strict=True))


def test_bad_prompts_among_good_ones(omni, alone):
    results = omni.generate([TEXTS[0], "xyzzy", "one " * 100, TEXTS[1]])
    assert [type(result.error) for result in results] == [type(None), VocabularyError, TextTooLongError, type(None)]
    assert same(results[0], alone[TEXTS[0]]) and same(results[3], alone[TEXTS[1]])


@pytest.mark.parametrize("cap", [1, 2, 10])
def test_a_cap_is_told_and_what_was_said_is_right(omni, alone, cap):
    (result,) = omni.generate(TEXTS[0], {"max_tokens": cap})
    whole = alone[TEXTS[0]]
    assert result.finish_reason == "length" and result.error is None
    assert len(result.codes) in (cap - 1, cap)
    np.testing.assert_array_equal(result.codes.reshape(-1, 4), whole.codes[: len(result.codes)])
    assert len(result.audio) == 640 * len(result.codes)


def test_a_capped_thinker_is_told(omni):
    (result,) = omni.generate(TEXTS[0], {"thinker": {"max_tokens": 2}})
    assert (result.text, result.finish_reason) == ("seven plus", "length")


@pytest.mark.covers("RT-8")
def test_listeners_that_leave(omni, alone):
    driver, rng = omni._driver, random.Random(0)
    for n in range(60):
        driver.submit(omni._blueprint.admit(f"leaves-{n}", rng.choice(TEXTS), None))
        for _ in range(rng.randrange(8)):
            driver.step()
        if rng.random() < 0.8:
            driver.abort(rng.choice(driver._orchestrator.req_ids))
    driver.abort_all()
    for _ in driver.events():
        pass
    assert all(same(result, alone[text]) for text, result in zip(TEXTS, omni.generate(TEXTS), strict=True))


@pytest.mark.parametrize("target", ["talker", "code2wav"])
def test_a_lost_chunk_ends_its_request_only(omni, monkeypatch, target):
    driver = omni._driver
    put = driver._connector.put

    def lossy(stage, chunk):
        if (stage, chunk.req_id, chunk.end) != (target, "starved", True):
            put(stage, chunk)

    monkeypatch.setattr(driver._connector, "put", lossy)
    for req_id in ("starved", "fed"):
        driver.submit(omni._blueprint.admit(req_id, TEXTS[0], None))
    ends = {event.req_id: event for event in driver.events() if isinstance(event, FinishRequest)}
    assert isinstance(ends["starved"].error, DeadlineError)
    assert ends["fed"].finish_reason == "stop"


def test_a_dead_stage_is_told_at_once(omni, monkeypatch):
    def broken():
        raise RuntimeError("device lost")

    monkeypatch.setattr(omni._driver, "_alive", dict(omni._driver._alive))
    monkeypatch.setattr(omni._driver._orchestrator, "_dead", {})
    monkeypatch.setattr(omni._stages[1], "step", broken)
    results = omni.generate(TEXTS[:2])
    assert all(isinstance(result.error, StageDiedError) for result in results)
    monkeypatch.undo()
    omni._stages[1].abort([stage_id for stage_id in omni._stages[1]._scheduler.omni_requests])
