"""The whole pipeline with merged decode in its Talker: the same speech, its chunks no later (MS-2, MS-12)."""

from __future__ import annotations

import logging

import numpy as np
import pytest

pytest.importorskip("vllm")

from stagevox.omni import Omni
from stagevox.pipeline.events import EmitOutput

pytestmark = pytest.mark.filterwarnings("ignore")  # what vLLM and torch warn of while an engine starts is theirs

TEXTS = ["seven plus three is ten", "good morning", "sixty two minus five is fifty seven", "hello"]


def speak(omni):
    """Results, and in their order the Talker's tokens by output, up to the first sample and after it."""
    before, after = {}, {}

    def note(event):
        if not isinstance(event, EmitOutput):
            return
        req_id, output = event.output.req_id, event.output
        if event.stage == "code2wav" and output.multimodal:
            after.setdefault(req_id, [])
        elif event.stage == "talker":
            (after if req_id in after else before).setdefault(req_id, []).append(len(output.new_token_ids))

    results = omni.generate(TEXTS, on_event=note)
    ids = sorted(before, key=lambda req_id: int(req_id.removeprefix("omni-")))
    assert len(ids) == len(TEXTS)
    return results, [before[req_id] for req_id in ids], [after[req_id] for req_id in ids]


@pytest.fixture(scope="module")
def plain():
    with Omni("mini") as omni:
        yield speak(omni)


@pytest.mark.covers("MS-1", "MS-2", "MS-9", "MS-12")
@pytest.mark.parametrize("scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("steps", [8, 16])
def test_the_same_speech(plain, steps, scheduling, caplog):
    caplog.set_level(logging.INFO, "stagevox.multi_step")
    overrides = {"talker": {"async_scheduling": scheduling}}
    with Omni("mini", overrides, multi_step_decode_steps=steps) as omni:
        results, before, after = speak(omni)
        counters = omni.multi_step()
        gauges = omni._driver.gauges()["talker"]
        omni.assert_idle()
    expected, single, _ = plain
    for ours, theirs in zip(results, expected, strict=True):
        assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
        assert np.array_equal(ours.codes, theirs.codes)
        assert np.array_equal(ours.audio, theirs.audio)
    assert counters["thinker"]["steps"] == counters["code2wav"]["steps"] == 0, "they can't, and nobody said they should"
    talker = counters["talker"]
    assert talker["steps"] == steps and talker["executed_windows"] >= 5
    assert any(count > 1 for counts in after for count in counts)
    assert (gauges.windows, gauges.window_steps) == (talker["executed_windows"], talker["executed_steps"])
    assert gauges.refusals == talker["refusals"] and gauges.tokens_saved == talker["tokens_saved"]
    # The first chunk has 6 frames, so 7 tokens: no request makes more tokens before its first sound than without windows.
    assert all(sum(ours) <= sum(theirs) for ours, theirs in zip(before, single, strict=True)), (before, single)
    if not scheduling:
        assert {sum(counts) for counts in before} == {7}
    line = f"talker: Multi-step counters: executed_windows={talker['executed_windows']} executed_steps={talker['executed_steps']}"
    assert any(record.getMessage().startswith(line) for record in caplog.records), "the last line, as the engine stops"


@pytest.mark.covers("MS-1")
def test_the_environment_reaches_who_can(monkeypatch, plain):
    monkeypatch.setenv("VLLM_OMNI_MULTI_STEP_STEPS", "4")
    with Omni("mini") as omni:
        (result,) = omni.generate(TEXTS[0])
        counters = omni.multi_step()
    assert {name: one["steps"] for name, one in counters.items()} == {"thinker": 0, "talker": 4, "code2wav": 0}
    assert counters["talker"]["executed_windows"]
    assert np.array_equal(result.audio, plain[0][0].audio)
