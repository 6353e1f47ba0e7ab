"""Training items of the Talker: whole utterances, and splices of word spans from several of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from corpus import DIGITS
from talker_model import CODEC_EOS, GROUPS, PROMPT, PROMPT_ROWS, TextTable
from torch import Tensor

MAX_SPLICE_FRAMES = 120
MAX_SPLICE_WORDS = 10


@dataclass(frozen=True)
class Item:
    """``pieces[f]`` is the index of the text piece that frame f speaks."""

    codes: Tensor
    rows: Tensor
    pieces: Tensor

    @property
    def positions(self) -> int:
        return PROMPT + len(self.codes)


class Span(NamedTuple):
    """An utterance that can be cut between words: word j has pieces ``pieces_at[j]:`` and frames ``frames_at[j]:``."""

    words: list[str]
    word_pieces: list[list[int]]
    pieces_at: list[int]
    frames_at: list[int]
    pieces: Tensor
    codes: Tensor


class Batch(NamedTuple):
    """Padded: ``rows [B, 5 + T]``, ``codes [B, T, 4]``, ``target [B, T + 1]`` (-100 is padding), ``pieces``, ``real [B, T]``."""

    rows: Tensor
    codes: Tensor
    target: Tensor
    pieces: Tensor
    real: Tensor


class Sampler:
    """Draws items and cuts them into batches."""

    def __init__(self, rows: Sequence[dict[str, Any]], table: TextTable) -> None:
        self.table = table
        self.items = [self.item(table.encode(r["text"]), r["codes"], r["pieces"]) for r in rows]
        self.spans = [span for r in rows if (span := self._span(r))]
        self.digit_spans = [span for span in self.spans if len(set(span.words) & set(DIGITS)) >= 2]

    def item(self, ids: list[int], codes: Tensor, pieces: Tensor) -> Item:
        return Item(codes.long(), self.table.rows(ids, PROMPT_ROWS + 1 + len(codes)), pieces.long())

    def _span(self, row: dict[str, Any]) -> Span | None:
        words, owner = row["text"].split(), row["words"].long()
        if any((owner == j).sum() == 0 for j in range(len(words))):
            return None
        frames_at = [0] + [int((owner == j).int().argmax()) for j in range(1, len(words))] + [len(owner)]
        word_pieces = [self.table.words[w] for w in words]
        pieces_at = [0]
        for pieces in word_pieces:
            pieces_at.append(pieces_at[-1] + len(pieces))
        return Span(words, word_pieces, pieces_at, frames_at, row["pieces"].long(), row["codes"])

    def splice(self) -> Item | None:
        """Spans of two to four utterances, joined at word boundaries; only the outer silences are kept."""
        count = random.choice([2, 2, 2, 3, 3, 4])
        pool = self.digit_spans if random.random() < 0.25 and self.digit_spans else self.spans
        ids: list[int] = []
        codes: list[Tensor] = []
        pieces: list[Tensor] = []
        words = 0
        for k in range(count):
            span = random.choice(pool)
            length = min(len(span.words), random.choice([1, 1, 2, 2, 3] if count > 2 else [1, 2, 3, 4]))
            first = {0: 0, count - 1: len(span.words) - length}.get(k)
            if first is None:
                first = random.randrange(len(span.words) - length + 1)
            last = first + length
            low, high = span.frames_at[first], span.frames_at[last]
            if last == len(span.words) and k < count - 1:  # leave the trailing silence out
                high = low + int((span.pieces[low:] < span.pieces_at[last]).nonzero()[-1]) + 1
            codes.append(span.codes[low:high])
            pieces.append(span.pieces[low:high] - span.pieces_at[first] + len(ids))
            ids += [p for word in span.word_pieces[first:last] for p in word]
            words += length
        joined = torch.cat(codes)
        if len(joined) > MAX_SPLICE_FRAMES or words > MAX_SPLICE_WORDS:
            return None
        return self.item([*ids, self.table.eos_id], joined, torch.cat(pieces).clamp(0, len(ids)))

    def epoch(self, splice_share: float, size: int = 800) -> list[Item]:
        """``size`` items, some of them splices."""
        out: list[Item] = []
        while len(out) < size * splice_share:
            if item := self.splice():
                out.append(item)
        whole = min(len(self.items), int(size * (1 - splice_share)))
        return out + [self.items[i] for i in random.sample(range(len(self.items)), whole)]

    def collate(self, items: Sequence[Item]) -> Batch:
        count, width = len(items), max(len(x.codes) for x in items)
        batch = Batch(
            rows=torch.full((count, PROMPT_ROWS + 1 + width), self.table.pad_id),
            codes=torch.zeros(count, width, GROUPS, dtype=torch.long),
            target=torch.full((count, width + 1), -100),
            pieces=torch.full((count, width), -1),
            real=torch.zeros(count, width, dtype=torch.bool),
        )
        for i, item in enumerate(items):
            n = len(item.codes)
            batch.rows[i, : len(item.rows)] = item.rows
            batch.codes[i, :n] = item.codes
            batch.target[i, :n] = item.codes[:, 0]
            batch.target[i, n] = CODEC_EOS
            batch.pieces[i, :n] = item.pieces
            batch.real[i, :n] = True
        return batch


def batches(items: Sequence[Item], positions: int) -> list[list[Item]]:
    """Items of similar length together, about ``positions`` in a batch, in random order."""
    order = sorted(items, key=lambda x: x.positions + random.random() * 5)
    out: list[list[Item]] = [[]]
    for item in order:
        if out[-1] and (len(out[-1]) + 1) * item.positions > positions:
            out.append([])
        out[-1].append(item)
    random.shuffle(out)
    return out
