"""The teacher's utterances, and which word every codec frame belongs to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from features import SAMPLE_RATE, SAMPLES_PER_FRAME
from torch import Tensor

LEADING, TRAILING = -1, -2  # the word index of silence before the first word and after the last


class Phone(NamedTuple):
    """``word`` is -1 in a pause."""

    name: str
    end: float
    word: int


@dataclass(frozen=True)
class Utterance:
    """One line of the synthesiser's output."""

    text: str
    wave: np.ndarray
    phones: list[Phone]

    @property
    def words(self) -> list[str]:
        return self.text.split(" ")

    @property
    def frames(self) -> int:
        return math.ceil(len(self.wave) / SAMPLES_PER_FRAME)


@dataclass(frozen=True)
class Alignment:
    """Per frame: the phone, the word (or ``LEADING``, ``TRAILING``) and how far into the word.

    Per word: its start and end in seconds.
    """

    phone: list[str]
    word: np.ndarray
    position: np.ndarray
    spans: dict[int, tuple[float, float]]

    def complete(self, utterance: Utterance) -> bool:
        """Did the teacher speak as many words as were written?"""
        return max(self.spans) == len(utterance.words) - 1

    def pieces(self, word_pieces: list[list[int]]) -> Tensor:
        """The text piece that each frame speaks; the count of pieces after the last word."""
        starts = np.r_[0, np.cumsum([len(p) for p in word_pieces])]
        out = []
        for word, position in zip(self.word, self.position, strict=True):
            if word == LEADING:
                out.append(0)
            elif word == TRAILING:
                out.append(int(starts[-1]))
            else:
                out.append(int(starts[word] + int(position * len(word_pieces[word]))))
        return torch.tensor(out, dtype=torch.int16)


def load(prefix: Path) -> list[Utterance]:
    """Read ``prefix.pcm`` and ``prefix.txt``."""
    pcm = np.fromfile(prefix.with_suffix(".pcm"), np.int16)
    out, at = [], 0
    for line in prefix.with_suffix(".txt").read_text().splitlines():
        samples, text, segments = line.split("\t")
        fields = (segment.rsplit(":", 2) for segment in segments.split())
        phones = [Phone(name, float(end), int(word)) for name, end, word in fields]
        out.append(Utterance(text, pcm[at : at + int(samples)], phones))
        at += int(samples)
    return out


def align(utterance: Utterance) -> Alignment:
    """A frame belongs to the phone at its middle; a pause belongs to the word that follows it."""
    phones, frames = utterance.phones, utterance.frames
    ends = np.array([p.end for p in phones])
    starts = np.r_[0, ends[:-1]]
    middle = (np.arange(frames) + 0.5) * SAMPLES_PER_FRAME / SAMPLE_RATE
    phone_at = np.minimum(np.searchsorted(ends, middle), len(ends) - 1)
    spans: dict[int, tuple[float, float]] = {}
    for phone, start in zip(phones, starts, strict=True):
        if phone.word >= 0:
            spans[phone.word] = (spans[phone.word][0] if phone.word in spans else start, phone.end)
    word, position = np.zeros(frames, int), np.zeros(frames)
    for k in range(frames):
        current = phones[phone_at[k]].word
        if current >= 0:
            start, end = spans[current]
            word[k], position[k] = current, min(0.999, max(0, (middle[k] - start) / (end - start)))
            continue
        following = [j for j in spans if spans[j][0] >= middle[k] - 0.03]
        word[k] = LEADING if len(following) == len(spans) else min(following, default=TRAILING)
    return Alignment([phones[i].name for i in phone_at], word, position, spans)
