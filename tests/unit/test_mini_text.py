"""The border of the mini model: spellings, tokens, refusals."""

from __future__ import annotations

import json
import random
import sys
import unicodedata
from pathlib import Path

import pytest

from stagevox.errors import BadRequestError, EmptyTextError, TextTooLongError, VocabularyError
from stagevox.models.mini.text import ThinkerTokenizer, normalise, ordinal_suffix

DATA = Path(__file__).parents[1] / "data"
GRAMMAR = Path(__file__).parents[2] / "examples" / "mini_voice" / "thinker"


@pytest.fixture(scope="module")
def tokenizer() -> ThinkerTokenizer:
    return ThinkerTokenizer()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello, good morning.", "hello good morning"),
        ("  SEE\tyou\non 4 July! ", "see you on 4 july"),
        ("It’s twenty-one", "it is twenty one"),
        ("What's there? There's a cat; we've a dog.", "what is there there is a cat we have a dog"),
        ("it's 'my' “cat”", "it is my cat"),
        ("Good-bye & welcome", "goodbye and welcome"),
        ("good bye", "goodbye"),
        ("１２＋３", "12 + 3"),
        ("12+30=42", "12 + 30 = 42"),
        ("12 + 30 = ?", "12 + 30 = ?"),
        ("what is 2 + 2?", "what is 2 + 2"),
        ("5-3", "5 − 3"),
        ("5 – 3", "5 − 3"),
        ("5 - -3", "5 − − 3"),
        ("-5", "− 5"),
        ("what is -5 + 3", "what is − 5 + 3"),
        ("seven - three", "seven − three"),
        ("monday - 7:30", "monday 7:30"),
        ("two-7", "two 7"),
        ("3x4", "3 × 4"),
        ("3 x 4 x 5", "3 × 4 × 5"),
        ("3 * -4", "3 × − 4"),
        ("seven x three", "seven × three"),
        ("*hello*", "hello"),
        ("i see x", "i see x"),
        ("7:30", "7:30"),
        ("time: now", "time now"),
        ("7:30–8:15", "7:30 to 8:15"),
        ("7:30 a.m.", "7:30 am"),
        ("1,000 and 1, 2,3", "1000 and 1 2 3"),
        ("Jan 4, Mon", "january 4 monday"),
        ("#5", "# 5"),
        ("yes/no", "yes no"),
        ("Hello 😀👍🏽!", "hello"),
        ("3.5", "3.5"),
        (".5 hello.5 -.5", "0.5 hello 5 − 0.5"),
        ("3 · 4", "3 × 4"),
        ("hello\x00\x01=\x00 5", "hello = 5"),
        ("1/2", "1/2"),
        ("5²", "5²"),
        ("50%", "50 %"),
        ("20°", "20 °"),
        ("don't", "don't"),
        ("", ""),
        ("... 😀 —", ""),
    ],
)
def test_normalise(text: str, expected: str) -> None:
    assert normalise(text) == expected
    assert normalise(expected) == expected


def test_normalising_twice_changes_nothing() -> None:
    r = random.Random(0)
    words = ["am", "seven", "good bye", "it's", "Ⅳ", "İ", "ß", "é", "٣", "\u200b", "\ufe0f", "😀"]
    alphabet = [*"0123456789abmpx'.,:;!?+-–−*×=#/&%°²½ \t", *words]
    for _ in range(20_000):
        text = "".join(r.choices(alphabet, k=r.randint(1, 12)))
        once = normalise(text)
        assert normalise(once) == once, text
        assert once == unicodedata.normalize("NFC", once)


def written(tokenizer: ThinkerTokenizer, text: str) -> str:
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_id and ids[-1] == tokenizer.sep_id
    return " ".join(tokenizer.tokens[i] for i in ids[1:-1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello, good morning.", "hello good morning"),
        ("12 + 30 = 42", "_1 2 + _3 0 = _4 2"),
        ("1 2 and 12", "_1 _2 and _1 2"),
        ("7:05", "_7 : 0 5"),
        ("the 4th of July", "the _4 th of july"),
        ("21st", "_2 1 th"),
        ("#7", "# _7"),
        ("5 x -3 = ?", "_5 × − _3 = ?"),
    ],
)
def test_encode(tokenizer: ThinkerTokenizer, text: str, expected: str) -> None:
    assert written(tokenizer, text) == expected


def test_words_have_the_same_id_on_both_sides(tokenizer: ThinkerTokenizer) -> None:
    text = " ".join(tokenizer.words[:12])
    assert tokenizer.decode([*tokenizer.encode(text)[1:-1], tokenizer.eos_id, tokenizer.encode("cat")[1]]) == text
    assert len(tokenizer.spoken_ids) == len(set(tokenizer.spoken_ids)) == 139


def test_decode_refuses_what_is_not_spoken(tokenizer: ThinkerTokenizer) -> None:
    with pytest.raises(AssertionError, match="not a spoken token"):
        tokenizer.decode(tokenizer.encode("7")[1:-1])


@pytest.mark.parametrize("text", ["", "   ", "...", "?!", "😀", "—", "\u200b\ufeff", "'"])
def test_nothing_to_say(tokenizer: ThinkerTokenizer, text: str) -> None:
    with pytest.raises(EmptyTextError) as error:
        tokenizer.encode(text)
    assert error.value.field == "text"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("hello world and Paris", ["'world'", "'paris'"]),
        ("it is 7 pm", ["'pm'"]),
        ("7pm", ["'7pm'"]),
        ("7:30 a.m.", ["'am'"]),
        ("12:75", ["'12:75' (no such clock time)"]),
        ("24:00", ["'24:00' (no such clock time)"]),
        ("7:5", ["'7:5'"]),
        ("7:30:15", ["'7:30:15'"]),
        ("45 July", ["'45' (no day of july)"]),
        ("0 july", ["'0' (no day of july)"]),
        ("32nd of july", ["'32nd' (no day of july)", "'of'"]),
        ("2th 11st", ["'2th' (no such ordinal)", "'11st' (no such ordinal)"]),
        ("100th", ["'100th'"]),
        ("3.5", ["'3.5'"]),
        ("1/2 or ½", ["'1/2'", "'or'", "'½'"]),
        ("5² 5^2", ["'5²'", "'^'"]),
        ("50% 20° $5 10÷2", ["'%'", "'°'", "'$'", "'÷'"]),
        ("#cat", ["'#'"]),
        ("two of four", ["'of'"]),
        ("2024-07-04", ["'2024/07/04'"]),
        ("1234567890123", ["'1234567890123' (more than 12 digits)"]),
        ("٣ Ⅳ 你好", ["'٣'", "'iv'", "'你好'"]),
        ("i am x", ["'am'", "'x'"]),
        ("don't", ['"don\'t"']),
    ],
)
def test_what_cannot_be_said_is_named(tokenizer: ThinkerTokenizer, text: str, named: list[str]) -> None:
    with pytest.raises(VocabularyError) as error:
        tokenizer.encode(text)
    assert error.value.field == "text" and error.value.allowed
    for name in named:
        assert name in str(error.value)


def test_a_word_is_named_once_and_the_list_ends(tokenizer: ThinkerTokenizer) -> None:
    with pytest.raises(VocabularyError) as error:
        tokenizer.encode("paris paris hello paris")
    assert str(error.value).count("paris") == 1 and "hello" not in str(error.value).split("(allowed")[0]
    with pytest.raises(VocabularyError, match="and 15 more"):
        tokenizer.encode(" ".join(f"q{chr(97 + i)}" for i in range(25)))


@pytest.mark.parametrize("text", ["a " * 33, "september " * 12, "7 " * 14, "cat" * 400, "😀" * 1001])
def test_too_long(tokenizer: ThinkerTokenizer, text: str) -> None:
    with pytest.raises(TextTooLongError):
        tokenizer.encode(text)


def test_longest_texts_fit(tokenizer: ThinkerTokenizer) -> None:
    assert len(tokenizer.encode("a " * 32)) == 34
    assert len(tokenizer.encode("september " * 9)) == 11


def test_any_text_is_encoded_or_refused(tokenizer: ThinkerTokenizer) -> None:
    r = random.Random(1)
    parts = [*tokenizer.words, *"0123456789", *"+-−–x*×=#?:/.,'&", "th", "st", "of", "7:30", "4th", "½", "%", "é", "\u200d", "😀"]
    good = 0
    for _ in range(5_000):
        text = "".join(r.choice(parts) + r.choice(("", " ", " ")) for _ in range(r.randint(1, 8)))
        try:
            ids = tokenizer.encode(text)
        except BadRequestError:
            continue
        good += 1
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.encode(normalise(text)) == ids
    assert good > 500


def test_ordinal_suffixes() -> None:
    numbers = (1, 2, 3, 4, 11, 12, 13, 21, 22, 23, 30, 91)
    assert " ".join(map(ordinal_suffix, numbers)) == "st nd rd th th th th st nd rd th st"


def test_held_out_file_is_disjoint_from_training(tokenizer: ThinkerTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(GRAMMAR), *sys.path])
    import grammar

    import data

    rows = [json.loads(line) for line in (DATA / "thinker_heldout.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = {normalise(row["text"]) for row in rows}
    assert len(texts) == len(rows) == 600
    assert {row["category"] for row in rows} == set(grammar.CATEGORIES)
    texts |= {normalise(p["text"]) for p in json.loads((DATA / "voice_prompts.json").read_text())["prompts"]}
    stream = data.examples(seed=0, held=False)
    trained = [next(stream) for _ in range(20_000)]
    assert not texts & {e.written for e in trained}
    for e in trained[:5_000]:
        assert normalise(e.written) == e.written
        assert tuple(tokenizer.encode(e.written)[1:-1]) == e.ids


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("7", "seven"), ("0", "zero"), ("13", "thirteen"), ("40", "forty"), ("42", "forty two"), ("07", "zero seven"),
        ("305", "three zero five"), ("1984", "nineteen eighty four"), ("2010", "twenty ten"),
        ("1900", "one nine zero zero"), ("2005", "two zero zero five"),
    ],
)  # fmt: skip
def test_the_grammar_reads_numbers(text: str, spoken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(GRAMMAR), *sys.path])
    import atoms

    assert " ".join(atoms.number(text).spoken) == spoken


@pytest.mark.parametrize("text", ["8 / 2", "1/2", "6 /3", "10/ 5 = 2"])
def test_a_division_is_refused_not_dropped(text: str) -> None:
    with pytest.raises(VocabularyError, match="/"):
        ThinkerTokenizer().encode(text)
