"""The grammar: random texts of every kind, as rows of atoms."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from atoms import DATE_FORMS, OPERATORS, Atom, clock, date, hash_number, number, ordinal, say, symbol, word, words

from stagevox.models.mini.text import MONTHS, NUMBER_WORDS, ThinkerTokenizer

VOCABULARY = ThinkerTokenizer().words
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
COLOURS = ("red", "green", "blue", "yellow", "black", "white", "orange", "purple", "brown", "pink")
THINGS = (
    "cat", "dog", "bird", "fish", "horse", "cow", "lion", "rabbit",
    "book", "table", "chair", "door", "window", "car", "house", "ball", "apple", "cup", "box", "flower",
)  # fmt: skip
PARTS = ("morning", "evening", "afternoon")


def _value(r: random.Random, low: int, high: int) -> list[Atom]:
    """A number, in digits or in words."""
    value = r.randint(low, high)
    return [number(str(value))] if r.random() < 0.75 else [word(w) for w in say(value)]


def _fill(r: random.Random, template: str, **slots: Callable[[], list[Atom]]) -> list[Atom]:
    return [a for part in template.split() for a in (slots[part[1:-1]]() if part[0] == "{" else [word(part)])]


def random_words(r: random.Random) -> list[Atom]:
    """Vocabulary words in any order; half of the time out of a handful, so that copying can't lean on what came before."""
    pool: Sequence[str] = VOCABULARY
    if r.random() < 0.55:
        pool = r.sample(VOCABULARY, r.choice((1, 2, 2, 3, 3, 4, 6)))
    elif r.random() < 0.2:
        pool = NUMBER_WORDS
    length = r.randint(1, 16) if r.random() < 0.85 else r.randint(14, 30)
    if r.random() < 0.3:  # runs of the same word
        drawn = [w for w in r.choices(pool, k=length) for _ in range(r.choice((1, 1, 1, 2, 3, 6)))]
        return [word(w) for w in drawn[:length]]
    return [word(r.choice(pool)) for _ in range(length)]


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
    elif kind < 0.8:
        atoms = [number(r.choice((str(r.randint(1900, 2100)), run(4), run(3), f"{r.randint(190, 210)}")))]
    else:
        atoms = [number(run(r.choice((1, 2, 2, 3, 4)))) for _ in range(r.randint(2, 6))]
    lead = r.choice(
        ("", "", "", "my number is", "your number is", "number", "the number is", "the answer is", "it was", "in", "go to number")
    )
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

    kind = r.choice("+−×")
    left, a = operand(0, 12 if kind == "×" and r.random() < 0.5 else 99)
    right, b = operand(0, 12 if kind == "×" and r.random() < 0.5 else 99)
    result = {"+": a + b, "−": a - b, "×": a * b}[kind]
    if r.random() < 0.4:  # untrue: small, or close to where three digits and years part
        result = r.choice((r.randint(-20, 150), r.randint(-20, 150), r.randint(185, 215), r.randint(1900, 2110)))
    atoms = [*left, operator(kind), *right]
    for _ in range(r.choices((0, 1, 2), (8, 2, 1))[0]):
        atoms += [operator(r.choice("+−×")), *operand()[0]]
    end = r.random()
    if end < 0.15:
        return atoms
    if end < 0.3:
        return words("what is") + atoms
    equals = symbol("=") if r.random() < 0.8 else word(r.choice(("is", "equals")))
    if end < 0.37 and equals.written == "=":
        return [*atoms, equals]
    if end < 0.47 and equals.written == "=":
        return [*atoms, equals, Atom("?", ("what",), (0,))]
    return [*atoms, equals, *sign(result), number(str(abs(result)))]


def _clock(r: random.Random) -> list[Atom]:
    hour = r.randint(1, 12) if r.random() < 0.5 else r.randint(0, 23)
    minute = r.choice((0, 30, 15, 45, r.randint(0, 9), r.randint(0, 59), r.randint(0, 59), r.randint(0, 59)))
    return [clock(hour, minute, r.random() < 0.25 and hour < 10)]


def _phrase(r: random.Random) -> list[Atom]:
    """Half past 7."""
    lead = r.choice((["half", "past"], ["quarter", "past"], ["quarter", "to"], None))
    head = [word(w) for w in lead] if lead else [*_value(r, 1, 29), word(r.choice(("past", "to")))]
    return head + _value(r, 1, 12)


TIMES = (
    "{c}", "{c}", "it is {c}", "it is {c} now", "the time is {c}", "see you at {c}", "{d} at {c}",
    "see you {d} at {c}", "{c} to {c}", "good {p} it is {c}", "it is {c} in the {p}", "{d} {c}", "{c} {d}",
    "we go at {c} and you go at {c}", "{c} and {c}", "it is {h}", "{h}", "it is {h} now", "see you {d} at {h}",
    "hello it is {h} in the {p}", "{m} {c}", "{c} {m}", "it was {c} in {m}",
)  # fmt: skip


def times(r: random.Random) -> list[Atom]:
    template = r.choice(TIMES)
    return _fill(
        r, template, c=lambda: _clock(r), h=lambda: _phrase(r), p=lambda: [word(r.choice(PARTS))],
        m=lambda: [word(r.choice(MONTHS))], d=lambda: [word(r.choice((*DAYS, "tomorrow", "today")))],
    )  # fmt: skip


def _date(r: random.Random) -> list[Atom]:
    return [date(r.randint(1, 31), r.choice(MONTHS), r.choice(DATE_FORMS))]


def _year(r: random.Random) -> list[Atom]:
    return [number(str(r.choice((r.randint(1910, 1999), r.randint(2010, 2099)))))]


DATES = (
    "{f}", "{f}", "see you on {f}", "it is {f}", "today is {f}", "{d} {f}", "see you on {d} {f}", "it was {f} {y}",
    "{f} {y}", "{d} {f} {y}", "on {f} at {c}", "{f} and {f}", "{f} to {f}", "yesterday was {d} {f}", "it was {m} {y}",
    "{m} {y}", "in {y}", "it was {y}", "see you in {m} {y}", "good {p} today is {d} {f}", "we go on {f} in the {p}",
    "{c} on {f}", "{c} {f}", "{f} {c}", "it is {c} {f}",
)  # fmt: skip


def dates(r: random.Random) -> list[Atom]:
    template = r.choice(DATES)
    return _fill(
        r, template, f=lambda: _date(r), y=lambda: _year(r), c=lambda: _clock(r), m=lambda: [word(r.choice(MONTHS))],
        p=lambda: [word(r.choice(PARTS))], d=lambda: [word(r.choice(DAYS))],
    )  # fmt: skip


SENTENCES = (
    "hello good {p}", "good {p} and welcome", "hello and welcome", "thank you very much", "goodbye see you {d}",
    "welcome to my house", "yes please", "no thank you", "i see {t} and {t}", "we have {t}", "i want {t} now",
    "where is {t}", "here is {t}", "there is {t} here", "{t} is very {k}", "{t} is {k}", "please open {t}",
    "please close {t} now", "go left at {t}", "go to {t} on the right", "please stop the music",
    "what time is it now", "what is your number", "today is {d}", "tomorrow is {d}", "yesterday was {d}",
    "the answer is {n}", "the number is {n}", "go to number {n}", "number {n}", "yes we have {n}", "no it is {n}",
    "{n} and {n}", "{n} {n}", "i have {n} cat and {n} dog", "we need {n} {k} {n}", "you need {n} and i need {n}",
    "{n} {o}", "we need water and {t}", "{k} {k} {k}", "{n}", "{n}", "{e}", "the {e}", "the {e} {o}",
    "see you on the {e}", "open the {e} door", "my {e} {o} is {k}", "it was the {e} {d}", "house {e}", "{e} {e}",
    "i see {n} {o} {n} {o} and {n} {o}",
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

    template = r.choice(SENTENCES)
    return _fill(
        r, template, t=thing, n=lambda: _value(r, 0, 99), e=either, o=lambda: [word(r.choice(THINGS))],
        k=lambda: [word(r.choice(COLOURS))], p=lambda: [word(r.choice(PARTS))],
        d=lambda: [word(r.choice((*DAYS, "tomorrow", "today")))],
    )  # fmt: skip


def mixed(r: random.Random) -> list[Atom]:
    """Anything next to anything."""

    def run(low: int, high: int) -> Atom:
        return number(str(r.randint(low, high)))

    kinds: tuple[Callable[[], Atom], ...] = (
        lambda: word(r.choice(VOCABULARY)),
        lambda: word(r.choice(NUMBER_WORDS)),
        lambda: run(0, 99),
        lambda: run(0, 9),
        lambda: number("".join(r.choice("0123456789") for _ in range(r.choice((2, 2, 3, 4, 5))))),
        lambda: ordinal(r.randint(1, 99)),
        lambda: hash_number(r.randint(0, 99)),
        lambda: _clock(r)[0],
        lambda: _date(r)[0],
        lambda: _year(r)[0],
        lambda: symbol(r.choice("+−×=")),
        lambda: run(10, 19),
        lambda: number(str(r.randint(2, 9) * 10)),
    )
    weights = [r.choice((0, 0, 1, 3)) for _ in kinds]
    weights[0] += 2
    return [f() for f in r.choices(kinds, weights, k=r.randint(2, 14))]


def joined(r: random.Random) -> list[Atom]:
    """Two or three short texts in a row."""
    parts = [r.choice((arithmetic, times, dates, sentences, sentences))(r) for _ in range(r.choice((2, 2, 3)))]
    return [a for part in parts for a in part]


CATEGORIES: dict[str, tuple[Callable[[random.Random], list[Atom]], float]] = {
    "words": (random_words, 0.22),
    "digits": (random_digits, 0.15),
    "arithmetic": (arithmetic, 0.13),
    "times": (times, 0.06),
    "dates": (dates, 0.09),
    "sentences": (sentences, 0.07),
    "mixed": (mixed, 0.21),
    "joined": (joined, 0.07),
}
