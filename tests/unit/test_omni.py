"""The offline front door on stages without engines (F10, F11, F19, F20, F31, F35)."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import stagevox
from stagevox.config.blueprint import Blueprint
from stagevox.contract import CODES, WAVEFORM
from stagevox.errors import (
    BadParameterError,
    BadRequestError,
    ClosedError,
    ConfigError,
    EmptyTextError,
    RequestFailedError,
    StageDiedError,
    UnknownModelError,
    UnknownOverrideError,
    UnknownStageError,
    UnknownVoiceError,
    VocabularyError,
)
from stagevox.omni import Omni, OmniResult
from stagevox.pipeline.events import EmitOutput, FinishRequest


@pytest.fixture
def omni(fake_model):
    with Omni("fake") as one:
        yield one


def expected(letters):
    return np.arange(3 * letters, dtype=np.float32) / np.float32(100)


def test_public_names():
    assert stagevox.__all__ == sorted(stagevox.__all__)
    assert stagevox.Omni is Omni and stagevox.OmniResult is OmniResult
    assert set(stagevox.__all__) <= set(dir(stagevox))
    with pytest.raises(AttributeError, match="omny"):
        stagevox.omny  # noqa: B018


def test_importing_the_package_is_light():
    code = "import stagevox, sys; stagevox.__all__; print([m for m in ('torch', 'vllm', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=with_src(), timeout=60)
    assert done.stdout == "[]\n", done.stderr


def with_src():
    return {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(stagevox.__file__))}


def test_the_environment_is_set_but_an_operators_values_win(monkeypatch, fake_model):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    Omni("fake").close()
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.covers("SV-3")
def test_one_text(omni):
    (result,) = omni.generate("hello")
    assert (result.text, result.finish_reason, result.error) == ("5 letters", "stop", None)
    assert result.audio.dtype == np.float32 and result.sample_rate == omni.sample_rate == 100
    np.testing.assert_array_equal(result.audio, expected(5))
    assert result.codes.dtype == np.int64
    np.testing.assert_array_equal(result.codes, [[n, n + 1] for n in range(15)])
    assert [(stage.name, stage.tokens) for stage in result.stages] == [("thinker", 5), ("talker", 15), ("code2wav", 0)]
    assert 0 < result.first_audio_seconds <= result.seconds


def test_many_texts_come_back_in_order_and_whole(omni):
    texts = ["a" * (n % 7 + 1) for n in range(30)]
    for text, result in zip(texts, omni.generate(texts), strict=True):
        np.testing.assert_array_equal(result.audio, expected(len(text)))
    omni.assert_idle()


def test_statistics_are_of_the_call(omni):
    first, second = omni.generate("abc")[0], omni.generate("abc")[0]
    assert [stage.tokens for stage in first.stages] == [stage.tokens for stage in second.stages]


def test_no_prompts(omni):
    assert omni.generate([]) == []


@pytest.mark.parametrize(
    "prompt, error, field",
    [
        ("", EmptyTextError, "text"),
        (" \n", EmptyTextError, "text"),
        ("4", VocabularyError, "text"),
        ({"text": "a", "voice": "SLT"}, UnknownVoiceError, "voice"),
        ({"text": "a", "voice": ""}, UnknownVoiceError, "voice"),
        ({"text": "a", "voice": 3}, BadParameterError, "voice"),
        ({"text": "a", "vioce": "slt"}, BadParameterError, "prompt.vioce"),
        ({"voice": "slt"}, BadParameterError, "text"),
        ({}, BadParameterError, "text"),
        (None, BadParameterError, "text"),
        (b"hello", BadParameterError, "text"),
    ],
)
def test_a_bad_prompt_fails_alone(omni, prompt, error, field):
    before, bad, after = omni.generate(["abc", prompt, {"text": "de", "voice": "kal"}])
    assert type(bad.error) is error and bad.error.field == field
    assert bad.finish_reason == "error" and len(bad.audio) == 0 and bad.text == ""
    np.testing.assert_array_equal(before.audio, expected(3))
    np.testing.assert_array_equal(after.audio, expected(2))
    omni.assert_idle()


def test_a_failing_request_fails_alone(omni, fake_model):
    fake_model.stages["talker"].fail.add("omni-2")
    results = omni.generate(["abc", "def", "ghi"])
    assert [result.finish_reason for result in results] == ["stop", "error", "stop"]
    assert isinstance(results[1].error, RequestFailedError) and "the hook raised" in str(results[1].error)
    np.testing.assert_array_equal(results[2].audio, expected(3))
    assert omni.generate("abc")[0].finish_reason == "stop"


@pytest.mark.parametrize("bad", [[math.nan], [math.inf], [[0.5]]])
def test_samples_that_are_none_fail_their_request(omni, fake_model, bad):
    fake_model.stages["code2wav"].show = lambda rows: {WAVEFORM: bad if rows[0][1] == "omni-1" else [0.5]}
    first, second = omni.generate(["abc", "def"])
    assert first.finish_reason == "error" and "code2wav: samples" in str(first.error)
    assert second.finish_reason == "stop"
    omni.assert_idle()


def test_last_samples_that_are_none_fail_their_request(omni, fake_model):
    """They come in the same round as the request's end."""
    last = len(expected(3)) - 1
    fake_model.stages["code2wav"].show = lambda rows: {WAVEFORM: [math.nan if n == last else 0.5 for _, _, n in rows]}
    (result,) = omni.generate("abc")
    assert result.finish_reason == "error" and "code2wav: samples" in str(result.error)
    assert 0 < len(result.audio) <= last
    omni.assert_idle()


def test_no_frames(omni, fake_model):
    fake_model.stages["talker"].factor = 0
    (result,) = omni.generate("abc")
    assert (result.finish_reason, len(result.audio), result.codes.shape) == ("stop", 0, (0, 0))
    assert result.first_audio_seconds is None


def test_a_dead_stage(omni, fake_model):
    fake_model.stages["talker"].die_at = 2
    results = omni.generate(["abc", "def"])
    assert all(isinstance(result.error, StageDiedError) for result in results)
    assert isinstance(omni.generate("abc")[0].error, StageDiedError)


def test_sampling_parameters_reach_their_stage(omni, fake_model):
    seen = {}
    for stage in fake_model.stages.values():
        add = stage.add
        stage.add = lambda request, add=add, name=stage.name: (seen.update({name: request.sampling}), add(request))
    omni.generate("abc", {"temperature": np.float32(0), "seed": np.int64(3), "top_p": None, "thinker": {"max_tokens": 2}})
    assert seen == {"thinker": {"max_tokens": 2}, "talker": {"temperature": 0, "seed": 3}, "code2wav": {}}
    assert type(seen["talker"]["seed"]) is int


def test_a_cap_is_told(omni):
    capped, free = omni.generate(["abc", "abc"], [{"max_tokens": 4}, None])
    assert capped.finish_reason == "length"
    np.testing.assert_array_equal(capped.audio, expected(3)[:4])
    assert free.finish_reason == "stop"


@pytest.mark.parametrize(
    "params, field",
    [
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": np.float32("nan")}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"seed": True}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty"),
        ({"repetition_penalty": 1e308}, "repetition_penalty"),
        ({"temprature": 1}, "temprature"),
        ({"stop_token_ids": [1]}, "stop_token_ids"),
        ({"thinker": {"seed": -1}}, "thinker.seed"),
        ({"thinker": {"sede": 1}}, "thinker.sede"),
        ({"thinker": 3}, "thinker"),
        ({1: 3}, "1"),
        ("greedy", "sampling_params"),
        (3, "sampling_params"),
        ([{}, {}], "sampling_params"),
    ],
)
def test_bad_sampling_parameters_are_named(omni, params, field):
    with pytest.raises(BadParameterError) as caught:
        omni.generate("abc", params)
    assert caught.value.field == field
    omni.assert_idle()


@pytest.mark.parametrize("prompts", [None, 3, b"abc"])
def test_prompts_that_are_no_texts_are_named(omni, prompts):
    with pytest.raises(BadParameterError, match="^prompts: not texts but a "):
        omni.generate(prompts)
    assert [result.error for result in omni.generate(text for text in ("abc", "ab"))] == [None, None]


@pytest.mark.parametrize("deadline", [0, -1, math.nan, "1", None, True])
def test_a_deadline_that_is_no_time_starts_no_engine(fake_model, deadline):
    with pytest.raises(ConfigError, match="^deadline: "):
        Omni("fake", deadline=deadline)
    assert fake_model.started == []


def test_a_call_inside_a_call_is_refused_and_harms_nobody(omni):
    refused = []

    def again(event):
        with pytest.raises(BadRequestError, match="^generate: "):
            omni.generate("b")
        refused.append(event)

    assert [result.finish_reason for result in omni.generate(["abc", "ab"], on_event=again)] == ["stop", "stop"]
    assert refused
    omni.assert_idle()
    assert omni.generate("abc")[0].finish_reason == "stop"


def test_closed_while_it_speaks(omni):
    with pytest.raises(ClosedError):
        omni.generate("abc", on_event=lambda event: omni.close())


def test_sampling_parameters_for_no_stage(omni):
    with pytest.raises(UnknownStageError, match=r"takler: no such stage \(allowed: thinker, talker, code2wav\)"):
        omni.generate("abc", {"takler": {"seed": 1}})


def test_bad_parameters_of_one_prompt_fail_alone(omni):
    bad, good = omni.generate(["abc", "abc"], [{"seed": -1}, {"seed": 1}])
    assert isinstance(bad.error, BadRequestError) and bad.error.field == "seed"
    assert good.finish_reason == "stop"


def test_unknown_model(fake_model):
    with pytest.raises(UnknownModelError):
        Omni("nothing")
    assert fake_model.started == []


@pytest.mark.covers("SV-2")
@pytest.mark.parametrize(
    "overrides, error, message",
    [
        ({"takler": {}}, UnknownStageError, r"stage_overrides.takler: no such stage \(allowed: thinker, talker, code2wav\)"),
        ({"talker": 3}, ConfigError, "stage_overrides.talker: not a mapping but a int"),
        ([], ConfigError, "stage_overrides: not a mapping but a list"),
    ],
)
def test_bad_overrides_start_no_engine(fake_model, overrides, error, message):
    with pytest.raises(error, match=message):
        Omni("fake", overrides)
    assert fake_model.started == []


@pytest.mark.covers("SV-2")
@pytest.mark.filterwarnings("ignore")  # what torch and vLLM warn of while they are imported
def test_override_names_and_types_start_no_engine(fake_model):
    pytest.importorskip("vllm")
    for arguments, error, message in [
        ({"max_num_seqz": 1}, UnknownOverrideError, r"talker.max_num_seqz: not an engine argument \(allowed: max_num_seqs,"),
        ({"worker_cls": "x"}, UnknownOverrideError, "talker.worker_cls"),
        ({"max_num_seqs": "4"}, ConfigError, "talker.max_num_seqs: '4': input should be a valid integer"),
        ({"enforce_eager": 1}, ConfigError, "talker.enforce_eager: 1: input should be a valid boolean"),
        ({"gpu_memory_utilization": math.nan}, ConfigError, "talker.gpu_memory_utilization: not a finite number"),
    ]:
        with pytest.raises(error, match=message):
            Omni("fake", {"talker": arguments})
    assert fake_model.started == []
    Omni("fake", {"talker": {"max_num_seqs": 4, "max_model_len": None}}).close()
    assert fake_model.stages["talker"].overrides == {"max_num_seqs": 4, "max_model_len": None}


def test_an_engine_that_does_not_start_stops_the_others(fake_model, monkeypatch):
    from stagevox import omni as module

    start = module.start_stage

    def broken(spec, overrides, record):
        if spec.name == "code2wav":
            raise ConfigError("code2wav", "no memory")
        return start(spec, overrides, record)

    monkeypatch.setattr(module, "start_stage", broken)
    with pytest.raises(ConfigError, match="no memory"):
        Omni("fake")
    assert [stage.closed for stage in fake_model.stages.values()] == [True, True, False]


def test_a_blueprint_can_be_given(fake_model):
    with Omni(Blueprint.of("fake")) as one:
        assert one.voices == ("slt", "kal")
    with pytest.raises(ConfigError, match="stage_overrides"):
        Omni(Blueprint.of("fake"), {})


def test_after_close_everything_raises(fake_model):
    one = Omni("fake", record_trace=True)
    assert fake_model.stages["talker"].record is True
    assert one.trace() == {"thinker": [], "talker": [], "code2wav": []}
    one.close()
    one.close()
    assert all(stage.closed for stage in fake_model.stages.values())
    for call in (lambda: one.generate("abc"), one.trace, one.assert_idle):
        with pytest.raises(ClosedError):
            call()


def test_close_goes_on_past_an_engine_that_can_not(fake_model):
    def broken():
        raise RuntimeError("stuck")

    one = Omni("fake")
    fake_model.stages["talker"].close = broken
    one.close()
    assert fake_model.stages["thinker"].closed


def test_without_a_sample_there_is_no_first_one(omni, fake_model):
    fake_model.stages["code2wav"].show = lambda rows: {WAVEFORM: []}
    (result,) = omni.generate("abc")
    assert result.finish_reason == "stop" and result.audio.size == 0
    assert result.first_audio_seconds is None


def test_one_that_is_forgotten_stops_its_engines(fake_model):
    one = Omni("fake")
    del one
    gc.collect()
    assert all(stage.closed for stage in fake_model.stages.values())


def test_one_that_is_left_open_stops_its_engines_at_exit():
    code = """
import pytest, conftest
from stagevox.omni import Omni
model = conftest.make_fake_model(pytest.MonkeyPatch())
for stage in model.stages.values():
    stage.close = lambda name=stage.name: print(name, "closed")
one = Omni("fake")
one.itself = one  # collected last, by when half of the modules are gone
print("exit")
"""
    path = os.pathsep.join([with_src()["PYTHONPATH"], os.path.dirname(__file__)])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=60
    )
    assert done.stdout.split("\n") == ["exit", "code2wav closed", "talker closed", "thinker closed", ""], done.stderr
    assert done.stderr == ""


def test_events_are_shown_as_they_come(omni):
    seen = []
    omni.generate("abc", on_event=seen.append)
    assert isinstance(seen[-1], FinishRequest)
    outputs = [event.output for event in seen if isinstance(event, EmitOutput)]
    assert sum(len(output.multimodal.get(CODES, ())) for output in outputs) == 9


def test_a_listener_that_raises_leaves_nothing(omni):
    def listener(event):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        omni.generate(["abc", "def"], on_event=listener)
    omni.assert_idle()
    np.testing.assert_array_equal(omni.generate("ab")[0].audio, expected(2))


@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav"])
def test_ctrl_c_waits_for_the_step_and_leaves_nothing(omni, fake_model, stage):
    done = []

    def press(stage):
        if stage.steps == 2:
            os.kill(os.getpid(), signal.SIGINT)
            done.append("the step went on")

    fake_model.stages[stage].on_step = press
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        omni.generate(["abc", "def"])
    assert done == ["the step went on"]
    assert signal.getsignal(signal.SIGINT) is handler
    omni.assert_idle()
    np.testing.assert_array_equal(omni.generate("ab")[0].audio, expected(2))


def test_a_second_ctrl_c_does_not_wait(omni, fake_model):
    def press(stage):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not interrupted")

    fake_model.stages["talker"].on_step = press
    with pytest.raises(KeyboardInterrupt):
        omni.generate("abc")
    omni.assert_idle()


def test_somebody_elses_signal_handler_is_left_alone(omni, fake_model):
    seen = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        omni.generate("abc", on_event=lambda event: seen.append(signal.getsignal(signal.SIGINT)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert set(seen) == {signal.SIG_IGN}
