"""Atoms of the Thinker's texts: how each is written and how it is spoken.

An atom is written in the normal form of ``stagevox.models.mini.text``. It knows how it is spoken, and which of its tokens each
spoken word comes from: the model learns where to look from that. The rules stand here and nowhere else: neither the package nor
the model's code can read a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from stagevox.models.mini.text import NUMBER_WORDS, ordinal_suffix

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
    if len(text) == 1 or (len(text) == 2 and text[0] != "0"):
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


DATE_FORMS = (
    "{m} {n}",
    "{m} {z}",
    "{m} {o}",
    "{n} {m}",
    "{z} {m}",
    "{o} {m}",
    "{n} of {m}",
    "{o} of {m}",
    "the {n} of {m}",
    "the {o} of {m}",
)


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
