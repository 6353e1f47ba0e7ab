"""Examples for the Thinker, and which of them are never trained on.

Every 25th text, by a checksum of its normal form, is held out of training for ever, and so are the prompts of the voice.
Words and numbers on their own (one or two tokens) are always trained.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from atoms import DATE_FORMS, Atom, clock, date, number, ordinal, symbol, word
from grammar import CATEGORIES, random_words

from stagevox.models.mini.text import MONTHS, SHORT_NAMES, ThinkerTokenizer, normalise

PROMPTS = Path(__file__).resolve().parents[3] / "tests" / "data" / "voice_prompts.json"
HELD_OUT_EVERY = 25
TOKENIZER = ThinkerTokenizer(os.environ.get("THINKER_TOKENS"))  # unset: the package's table


@dataclass(frozen=True)
class Example:
    """``ids`` are the input tokens between bos and sep; ``sources[i]`` indexes ``ids``."""

    category: str
    written: str
    spoken: tuple[str, ...]
    ids: tuple[int, ...]
    sources: tuple[int, ...]


@cache
def _tokens(written: str) -> tuple[int, ...]:
    return tuple(i for chunk in written.split() for i in TOKENIZER.encode_chunk(chunk))


def _clash(before: Atom, after: Atom) -> bool:
    """Would the two, side by side, be read as one date (or as no date at all)?"""
    last, first = before.written.split()[-1], after.written.split()[0]
    if first in MONTHS and re.fullmatch("[0-9]+([a-z]+)?", last):
        return True
    if last in MONTHS and re.fullmatch("0[0-9]", first):
        return True
    return last == "the" and " of " in after.written


def build(category: str, atoms: list[Atom]) -> Example | None:
    """None if two atoms clash or the text is longer than the border allows."""
    if any(_clash(a, b) for a, b in itertools.pairwise(atoms)):
        return None
    ids: list[int] = []
    sources: list[int] = []
    for atom in atoms:
        sources += [len(ids) + i for i in atom.sources]
        ids += _tokens(atom.written)
    spoken = tuple(w for atom in atoms for w in atom.spoken)
    bound = sum(TOKENIZER.pieces[i] for i in ids)
    assert bound >= sum(TOKENIZER.pieces[TOKENIZER.word_ids[w]] for w in spoken)
    if len(ids) > TOKENIZER.max_input_tokens or bound > TOKENIZER.max_pieces:
        return None
    return Example(category, " ".join(a.written for a in atoms), spoken, tuple(ids), tuple(sources))


@cache
def _reserved() -> frozenset[str]:
    return frozenset(normalise(p["text"]) for p in json.loads(PROMPTS.read_text())["prompts"])


def held_out(example: Example) -> bool:
    """Never trained on."""
    if example.written in _reserved():
        return True
    return len(example.ids) > 2 and zlib.crc32(example.written.encode()) % HELD_OUT_EVERY == 0


def examples(seed: int, held: bool) -> Iterator[Example]:
    """An endless stream from one side of the split."""
    r = random.Random(seed)
    names = list(CATEGORIES)
    weights = [w for _, w in CATEGORIES.values()]
    while True:
        name = r.choices(names, weights)[0]
        example = build(name, CATEGORIES[name][0](r))
        if example and held_out(example) == held:
            yield example


def held_out_set(per_category: int, seed: int = 1) -> list[Example]:
    """The same number of distinct held-out examples of every category."""
    r = random.Random(seed)
    found: dict[str, Example] = {}
    for name, (make, _) in CATEGORIES.items():
        goal = len(found) + per_category
        while len(found) < goal:
            example = build(name, make(r))
            if example and held_out(example) and example.written not in _reserved():
                found.setdefault(example.written, example)
    return list(found.values())


def word_strings(per_length: int) -> list[Example]:
    """Held-out random strings of 1..16 vocabulary words (single words are trained)."""
    r = random.Random(3)
    out = []
    for length in range(1, 17):
        rows: list[Example] = []
        while len(rows) < per_length:
            example = build("words", [*random_words(r), *random_words(r)][:length])
            if example and len(example.spoken) == length and (length <= 2 or held_out(example)):
                rows.append(example)
        out += rows
    return out


def exhaustive() -> dict[str, list[Example]]:
    """Everything of the small closed categories, trained or not."""

    def make(category: str, rows: Iterable[list[Atom]]) -> list[Example]:
        return [e for row in rows if (e := build(category, row))]

    a, b = range(100), range(100)
    sums = {f"a {op} b = c": (op, f) for op, f in (("+", int.__add__), ("−", int.__sub__), ("×", int.__mul__))}
    out = {
        "numbers": make("numbers", ([number(str(n))] for n in a)),
        "two digits": make("two digits", ([number(f"{n:02d}")] for n in a)),
        "years": make("years", ([number(str(n))] for n in range(1900, 2101))),
        "ordinals": make("ordinals", ([ordinal(n)] for n in range(1, 100))),
        "words": make("words", ([word(w)] for w in TOKENIZER.words)),
        "three digits": make("three digits", ([number(f"{n:03d}")] for n in range(1000))),
        "clock times": make(
            "clock times", ([clock(h, m, z)] for h in range(24) for m in range(60) for z in (False, True) if h < 10 or not z)
        ),
        "dates": make("dates", ([date(d, m, f)] for d in range(1, 32) for m in MONTHS for f in DATE_FORMS)),
    }
    for name, (op, f) in sums.items():
        rows = ([number(str(x)), symbol(op), number(str(y)), symbol("="), *_result(f(x, y))] for x in a for y in b)
        out[name] = make(name, rows)
    return out


def _result(value: int) -> list[Atom]:
    return ([symbol("−")] if value < 0 else []) + [number(str(abs(value)))]


def disguise(written: str, r: random.Random) -> str:
    """A text that a user might have typed and that has ``written`` as its normal form."""
    text = re.sub(
        r"\b([a-z]+ty) ((?:one|two|three|four|five|six|seven|eight|nine)\b)",
        lambda m: r.choice((m[0], f"{m[1]}-{m[2]}")),
        written,
    )
    if r.random() < 0.5:
        text = re.sub(r"\b(it|what|where|here|there|today) is\b", r.choice(("\\1's", "\\1’s")), text)
    if r.random() < 0.3:
        text = text.replace(" and ", " & ")
    if r.random() < 0.3:
        short = {v: k for k, v in SHORT_NAMES.items()}
        text = " ".join(short.get(w, w) for w in text.split())
    text = text.replace("×", r.choice("×*x")).replace("−", r.choice("-–−")).replace("# ", "#")
    if r.random() < 0.3:
        text = re.sub(r"(?<=[0-9]) ([-–−+×*=]) (?=[0-9])", r"\1", text)
    if r.random() < 0.4:
        text = re.sub(r"(?<=[a-z]{3}) (?=[a-z]{3})", lambda m: r.choice((" ",) * 6 + (", ", ". ", "  ", "! ")), text)
    text = r.choice((str, str.upper, str.capitalize, str.title))(text)
    end = r.choice(("", ".", "!", "?", "...")) if not text.endswith(("=", "?")) else ""
    text = r.choice(("", "", "", " ")) + text + end
    return text if normalise(text) == written else written
