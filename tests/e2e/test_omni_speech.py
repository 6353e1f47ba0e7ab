"""The packaged model through the front door, against the independent oracle: the same words, the same codes, the same sound."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from mini_reference import TinyOmni
from numpy.typing import NDArray

from stagevox import Omni, OmniResult
from stagevox.contract import WAVEFORM
from stagevox.errors import BadParameterError, EmptyTextError, RequestFailedError, UnknownVoiceError, VocabularyError
from stagevox.pipeline.events import ClientEvent, EmitOutput
from support.checkpoints import LM_HEAD, copy_checkpoint, write_rows
from support.margins import least_margin

TEXTS = [
    "the number is thirty eight",
    "sixty two minus five is fifty seven",
    "what is twenty two plus eight",
    "five six five one seven nine",
    "the white cup is open",
    "two seven seven",
    "go to the small pink chair on the left",
    "sixty two minus nineteen equals forty three",
]
"""As long as 43 to 108 frames; the oracle's choices stay clear of ties (asserted)."""

SHORT = ["zero nine five", "where is the apple now", "the white cup is open", "two seven seven"]

SAMPLES_PER_FRAME = 640
TOLERANCE = 1e-5
"""Of one sample; a third of the least step of 16-bit audio. Sums in another order make about 1e-6."""


class Speech(NamedTuple):
    """What the oracle says."""

    codes: torch.Tensor
    audio: NDArray[np.float32]


def say(oracle: TinyOmni, text: str, max_frames: int | None = None) -> Speech:
    """Codes frame by frame, sound from all frames in one go; no choice may be near a tie."""
    codes = oracle.generate(text, max_frames=max_frames)
    assert least_margin(oracle, text, codes) > 1e-3, text
    return Speech(codes, oracle.code2wav(codes).numpy() if len(codes) else np.zeros(0, np.float32))


@pytest.fixture(scope="module")
def expected(oracle: TinyOmni) -> dict[str, Speech]:
    return {text: say(oracle, text) for text in {*TEXTS, *SHORT}}


def assert_says(result: OmniResult, text: str, speech: Speech, finish_reason: str = "stop") -> None:
    assert (result.text, result.finish_reason, result.error) == (text, finish_reason, None)
    np.testing.assert_array_equal(result.codes.reshape(-1, 4), speech.codes.numpy(), err_msg=text)
    assert result.audio.dtype == np.float32 and result.sample_rate == 16_000
    assert result.audio.shape == (SAMPLES_PER_FRAME * len(speech.codes),) == speech.audio.shape
    np.testing.assert_allclose(result.audio, speech.audio, rtol=0, atol=TOLERANCE, err_msg=text)


@pytest.mark.covers("EX-8", "EX-9", "SV-3")
def test_one_by_one(omni: Omni, expected: dict[str, Speech]) -> None:
    for text in TEXTS:
        (result,) = omni.generate(text)
        assert_says(result, text, expected[text])
        assert np.abs(result.audio).max() > 0.1, "silence"


@pytest.mark.covers("EX-8", "EX-9", "EX-15", "SV-3")
def test_concurrently(omni: Omni, expected: dict[str, Speech]) -> None:
    begin = {stage: len(rows) for stage, rows in omni.trace().items()}
    for text, result in zip(TEXTS, omni.generate(TEXTS), strict=True):
        assert_says(result, text, expected[text])
    for stage, at_least in {"thinker": len(TEXTS), "talker": len(TEXTS), "code2wav": 2}.items():
        sizes = Counter(row.step for row in omni.trace()[stage][begin[stage] :])
        assert max(sizes.values()) >= at_least, f"{stage} never had so many requests in one step"
    omni.assert_idle()


@pytest.mark.covers("SV-3", "EX-9")
def test_the_borders_of_streamed_chunks_add_nothing(omni: Omni, expected: dict[str, Speech]) -> None:
    text = TEXTS[-1]
    pieces: list[NDArray[np.float32]] = []

    def listen(event: ClientEvent) -> None:
        if isinstance(event, EmitOutput) and len(event.output.multimodal.get(WAVEFORM, ())):
            pieces.append(np.asarray(event.output.multimodal[WAVEFORM]))

    (result,) = omni.generate(text, on_event=listen)
    assert len(pieces) >= 3, "not streamed"
    assert all(len(piece) % SAMPLES_PER_FRAME == 0 for piece in pieces)
    np.testing.assert_array_equal(np.concatenate(pieces), result.audio)
    assert_says(result, text, expected[text])
    # At each border the step from one sample to the next is the one that sound decoded in one go has.
    for border in np.cumsum([len(piece) for piece in pieces])[:-1]:
        steps = [np.diff(audio[border - 8 : border + 8]) for audio in (result.audio, expected[text].audio)]
        np.testing.assert_allclose(*steps, rtol=0, atol=2 * TOLERANCE)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ("the purple xylophone is ready", VocabularyError),
        ("", EmptyTextError),
        (" \t\n", EmptyTextError),
        ("\N{GRINNING FACE}", EmptyTextError),
        ({"text": "hello", "voice": "SLT"}, UnknownVoiceError),
        ({"text": "hello", "voice": ""}, UnknownVoiceError),
        ({"voice": "slt"}, BadParameterError),
    ],
    ids=["unknown word", "empty", "blank", "emoji", "voice in capitals", "no voice", "no text"],
)
def test_a_bad_prompt_among_good_ones_fails_alone(omni: Omni, expected: dict[str, Speech], bad: object, error: type) -> None:
    first, failed, last = omni.generate([SHORT[0], bad, SHORT[1]])  # type: ignore[list-item]
    assert type(failed.error) is error and failed.finish_reason == "error"
    assert (failed.text, failed.codes.size, failed.audio.size) == ("", 0, 0)
    assert_says(first, SHORT[0], expected[SHORT[0]])
    assert_says(last, SHORT[1], expected[SHORT[1]])
    omni.assert_idle()


# Checkpoints with a fault.


def frame_cap(oracle: TinyOmni, text: str) -> int:
    """The longest that a text may take: 3 frames a piece and 40 to spare, and what the Talker's context holds."""
    pieces = len(oracle.tokenize(text)) - 1
    return min(3 * pieces + 40, 170)


@pytest.fixture(scope="module")
def endless(oracle: TinyOmni, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose Talker never ends: the logit of EOS is 0, and some code's always more."""
    folder = copy_checkpoint(tmp_path_factory.mktemp("endless") / "mini")
    write_rows(folder, "talker", LM_HEAD, oracle.c_eos, torch.zeros(192))
    return folder


@pytest.fixture(scope="module")
def murmur(oracle: TinyOmni, endless: Path) -> dict[str, Speech]:
    """What the oracle says if it may not end, up to the cap."""
    model = TinyOmni(str(endless))
    said = {text: say(model, text, max_frames=frame_cap(oracle, text)) for text in SHORT}
    for text, speech in said.items():
        assert len(speech.codes) == frame_cap(oracle, text), "it did end"
    assert len({len(speech.codes) for speech in said.values()}) > 1, "the cap has to follow from the text"
    return said


def test_a_talker_that_never_ends_is_cut_where_the_text_says(endless: Path, murmur: dict[str, Speech]) -> None:
    with Omni(str(endless)) as omni:
        for text, result in zip(SHORT, omni.generate(SHORT), strict=True):
            assert_says(result, text, murmur[text], "length")
        omni.assert_idle()


def test_one_that_does_not_end_leaves_the_others_alone(
    omni: Omni, murmur: dict[str, Speech], expected: dict[str, Speech]
) -> None:
    """One request is kept from ending by a ``min_tokens`` far above what its text may take."""
    hanging = SHORT[1]
    params = [{"min_tokens": 170} if text == hanging else None for text in SHORT]
    for text, result in zip(SHORT, omni.generate(SHORT, params), strict=True):
        if text == hanging:
            assert_says(result, text, murmur[text], "length")
        else:
            assert_says(result, text, expected[text])
    omni.assert_idle()


@torch.no_grad()
def hidden_states(oracle: TinyOmni, text: str, codes: torch.Tensor) -> torch.Tensor:
    """What the Talker's head sees, ``[frames + 1, H]``."""
    ids = oracle.tokenize(text)
    return oracle.talker(torch.cat([oracle.prompt(ids), oracle.step_inputs(ids, codes, 0)]), oracle.new_kv())[oracle.P + 1 :]


@pytest.fixture(scope="module")
def mute(oracle: TinyOmni, expected: dict[str, Speech], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose Talker has nothing to say to ``SHORT[0]``.

    The row of EOS is moved along a direction that the first hidden state of this text has, and those of the other texts
    hardly have.
    """
    silent, *others = SHORT
    seen = torch.cat([hidden_states(oracle, text, expected[text].codes) for text in others])
    first = hidden_states(oracle, silent, expected[silent].codes)[0]
    spread = seen.T @ seen / len(seen)
    direction = torch.linalg.solve(spread + 1e-3 * spread.diagonal().mean() * torch.eye(len(spread)), first)
    folder = copy_checkpoint(tmp_path_factory.mktemp("mute") / "mini")
    row = oracle.w[LM_HEAD][oracle.c_eos] + 20 * direction / (direction @ first)
    write_rows(folder, "talker", LM_HEAD, oracle.c_eos, row)
    model = TinyOmni(str(folder))
    assert len(say(model, silent).codes) == 0
    for text in others:
        assert torch.equal(say(model, text).codes, expected[text].codes)
    return folder


def test_no_frame_at_all_is_a_clean_end(mute: Path, expected: dict[str, Speech]) -> None:
    nothing = Speech(torch.zeros(0, 4, dtype=torch.long), np.zeros(0, np.float32))
    with Omni(str(mute)) as omni:
        for _ in range(2):
            silent, *others = omni.generate(SHORT)
            assert_says(silent, SHORT[0], nothing)
            assert silent.first_audio_seconds is None
            for text, result in zip(SHORT[1:], others, strict=True):
                assert_says(result, text, expected[text])
            omni.assert_idle()
        (silent,) = omni.generate(SHORT[0])
        assert_says(silent, SHORT[0], nothing)


@pytest.fixture(scope="module")
def poisoned(expected: dict[str, Speech], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose Code2Wav makes NaN of a code that only ``SHORT[0]`` uses, in the middle of its speech."""
    mine, *others = (set(expected[text].codes[:, 0].tolist()) for text in SHORT)
    code = next(code for code in expected[SHORT[0]].codes[20:, 0].tolist() if code not in set.union(*others))
    assert code in mine
    folder = copy_checkpoint(tmp_path_factory.mktemp("poisoned") / "mini")
    write_rows(folder, "code2wav", "code2wav.embedding.0", code, torch.full((256,), torch.nan))
    return folder


@pytest.mark.covers("EX-15")
def test_samples_that_are_no_numbers_fail_their_request_alone(poisoned: Path, expected: dict[str, Speech]) -> None:
    with Omni(str(poisoned)) as omni:
        for order in (SHORT, SHORT[::-1]):
            for text, result in zip(order, omni.generate(order), strict=True):
                if text == SHORT[0]:
                    assert isinstance(result.error, RequestFailedError) and "not finite" in str(result.error)
                    assert result.finish_reason == "error" and np.isfinite(result.audio).all()
                    sound = expected[text].audio[: len(result.audio)]
                    assert 0 < len(sound) < len(expected[text].audio), "what came before the fault is kept"
                    np.testing.assert_allclose(result.audio, sound, rtol=0, atol=TOLERANCE)
                else:
                    assert_says(result, text, expected[text])
            omni.assert_idle()
