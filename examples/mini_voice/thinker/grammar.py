"""Pairs of written and spoken text: the Thinker's training data and its held-out sets.

A text is a row of :class:`Atom`; each atom is written in the normal form of ``stagevox.models.mini.text``, knows how it is spoken, and which of its
tokens each spoken word comes from (the model learns where to look from that). The rules stand here and nowhere else: neither the
package nor the model's code can read a number.

Every 25th text, by a checksum of its normal form, is held out of training for ever, and so are the prompts of the voice.
Words and numbers on their own (one or two tokens) are always trained.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from stagevox.models.mini.text import MONTHS, NUMBER_WORDS, SHORT_NAMES, ThinkerTokenizer, normalise, ordinal_suffix

PROMPTS = Path(__file__).resolve().parents[3] / "tests" / "data" / "voice_prompts.json"
HELD_OUT_EVERY = 25
TOKENIZER = ThinkerTokenizer()

DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
COLOURS = ("red", "green", "blue", "yellow", "black", "white", "orange", "purple", "brown", "pink")
THINGS = (
    "cat", "dog", "bird", "fish", "horse", "cow", "lion", "rabbit",
    "book", "table", "chair", "door", "window", "car", "house", "ball", "apple", "cup", "box", "flower",
)  # fmt: skip
PARTS = ("morning", "evening", "afternoon")
OPERATORS = {"+": "plus", "−": "minus", "×": "times", "=": "equals"}


def say(number: int) -> tuple[str, ...]:
    """0..99 in words."""
    if number < 20:
        return (NUMBER_WORDS[number],)
    tens = NUMBER_WORDS[18 + number // 10]
    return (tens,) if number % 10 == 0 else (tens, NUMBER_WORDS[number % 10])


@dataclass(frozen=True)
class Atom:
    """``sources[i]`` is the index, among the atom's tokens, that spoken word i is read from."""

    written: str
    spoken: tuple[str, ...]
    sources: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.spoken) == len(self.sources)


def _two_digits(number: int, at: int, digits: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """A number below 100 that stands in ``digits`` tokens from ``at`` on; a leading zero is not spoken."""
    spoken = say(number)
    last = at + digits - 1
    return spoken, ((last - 1, last) if len(spoken) == 2 else (last,))


@cache
def word(text: str) -> Atom:
    return Atom(text, (text,), (0,))


@cache
def symbol(text: str) -> Atom:
    return Atom(text, (OPERATORS[text],), (0,))


@cache
def number(text: str) -> Atom:
    """A run of digits."""
    value = int(text)
    if len(text) == 1 or len(text) == 2 and text[0] != "0":
        return Atom(text, *_two_digits(value, 0, len(text)))
    if len(text) == 4 and (1910 <= value <= 1999 or 2010 <= value <= 2099):
        high, low = _two_digits(value // 100, 0, 2), _two_digits(value % 100, 2, 2)
        return Atom(text, high[0] + low[0], high[1] + low[1])
    return Atom(text, tuple(NUMBER_WORDS[int(c)] for c in text), tuple(range(len(text))))


@cache
def ordinal(value: int) -> Atom:
    spoken, sources = _two_digits(value, 0, len(str(value)))
    return Atom(f"{value}{ordinal_suffix(value)}", spoken, sources)


@cache
def hash_number(value: int) -> Atom:
    inner = number(str(value))
    return Atom(f"# {value}", ("number", *inner.spoken), (0, *(1 + i for i in inner.sources)))


@cache
def clock(hour: int, minute: int, padded: bool = False) -> Atom:
    """7:30; minutes below ten keep their zero, a full hour has no minutes."""
    digits = f"{hour:02d}" if padded else str(hour)
    spoken, sources = _two_digits(hour, 0, len(digits))
    at = len(digits) + 1
    if 0 < minute < 10:
        spoken, sources = (*spoken, "zero", NUMBER_WORDS[minute]), (*sources, at, at + 1)
    elif minute:
        more = _two_digits(minute, at, 2)
        spoken, sources = spoken + more[0], sources + more[1]
    return Atom(f"{digits}:{minute:02d}", spoken, sources)


DATE_FORMS = ("{m} {n}", "{m} {z}", "{m} {o}", "{n} {m}", "{z} {m}", "{o} {m}", "{n} of {m}", "{o} of {m}", "the {n} of {m}", "the {o} of {m}")


@cache
def date(day: int, month: str, form: str) -> Atom:
    """Any written order is spoken month first."""
    written = form.format(m=month, n=day, o=f"{day}{ordinal_suffix(day)}", z=f"{day:02d}")
    chunks = written.split()
    digits = 2 if "{z}" in form else len(str(day))
    day_chunk = next(i for i, chunk in enumerate(chunks) if chunk[0].isdigit())
    extra = digits - 1 + ("{o}" in form)  # tokens of the day beyond its first
    month_chunk = chunks.index(month)
    month_at = month_chunk + (extra if month_chunk > day_chunk else 0)
    spoken, sources = _two_digits(day, day_chunk, digits)
    return Atom(written, (month, *spoken), (month_at, *sources))


def words(text: str) -> list[Atom]:
    return [word(w) for w in text.split()]


# --- random texts ------------------------------------------------------------------------------------------------------


def _value(r: random.Random, low: int, high: int) -> list[Atom]:
    """A number, in digits or in words."""
    value = r.randint(low, high)
    return [number(str(value))] if r.random() < 0.75 else [word(w) for w in say(value)]


def _fill(r: random.Random, template: str, **slots: Callable[[], list[Atom]]) -> list[Atom]:
    return [a for part in template.split() for a in (slots[part[1:-1]]() if part[0] == "{" else [word(part)])]


def random_words(r: random.Random) -> list[Atom]:
    """Vocabulary words in any order; half of the time out of a handful, so that copying can't lean on what came before."""
    pool: Iterable[str] = TOKENIZER.words
    if r.random() < 0.5:
        pool = r.sample(TOKENIZER.words, r.choice((1, 2, 3, 4, 6)))
    if r.random() < 0.15:
        pool = NUMBER_WORDS
    pool = list(pool)
    return [word(r.choice(pool)) for _ in range(r.randint(1, 16) if r.random() < 0.9 else r.randint(17, 30))]


def random_digits(r: random.Random) -> list[Atom]:
    """Runs of digits, single digits, numbers with leading zeros."""
    kind = r.random()
    alphabet = "0123456789" if r.random() < 0.6 else "".join(r.sample("0123456789", r.choice((1, 2, 3))))

    def run(n: int) -> str:
        return "".join(r.choice(alphabet) for _ in range(n))

    if kind < 0.4:
        atoms = [number(run(r.randint(3, 12)))]
    elif kind < 0.6:
        atoms = [number(run(1)) for _ in range(r.randint(2, 12))]
    elif kind < 0.7:
        atoms = [number(r.choice((str(r.randint(1900, 2100)), run(4))))]
    else:
        atoms = [number(run(r.choice((1, 2, 2, 3, 4)))) for _ in range(r.randint(2, 6))]
    lead = r.choice(("", "", "", "my number is", "your number is", "number", "the number is", "the answer is", "it was", "in", "go to number"))
    return words(lead) + atoms


def arithmetic(r: random.Random) -> list[Atom]:
    """Sums, true and untrue, in symbols, in words and mixed."""
    def sign(value: int) -> list[Atom]:
        return [symbol("−")] if value < 0 else []

    def operand(low: int = 0, high: int = 99) -> tuple[list[Atom], int]:
        value = r.randint(low, high)
        negative = r.random() < 0.08
        body = [number(str(value))] if r.random() < 0.88 else [word(w) for w in say(value)]
        return ([symbol("−")] if negative else []) + body, -value if negative else value

    def operator(text: str) -> Atom:
        return symbol(text) if r.random() < 0.85 else word(OPERATORS[text])

    kind = r.choice("++−−×")
    left, a = operand(0, 12 if kind == "×" and r.random() < 0.5 else 99)
    right, b = operand(0, 12 if kind == "×" and r.random() < 0.5 else 99)
    result = {"+": a + b, "−": a - b, "×": a * b}[kind] if r.random() < 0.6 else r.randint(-20, 150)
    atoms = left + [operator(kind)] + right
    for _ in range(r.choices((0, 1, 2), (8, 2, 1))[0]):
        atoms += [operator(r.choice("+−×")), *operand()[0]]
    end = r.random()
    if end < 0.15:
        return atoms
    if end < 0.3:
        return words("what is") + atoms
    equals = symbol("=") if r.random() < 0.8 else word(r.choice(("is", "equals")))
    if end < 0.37 and equals.written == "=":
        return atoms + [equals]
    if end < 0.47 and equals.written == "=":
        return atoms + [equals, Atom("?", ("what",), (0,))]
    return atoms + [equals] + sign(result) + [number(str(abs(result)))]


def _clock(r: random.Random) -> list[Atom]:
    hour = r.randint(1, 12) if r.random() < 0.5 else r.randint(0, 23)
    minute = r.choice((0, 30, 15, 45, r.randint(0, 9), r.randint(0, 59), r.randint(0, 59), r.randint(0, 59)))
    return [clock(hour, minute, r.random() < 0.25 and hour < 10)]


def _phrase(r: random.Random) -> list[Atom]:
    """half past 7"""
    lead = r.choice((["half", "past"], ["quarter", "past"], ["quarter", "to"], None))
    head = [word(w) for w in lead] if lead else _value(r, 1, 29) + [word(r.choice(("past", "to")))]
    return head + _value(r, 1, 12)


def times(r: random.Random) -> list[Atom]:
    template = r.choice((
        "{c}", "{c}", "it is {c}", "it is {c} now", "the time is {c}", "see you at {c}", "{d} at {c}", "see you {d} at {c}", "{c} to {c}",
        "good {p} it is {c}", "it is {c} in the {p}", "{d} {c}", "{c} {d}", "we go at {c} and you go at {c}", "{c} and {c}",
        "it is {h}", "{h}", "it is {h} now", "see you {d} at {h}", "hello it is {h} in the {p}", "{m} {c}", "{c} {m}", "it was {c} in {m}",
    ))  # fmt: skip
    return _fill(
        r, template, c=lambda: _clock(r), h=lambda: _phrase(r), p=lambda: [word(r.choice(PARTS))], m=lambda: [word(r.choice(MONTHS))],
        d=lambda: [word(r.choice((*DAYS, "tomorrow", "today")))],
    )  # fmt: skip


def _date(r: random.Random) -> list[Atom]:
    return [date(r.randint(1, 31), r.choice(MONTHS), r.choice(DATE_FORMS))]


def _year(r: random.Random) -> list[Atom]:
    return [number(str(r.choice((r.randint(1910, 1999), r.randint(2010, 2099)))))]


def dates(r: random.Random) -> list[Atom]:
    template = r.choice((
        "{f}", "{f}", "see you on {f}", "it is {f}", "today is {f}", "{d} {f}", "see you on {d} {f}", "it was {f} {y}", "{f} {y}", "{d} {f} {y}",
        "on {f} at {c}", "{f} and {f}", "{f} to {f}", "yesterday was {d} {f}", "it was {m} {y}", "{m} {y}", "in {y}", "it was {y}",
        "see you in {m} {y}", "good {p} today is {d} {f}", "we go on {f} in the {p}", "{c} on {f}", "{c} {f}", "{f} {c}", "it is {c} {f}",
    ))  # fmt: skip
    return _fill(
        r, template, f=lambda: _date(r), y=lambda: _year(r), c=lambda: _clock(r), m=lambda: [word(r.choice(MONTHS))],
        p=lambda: [word(r.choice(PARTS))], d=lambda: [word(r.choice(DAYS))],
    )  # fmt: skip


def sentences(r: random.Random) -> list[Atom]:
    """What people would type."""
    def thing() -> list[Atom]:
        parts = [r.choice(("the", "my", "your", "a"))]
        if r.random() < 0.3:
            parts.append(r.choice(("big", "small")))
        if r.random() < 0.5:
            parts.append(r.choice(COLOURS))
        return [word(w) for w in (*parts, r.choice(THINGS))]

    def either() -> list[Atom]:
        return [ordinal(r.randint(1, 99))] if r.random() < 0.4 else [hash_number(r.randint(0, 99))]

    template = r.choice((
        "hello good {p}", "good {p} and welcome", "hello and welcome", "thank you very much", "goodbye see you {d}", "welcome to my house",
        "yes please", "no thank you", "i see {t} and {t}", "we have {t}", "i want {t} now", "where is {t}", "here is {t}", "there is {t} here",
        "{t} is very {k}", "{t} is {k}", "please open {t}", "please close {t} now", "go left at {t}", "go to {t} on the right",
        "please stop the music", "what time is it now", "what is your number", "today is {d}", "tomorrow is {d}", "yesterday was {d}",
        "the answer is {n}", "the number is {n}", "go to number {n}", "number {n}", "yes we have {n}", "no it is {n}", "{n} and {n}", "{n} {n}",
        "i have {n} cat and {n} dog", "we need {n} {k} {n}", "you need {n} and i need {n}", "{n} {o}", "we need water and {t}", "{k} {k} {k}",
        "{n}", "{n}", "{e}", "the {e}", "the {e} {o}", "see you on the {e}", "open the {e} door", "my {e} {o} is {k}", "it was the {e} {d}",
        "house {e}", "{e} {e}", "i see {n} {o} {n} {o} and {n} {o}",
    ))  # fmt: skip
    return _fill(
        r, template, t=thing, n=lambda: _value(r, 0, 99), e=either, o=lambda: [word(r.choice(THINGS))], k=lambda: [word(r.choice(COLOURS))],
        p=lambda: [word(r.choice(PARTS))], d=lambda: [word(r.choice((*DAYS, "tomorrow", "today")))],
    )  # fmt: skip


def mixed(r: random.Random) -> list[Atom]:
    """Anything next to anything."""
    kinds: tuple[Callable[[], Atom], ...] = (
        lambda: word(r.choice(TOKENIZER.words)), lambda: word(r.choice(NUMBER_WORDS)), lambda: number(str(r.randint(0, 99))),
        lambda: number(str(r.randint(0, 9))), lambda: number("".join(r.choice("0123456789") for _ in range(r.choice((2, 2, 3, 4, 5))))),
        lambda: ordinal(r.randint(1, 99)), lambda: hash_number(r.randint(0, 99)), lambda: _clock(r)[0], lambda: _date(r)[0], lambda: _year(r)[0],
        lambda: symbol(r.choice("+−×=")), lambda: number(str(r.randint(10, 19))), lambda: number(str(r.randint(2, 9) * 10)),
    )  # fmt: skip
    weights = [r.choice((0, 0, 1, 3)) for _ in kinds]
    weights[0] += 2
    return [f() for f in r.choices(kinds, weights, k=r.randint(2, 14))]


def joined(r: random.Random) -> list[Atom]:
    """Two or three short texts in a row."""
    parts = [r.choice((arithmetic, times, dates, sentences, sentences))(r) for _ in range(r.choice((2, 2, 3)))]
    return [a for part in parts for a in part]


CATEGORIES: dict[str, tuple[Callable[[random.Random], list[Atom]], float]] = {
    "words": (random_words, 0.24), "digits": (random_digits, 0.10), "arithmetic": (arithmetic, 0.14), "times": (times, 0.09),
    "dates": (dates, 0.13), "sentences": (sentences, 0.10), "mixed": (mixed, 0.14), "joined": (joined, 0.06),
}  # fmt: skip


# --- examples ----------------------------------------------------------------------------------------------------------


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


@lru_cache(maxsize=1)
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
        "clock times": make("clock times", ([clock(h, m, z)] for h in range(24) for m in range(60) for z in (False, True) if h < 10 or not z)),
        "dates": make("dates", ([date(d, m, f)] for d in range(1, 32) for m in MONTHS for f in DATE_FORMS)),
    }
    for name, (op, f) in sums.items():
        rows = ([number(str(x)), symbol(op), number(str(y)), symbol("=")] + _result(f(x, y)) for x in a for y in b)
        out[name] = make(name, rows)
    return out


def _result(value: int) -> list[Atom]:
    return ([symbol("−")] if value < 0 else []) + [number(str(abs(value)))]


# --- the many ways to write one text -----------------------------------------------------------------------------------


def disguise(written: str, r: random.Random) -> str:
    """A text that a user might have typed and that has ``written`` as its normal form."""
    text = re.sub(r"\b([a-z]+ty) ((?:one|two|three|four|five|six|seven|eight|nine)\b)", lambda m: r.choice((m[0], f"{m[1]}-{m[2]}")), written)
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
