"""Qwen3-Omni against its reference: text ids, codes of all groups, samples."""

import numpy as np
import pytest
import torch
from vllm.distributed import parallel_state

from oracles.qwen3_omni import CASES, Reference, user
from stagevox.bench.media import film, picture, tone
from stagevox.errors import BadMediaError, TextTooLongError
from stagevox.models.qwen3_omni.topology import topology
from stagevox.omni import Omni
from support.families import LEAST_MARGIN, omni
from support.qwen3_omni import IM_END, WAVE_TOLERANCE, ask, check_codes, check_waveform, expected_ids, params, prompt

FAMILY = "qwen3_omni"
SPOKEN = [name for name in CASES if name not in ("one_token", "silent")]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Passing `repetition_penalty` with `inputs_embeds`:UserWarning"),
]


@pytest.fixture(scope="module")
def model(checkpoint):
    overrides = {
        "thinker": {"max_model_len": 256, "limit_mm_per_prompt": {"image": 2, "audio": 1, "video": 1}},
        "talker": {"max_model_len": 256},
        "code2wav": {"max_model_len": 128},
    }
    with omni(topology(checkpoint(FAMILY)), overrides) as made:
        yield made


@pytest.fixture(scope="module")
def oracle(golden):
    return golden(FAMILY)


def test_the_reference_is_clear_of_ties(oracle):
    assert set(oracle.cases) == set(CASES)
    for name, case in oracle.cases.items():
        assert min(case["margins"].values()) > LEAST_MARGIN, name
    groups = np.concatenate([np.array(case["codes"]) for case in oracle.cases.values() if case["codes"]])
    assert all(len(set(group)) > 40 for group in groups.T), "codes that hardly vary are no evidence"


def test_all_at_once(model, oracle):
    """14 requests in 8 slots: texts of 9 to 153 positions, three speakers, pictures, a sound and a film among them."""
    seen = {}

    def note(event):
        if getattr(event, "stage", None) == "thinker":
            seen.setdefault(event.output.req_id, []).extend(event.output.new_token_ids)

    results = ask(model, oracle, list(CASES), note)
    for name, ids in zip(CASES, (seen[req_id] for req_id in sorted(seen, key=lambda it: int(it.split("-")[1]))), strict=True):
        assert ids == expected_ids(oracle, name), name
    check_codes(oracle, results, SPOKEN)
    check_waveform(oracle, results, SPOKEN)


@pytest.mark.parametrize("name", ["short", "mixed"])
def test_alone(model, oracle, name):
    results = ask(model, oracle, [name])
    check_codes(oracle, results, [name])
    check_waveform(oracle, results, [name])


def test_beside_a_model_without_experts(checkpoint, oracle, monkeypatch):
    """Engines of a process share vLLM's process groups, and the first one here has no use for that of experts."""
    with Omni("mini") as mini:
        monkeypatch.setattr(parallel_state, "_EP", None)
        room = {stage: {"max_model_len": 256} for stage in ("thinker", "talker")}
        with omni(topology(checkpoint(FAMILY)), {**room, "code2wav": {"max_model_len": 128}}) as model:
            assert parallel_state._EP is not None
            check_codes(oracle, ask(model, oracle, ["short"]), ["short"])
        assert len(mini.generate("hello")[0].codes)


def test_a_talker_that_ends_at_once_says_nothing(model, oracle):
    result = ask(model, oracle, ["silent"])["silent"]
    assert result.finish_reason == "stop" and result.error is None and result.text
    assert len(result.codes) == 0 and len(result.audio) == 0


def test_a_reply_of_one_token_is_nothing_to_speak(model, oracle):
    """The reference fails on it."""
    result = ask(model, oracle, ["one_token"])["one_token"]
    assert result.finish_reason == "stop" and result.error is None and result.text == ""
    assert len(result.codes) == 0 and len(result.audio) == 0


def test_every_token_of_a_cut_reply_is_spoken(model, oracle):
    for count in (4, 5, 6):
        name = f"cut_{count + 1}"
        assert params(oracle, name)["thinker"]["max_tokens"] == count
        result = ask(model, oracle, [name])[name]
        assert result.finish_reason == "length"
        check_codes(oracle, {name: result}, [name])


def test_speakers_differ(model, oracle):
    spoken = {}
    for voice in ("Ethan", "chelsie", "AIDEN"):
        (result,) = model.generate([prompt(CASES["short"]) | {"voice": voice}], params(oracle, "short"))
        spoken[voice] = result.codes[:5].tolist()
    assert len({str(codes) for codes in spoken.values()}) == 3
    assert spoken["Ethan"] == oracle.cases["short"]["codes"][:5]


@pytest.fixture(scope="module")
def reference(checkpoint):
    """The library's model, live: also for prompts that no file has the answers of."""
    return Reference(checkpoint(FAMILY))


@pytest.mark.parametrize("name", ["turns", "mixed"])
def test_the_golden_values_are_todays(reference, oracle, name):
    reply = reference.reply(CASES[name])
    assert reply.text_ids == oracle.cases[name]["text_ids"]
    assert reply.codes.tolist() == oracle.cases[name]["codes"]
    np.testing.assert_allclose(reply.waveform[:: oracle.facts["stride"]], oracle.waveforms[name], atol=WAVE_TOLERANCE, rtol=0)


def test_every_sample_is_the_references(reference, model, oracle):
    reply = reference.reply(CASES["goes_on"])
    result = ask(model, oracle, ["goes_on"])["goes_on"]
    torch.testing.assert_close(torch.from_numpy(result.audio), reply.waveform, atol=WAVE_TOLERANCE, rtol=0)


@pytest.mark.covers("RT-9")
def test_another_picture_is_another_answer(reference, model):
    """Same words, same size: only the pixels differ. The prefix cache is on, and hit where the picture is the same."""
    words = user("jumps over the lazy dog", image=1)
    asked = {shade: CASES["image"]._replace(messages=words, images=((192, 192, shade),)) for shade in (0, 10)}
    replies = {shade: reference.reply(case) for shade, case in asked.items()}
    assert min(min(reply.margins.values()) for reply in replies.values()) > LEAST_MARGIN
    assert replies[0].codes.tolist() != replies[10].codes.tolist()
    hits = []
    for shade in (0, 10, 0, 10):
        case, reply = asked[shade], replies[shade]
        tokens = len(reply.text_ids) - (reply.text_ids[-1] != IM_END)
        before = len(model.trace()["thinker"])
        wanted = {"temperature": 0.0, "max_tokens": case.codes - 1, "thinker": {"temperature": 0.0, "max_tokens": tokens}}
        (result,) = model.generate([prompt(case)], wanted)
        assert result.codes.tolist() == reply.codes.tolist()
        hits.append(model.trace()["thinker"][before].num_computed)
    assert hits == [0, 0, 32, 32]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"audios": [tone(0.001, 300)]}, "audio: can't be read"),  # shorter than one row of features
        ({"images": [picture(400, 1)]}, "image: can't be read"),  # a stripe
        ({"videos": [film(1, 32, 32)] * 2}, "video: can't be read"),  # more than this engine takes
    ],
    ids=["sound", "picture", "films"],
)
def test_media_that_the_processor_refuses_fail_their_request_alone(model, oracle, fields, said):
    """F44: the request ends by the name of what is wrong; its neighbours don't notice."""
    asked = [{"text": "hello", **fields}, prompt(CASES["short"])]
    bad, good = model.generate(asked, [params(oracle, "short")] * 2)
    assert isinstance(bad.error, BadMediaError) and said in str(bad.error) and "\n" not in str(bad.error)
    check_codes(oracle, {"short": good}, ["short"])
    model.assert_idle()


def test_a_prompt_longer_than_the_context_is_refused(model, oracle):
    bad, good = model.generate([{"text": "hello " * 300}, prompt(CASES["short"])], [params(oracle, "short")] * 2)
    assert isinstance(bad.error, TextTooLongError) and "stage thinker" in str(bad.error)
    check_codes(oracle, {"short": good}, ["short"])
    model.assert_idle()
