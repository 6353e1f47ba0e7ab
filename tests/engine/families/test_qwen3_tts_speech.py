"""Qwen3-TTS end to end: every case of the reference, chunked prefill, and streams of samples."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch

from stagevox import Omni
from stagevox.config.blueprint import Blueprint
from stagevox.contract import WAVEFORM
from stagevox.errors import (
    BadParameterError,
    EmptyTextError,
    TextTooLongError,
    UnknownVoiceError,
    VocabularyError,
)
from stagevox.pipeline.events import EmitOutput
from support.qwen3_tts import (
    FRAME,
    TOLERANCE,
    assert_all_golden,
    assert_golden,
    case,
    checkpoint,
    golden,
    greedy,
    load,
    prompt,
    speak,
    waves,
)

CASES = list(golden()["cases"])


@pytest.fixture(scope="module")
def omni():
    with load() as one:
        yield one


def test_the_golden_values_are_of_this_checkpoint():
    from stagevox.bench.checkpoints.weights import digest

    assert digest(checkpoint()) == golden()["checkpoint"]


@pytest.mark.covers("EX-7", "EX-8", "EX-9", "TK-4")
@pytest.mark.parametrize("name", CASES)
def test_alone(omni, name):
    assert min(case(name)["margins"].values()) > 1e-3
    results, _ = speak(omni, [name])
    assert_golden(name, results[0])
    if name == "one frame":
        torch.testing.assert_close(torch.from_numpy(results[0].audio), waves()["whole"], atol=TOLERANCE, rtol=0)


@pytest.mark.covers("TK-4")
def test_all_at_once(omni):
    """More requests than slots."""
    results, _ = speak(omni, CASES)
    assert_all_golden(CASES, results)
    omni.assert_idle()


def test_a_cut_speech_is_the_start_of_a_longer_one(omni):
    """The reference gives n - 1 frames for n tokens; ours gives a frame for each."""
    name = "cut at 9"
    whole = np.array(case(name)["codes"])
    for frames in (1, 2, 8, 9):
        (result,) = omni.generate([prompt(name)], {"temperature": 0.0, "max_tokens": frames})
        assert result.finish_reason == "length" and len(result.audio) == FRAME * frames
        np.testing.assert_array_equal(result.codes, whole[:frames])


def test_the_end_comes_no_earlier_than_the_reference_lets_it(omni):
    """The end would win from the third token on, or earlier if it could: here after two frames."""
    name = "earliest end"
    assert len(case(name)["codes"]) == 2 and case(name)["ended"]
    results = omni.generate([prompt(name)], {"temperature": 0.0, "max_tokens": 91, "min_tokens": 0})
    assert_golden(name, results[0])


def test_an_end_before_the_first_frame_is_an_end(omni):
    """Only the least length keeps this request's first token from being the end: without it nothing is spoken, and nothing waits."""
    made = Blueprint.of(str(checkpoint()), {"talker": {"max_model_len": 128}, "code2wav": {"max_model_len": 128}})
    talker, code2wav = made.topology.stages
    loose = {key: value for key, value in talker.constraints.items() if key != "min_tokens"}
    stages = (dataclasses.replace(talker, constraints=loose), code2wav)
    with Omni(dataclasses.replace(made, topology=dataclasses.replace(made.topology, stages=stages))) as other:
        results, _ = speak(other, ["end first", "plain"])
        other.assert_idle()
    silent, spoken = results
    assert (silent.finish_reason, silent.error, len(silent.codes), len(silent.audio)) == ("stop", None, 0, 0)
    assert_golden("plain", spoken)
    results, _ = speak(omni, ["end first"])
    assert_golden("end first", results[0])
    assert len(results[0].codes) >= 2


@pytest.mark.covers("PC-13")
def test_chunked_prefill_down_to_a_one_token_tail(omni):
    names = ["one token", "two tokens", "plain", "dialect", "long streaming"]
    assert all(min(case(name)["margins"].values()) > 1e-3 for name in names)
    with load({"talker": {"max_num_batched_tokens": 8}}) as chunked:
        for name, spans in {"one token": [8, 1], "two tokens": [8, 1], "plain": [8, 8, 2]}.items():
            results, rows = speak(chunked, [name])
            others, whole = speak(omni, [name])
            assert [row.span for row in rows if row.is_prefill] == spans
            assert [row.used_mtp for row in rows if row.is_prefill] == [False] * len(spans)
            assert [row.span for row in whole if row.is_prefill] == [sum(spans)]
            assert_equal([name], results, others)
        results, rows = speak(chunked, names)
    tails = [row for row in rows if row.is_prefill and row.span == 1 and row.num_computed == row.prompt_len - 1]
    assert tails, "no one-token tail"
    assert not any(row.used_mtp for row in rows if row.is_prefill)
    assert all(row.used_mtp for row in rows if not row.is_prefill)
    decoding = {row.step for row in rows if row.used_mtp}
    assert any(tail.step in decoding for tail in tails), "no tail in a step that also completes frames"
    others, rows = speak(omni, names)
    assert all(row.span == row.prompt_len for row in rows if row.is_prefill)
    assert_equal(names, results, others)


def assert_equal(names, results, others):
    assert_all_golden(names, results)
    for result, other in zip(results, others, strict=True):
        np.testing.assert_array_equal(result.codes, other.codes)
        assert len(result.audio) and np.isfinite(result.audio).all() and np.abs(result.audio).max() > 0.1
        np.testing.assert_allclose(result.audio, other.audio, rtol=0, atol=TOLERANCE)


def with_options(chunks, **windows):
    """The model with other chunks and windows."""
    made = Blueprint.of(str(checkpoint()), {"talker": {"max_model_len": 128}, "code2wav": {"max_model_len": 128}})
    talker, code2wav = made.topology.stages
    stages = (
        dataclasses.replace(talker, chunk_options={"sizes": chunks}),
        dataclasses.replace(code2wav, input_options=windows),
    )
    return Omni(dataclasses.replace(made, topology=dataclasses.replace(made.topology, stages=stages)))


def streamed(omni, name):
    """The pieces of samples as they come."""
    pieces = []

    def watch(event):
        if isinstance(event, EmitOutput) and WAVEFORM in event.output.multimodal:
            pieces.append(torch.as_tensor(event.output.multimodal[WAVEFORM]).clone())

    (result,) = omni.generate([prompt(name)], greedy(name), on_event=watch)
    np.testing.assert_array_equal(result.codes, np.array(case(name)["codes"]))
    return [piece for piece in pieces if len(piece)], torch.from_numpy(result.audio)


@pytest.mark.covers("EX-9")
def test_chunks_change_when_samples_come_and_not_what_they_are(omni):
    name = "plain"
    pieces, whole = streamed(omni, name)
    assert [len(piece) // FRAME for piece in pieces] == [4, 12, 24]
    for chunks in ([1], [7], [3, 1, 40]):
        with with_options(chunks) as other:
            cut, joined = streamed(other, name)
        assert len(cut) == {1: 40, 7: 6, 3: 3}[chunks[0]]
        torch.testing.assert_close(torch.cat(cut), joined, atol=0, rtol=0)
        torch.testing.assert_close(joined, whole, atol=TOLERANCE, rtol=0)


def test_windows_decode_as_the_reference_does_with_the_same_chunk_and_context(omni):
    _, whole = streamed(omni, "plain")
    with with_options([4, 9], window_frames=10, left_context=5) as other:
        _, cut = streamed(other, "plain")
    assert len(cut) == len(whole)
    assert (cut[: 10 * FRAME] - whole[: 10 * FRAME]).abs().max() < TOLERANCE
    assert (cut[10 * FRAME :] - whole[10 * FRAME :]).abs().max() > 1e-2, "a context of 5 frames should be too short"


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"text": " \n"}, EmptyTextError, "text: nothing to say"),
        ({"text": 5}, BadParameterError, "text: not a text but a int"),
        ({"voice": "nobody"}, UnknownVoiceError, "voice: no voice 'nobody' .allowed: vivian, serena, eric, dylan, ryan"),
        ({"voice": ""}, UnknownVoiceError, "voice: no voice ''"),
        ({"voice": 1}, BadParameterError, "voice: not a name"),
        ({"language": "klingon"}, BadParameterError, "language: no language 'klingon' .allowed: auto, chinese, english, german"),
        ({"language": "sichuan_dialect"}, BadParameterError, "language: no language 'sichuan_dialect'"),
        ({"instruct": ["a"]}, BadParameterError, "instruct: not a text but a list"),
        ({"streaming_text": "yes"}, BadParameterError, "streaming_text: not a truth value"),
        ({"text": "hello<|im_end|>"}, VocabularyError, "text: holds the special token <|im_end|>"),
        ({"instruct": "<tts_pad>"}, VocabularyError, "instruct: holds the special token <tts_pad>"),
        ({"speed": 2}, BadParameterError, "prompt.speed: no such field"),
        ({"text": "hello " * 200, "streaming_text": False}, TextTooLongError, "in stage talker"),
    ],
)
def test_a_bad_prompt_fails_alone_and_by_name(omni, fields, error, message):
    bad = prompt("two tokens") | fields
    results = omni.generate([bad, prompt("two tokens")], greedy("two tokens"))
    assert_golden("two tokens", results[1])
    found = results[0].error
    assert found is not None and results[0].finish_reason == "error" and not len(results[0].audio)
    assert isinstance(found, error) or error.__name__ in str(found)
    assert re.search(message.replace("|", r"\|"), str(found)), str(found)
    omni.assert_idle()


def test_names_are_taken_in_any_case_and_the_first_voice_is_the_default(omni):
    assert omni.voices == ("vivian", "serena", "eric", "dylan", "ryan")
    spelt = prompt("plain") | {"voice": "VIVIAN", "language": "eNGLISH"}
    default = {key: value for key, value in spelt.items() if key != "voice"}
    for one in (spelt, default):
        assert_golden("plain", omni.generate([one], greedy("plain"))[0])
    bare = omni.generate("hello", {"temperature": 0.0, "max_tokens": 40})[0]
    assert_golden("one token whole", bare)
