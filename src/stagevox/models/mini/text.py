"""The border of the mini model: what a user typed -> the Thinker's input tokens.

The packaged voice knows 138 words. The Thinker reads a text aloud in these words; it does not answer. This module does
what needs no reading: it unifies spellings (:func:`normalise`), refuses what can't be said and cuts the rest into tokens
(:class:`ThinkerTokenizer`). Digits and symbols stay as they are: the model reads them.

What can be written, and how the model reads it::

    hello good morning      words of the vocabulary, in any order       as they are
    7, 42                   numbers 0 to 99                             seven, forty two
    07, 305, 5551234        leading zero, or 3 to 12 digits             zero seven, three zero five, ...
    1984, 2024              1910-1999 and 2010-2099 are years           nineteen eighty four, twenty twenty four
    1,000                   the comma is dropped                        one zero zero zero
    4th, 21st               ordinals 1st to 99th                        four, twenty one
    7:30, 07:05, 19:00      clock times 0:00 to 23:59                   seven thirty, seven zero five, nineteen
    7:30-8:15               a dash between two clock times              seven thirty to eight fifteen
    4 July, 4th of July     a day (1 to 31) written before a month      july four
    the 4th of July                                                     july four
    July 4, July 04                                                     july four
    12 + 30 = 42            + - x * and =                               twelve plus thirty equals forty two
    5 x -3 = ?                                                          five times minus three equals what
    #7                                                                  number seven

``-`` is minus between two numbers and directly before a number that follows a space; elsewhere it is a hyphen or a dash.
``x`` and ``*`` are times between two numbers. Case, common punctuation and emoji carry nothing and are dropped.
Contractions that the vocabulary can say (it's, what's, we've), ``&`` and the short names of days and months (Mon, Sept)
are written out.

Everything else is refused with a :class:`~stagevox.errors.VocabularyError`: unknown words, am and pm, decimals (3.5),
fractions (1/2), per cent, degrees, currencies, powers, other digits than 0-9, times such as 12:75, a number before a month
that is no day (45 July), wrong ordinals (2th), ISO dates, runs of more than 12 digits.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path

from stagevox.errors import EmptyTextError, TextTooLongError, VocabularyError

MAX_CHARACTERS = 1000
MAX_DIGITS = 12
MAX_PASSES = 5
FIELD = "text"
SAYABLE = (
    "numbers with up to 12 digits", "+ - x =", "clock times", "days, months and dates", "times of day", "ten colours",
    "eight animals", "twelve objects", "greetings and the little words between them",
)  # fmt: skip

MONTHS = (
    "january", "february", "march", "april", "may", "june",
    "july", "august", "september", "october", "november", "december",
)  # fmt: skip
NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine",
    "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
    "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety",
)  # fmt: skip
SHORT_NAMES = {
    "jan": "january", "feb": "february", "mar": "march", "apr": "april", "jun": "june", "jul": "july", "aug": "august",
    "sep": "september", "sept": "september", "oct": "october", "nov": "november", "dec": "december",
    "mon": "monday", "tue": "tuesday", "tues": "tuesday", "wed": "wednesday", "thu": "thursday", "thur": "thursday",
    "thurs": "thursday", "fri": "friday", "sat": "saturday", "sun": "sunday",
}  # fmt: skip

_LOOKALIKES = str.maketrans(
    {c: "'" for c in "\u2018\u2019\u201b\u02bc\u2032`\u00b4"}
    | {c: "*" for c in "\u00b7\u22c5\u2217"}
    | {c: " " for c in [*range(32), *range(127, 160)]}
)
_REFUSED = set("%@\\§°^/")  # punctuation and look-alikes of emoji that mean a word the voice doesn't have
_DASH = "[-\u2010-\u2015]"
_NUMBER_WORD = f"(?:{'|'.join(NUMBER_WORDS)})"
_CLOCK = "[0-9]{1,2}:[0-9]{2}"

# Order matters: what an earlier rule has written, no later rule changes.
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\b(it|what|where|here|there|today|tomorrow)'s\b", r"\1 is"),
        (r"\b(i|we|you)'ve\b", r"\1 have"),
        (r"\b([ap])\.?\s?m\.(?!\w)", r"\1m"),
        (r"&", " and "),
        (r"(?<![^\s(+=×*−-])\.(?=[0-9])", "0."),
        (r"(?<![0-9])[.,:]|[.,:](?![0-9])", " "),
        (r"([0-9])\s*/\s*(?=[0-9])", r"\1/"),  # a division, which can't be said
        (r"(?<![0-9])/|/(?![0-9])", " "),
        (r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", ""),
        (rf"({_CLOCK})\s*{_DASH}\s*(?={_CLOCK})", r"\1 to "),
        (rf"(?<![0-9])([0-9]{{4}}){_DASH}([0-9]{{1,2}}){_DASH}([0-9]{{1,2}})(?![0-9])", r"\1/\2/\3"),
        (rf"([0-9])\s*{_DASH}\s*(?={_DASH}?[0-9])", r"\1 − "),
        (rf"([0-9]|\b{_NUMBER_WORD})\s+{_DASH}\s+(?={_DASH}?[0-9]|{_NUMBER_WORD}\b)", r"\1 − "),
        (rf"(^|[\s(=+×*−]|(?<=[0-9])x){_DASH}(?=[0-9])", r"\1 − "),
        (rf"{_DASH}", " "),
        (rf"([0-9]|\b{_NUMBER_WORD})\s*\*\s*(?=[−0-9]|{_NUMBER_WORD}\b)", r"\1 × "),
        (r"([0-9])\s*x\s*(?=[−0-9])", r"\1 × "),
        (rf"([0-9]|\b{_NUMBER_WORD})\s+x\s+(?=[−0-9]|{_NUMBER_WORD}\b)", r"\1 × "),
        (r"=\s*\?", " =\x00 "),
        (r"\?", " "),
        (r"=\x00", "= ?"),
        (r"([+−×=])", r" \1 "),
        (r"#\s*(?=[0-9])", " \x01 "),
        (r"(?<![a-z])'|'(?![a-z])", " "),
    )
)


def _unify(text: str) -> str:
    """NFKC and case folding; superscripts and fractions stay, for NFKC would make 52 of 5²."""
    kept = ("<super>", "<sub>", "<fraction>")

    def unify(character: str) -> str:
        return character if unicodedata.decomposition(character).startswith(kept) else unicodedata.normalize("NFKC", character)

    text = "".join(map(unify, text.translate(_LOOKALIKES)))
    return unicodedata.normalize("NFC", text.casefold()).translate(_LOOKALIKES)


def _strip(character: str) -> str:
    """What is left of one character once the rules have run: itself, a space or nothing."""
    if character.isalnum() or character in "'+−×=?:./\x01":
        return "#" if character == "\x01" else character
    category = unicodedata.category(character)
    if category in ("Cf", "Mn", "Me"):
        return ""
    refused = character in _REFUSED or category in ("Sm", "Sc") or character == "#"
    return f" {character} " if refused else " "


def normalise(text: str) -> str:
    """Unify spellings; the result is one space between chunks and is its own normal form.

    Nothing is checked and nothing is read here: unknown words, symbols and digits stay.
    """
    text = _unify(text)
    for _ in range(MAX_PASSES):  # what one pass drops may have kept two numbers apart
        before, text = text, _simplify(text)
        if text == before:
            break
    return text


def _simplify(text: str) -> str:
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    words = [SHORT_NAMES.get(word, word) for word in "".join(map(_strip, text)).split()]
    return re.sub(r"\bgood bye\b", "goodbye", " ".join(words))


class ThinkerTokenizer:
    """Written text -> prompt ids, generated ids -> spoken words.

    A prompt is ``[bos] input [sep]``; the model goes on with words and ``[eos]``. A word has one id, the same on both
    sides. A digit has two: one at the start of a number, one inside (``1 2`` and ``12`` differ). ``table`` is the JSON that
    ships beside the weights.

    ``pieces[id]`` is the most pieces of the voice that a token can become, the measure of length. The model learnt texts of up
    to the table's ``max_pieces``; a voice that can't speak that much sets a lower ``max_pieces``.
    """

    def __init__(self, table: str | Path | None = None, max_pieces: int | None = None) -> None:
        source = Path(table) if table else files("stagevox.models.mini") / "weights" / "thinker" / "tokens.json"
        data = json.loads(source.read_text(encoding="utf-8"))
        self.tokens: list[str] = data["special"] + data["words"] + data["written"]
        self.words: tuple[str, ...] = tuple(data["words"])
        self.max_input_tokens: int = data["max_input_tokens"]
        self.max_pieces: int = min(data["max_pieces"], max_pieces or data["max_pieces"])
        self._id = {token: i for i, token in enumerate(self.tokens)}
        self.word_ids: dict[str, int] = {word: self._id[word] for word in self.words}
        self.pieces: list[int] = data["pieces"]
        self.pad_id, self.bos_id, self.sep_id, self.eos_id = (self._id[t] for t in ("<pad>", "<bos>", "<sep>", "<eos>"))

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding."""
        return len(self.tokens)

    @property
    def spoken_ids(self) -> list[int]:
        """The ids that the model may generate: words and eos."""
        return [self.eos_id, *self.word_ids.values()]

    def encode(self, text: str) -> list[int]:
        """The prompt of a text: ``[bos] input [sep]``.

        Raises :class:`EmptyTextError`, :class:`VocabularyError` (names everything that can't be said) or
        :class:`TextTooLongError`.
        """
        if len(text) > MAX_CHARACTERS:
            raise TextTooLongError(FIELD, f"{len(text)} characters; the voice takes at most {MAX_CHARACTERS}")
        chunks = normalise(text).split()
        if not chunks:
            raise EmptyTextError(FIELD, "nothing to say")
        problems = list(dict.fromkeys(_problems(chunks, self.word_ids)))
        if problems:
            more = f" and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise VocabularyError(FIELD, f"the voice can't say {', '.join(problems[:10])}{more}", SAYABLE)
        ids = [i for chunk in chunks for i in self.encode_chunk(chunk)]
        pieces = sum(self.pieces[i] for i in ids)
        if len(ids) > self.max_input_tokens or pieces > self.max_pieces:
            raise TextTooLongError(
                FIELD,
                f"too long to be spoken in one go: {len(ids)} words and digits of about {pieces} sounds",
                [f"up to {self.max_input_tokens} words and digits of {self.max_pieces} sounds together, 1 to 8 a word"],
            )
        return [self.bos_id, *ids, self.sep_id]

    def decode(self, ids: Iterable[int]) -> str:
        """The words among generated ids; stops at eos. Ids outside ``spoken_ids`` are the caller's mistake."""
        words = []
        for i in ids:
            if i == self.eos_id:
                break
            assert self.tokens[i] in self.word_ids, f"{self.tokens[i]!r} is not a spoken token"
            words.append(self.tokens[i])
        return " ".join(words)

    def encode_chunk(self, chunk: str) -> list[int]:
        """The ids of one chunk of a normal form that holds nothing to refuse."""
        if not chunk[0].isdigit():
            return [self._id[chunk]]
        number = re.fullmatch(r"([0-9])([0-9:]*)([a-z]*)", chunk)
        assert number
        first, rest, suffix = number.groups()
        return [self._id[f"_{first}"], *(self._id[c] for c in rest), *([self._id["th"]] if suffix else [])]


def _problems(chunks: Sequence[str], words: dict[str, int]) -> Iterable[str]:
    """What can't be said, as quoted words with a reason where the word alone doesn't tell."""
    for i, chunk in enumerate(chunks):
        before, after, later = (chunks[i - 1] if i else ""), *[*chunks[i + 1 : i + 3], "", ""][:2]
        if chunk in words or chunk in ("+", "−", "×", "=", "?"):
            continue
        if chunk == "#" and after[:1].isdigit():
            continue
        if chunk == "of" and after in MONTHS and _day(before):
            continue
        reason = _number_problem(chunk, later if after == "of" else after) if re.match("[0-9]", chunk) else ""
        if reason is not None:
            yield f"{chunk!r}{reason}"


def _day(chunk: str) -> bool:
    number = re.fullmatch("([0-9]{1,2})(st|nd|rd|th)?", chunk)
    return number is not None and 1 <= int(number[1]) <= 31


def _number_problem(chunk: str, after: str) -> str | None:
    """The reason why a chunk that starts with a digit is refused, None if it isn't."""
    if re.fullmatch(_CLOCK, chunk):
        hour, minute = chunk.split(":")
        return None if int(hour) < 24 and int(minute) < 60 else " (no such clock time)"
    if ordinal := re.fullmatch("([1-9][0-9]?)(st|nd|rd|th)", chunk):
        if ordinal[2] != ordinal_suffix(int(ordinal[1])):
            return " (no such ordinal)"
    elif not re.fullmatch("[0-9]+", chunk):
        return ""
    elif len(chunk) > MAX_DIGITS:
        return f" (more than {MAX_DIGITS} digits)"
    if after in MONTHS and not _day(chunk):
        return f" (no day of {after})"
    return None


def ordinal_suffix(number: int) -> str:
    """st, nd, rd or th."""
    if number % 100 in (11, 12, 13):
        return "th"
    return {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
