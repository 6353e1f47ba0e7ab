"""How word errors are counted: what only the spelling does is forgiven, nothing else."""

import pytest

from support.transcribe import Errors, readings, word_error_rate, word_errors


@pytest.mark.parametrize(
    ("text", "heard"),
    [
        ("sixty two minus five is fifty seven", "60 to minus 5 is 57."),
        ("fifty seven minus thirty is twenty seven", "57-30 is 27."),
        ("nine zero two nine zero", "902-90."),
        ("eight seven one one", "871-1"),
        ("five six five one seven nine", "565179"),
        ("four one three eight two", "For 1382."),
        ("it was august twelve", "It was August 12th."),
        ("ten twenty", "10:20"),
        ("seven plus three equals ten", "7 + 3 = 10"),
        ("three times four", "3x4"),
        ("it is ten to two now", "It’s 10 to 2, now!"),
        ("what is there", "what's their"),
        ("one two three four five six seven", "1234567"),
    ],
)
def test_spelling_is_forgiven(text: str, heard: str) -> None:
    assert word_errors(text, heard) == Errors(0, len(text.split()))


@pytest.mark.parametrize(
    ("text", "heard", "wrong"),
    [
        ("seven seven two six", "776", 1),
        ("twenty eight plus seventeen equals forty five", "28 plus 17 equals 4.", 2),
        ("the answer is thirty five", "The answer is 36.", 1),
        ("the answer is thirty five", "The answer is not 35.", 1),
        ("black black red", "black red", 1),
        ("nine zero two nine zero", "902 902 902.", 3),
        ("two seven seven", "", 3),
    ],
)
def test_errors_are_not(text: str, heard: str, wrong: int) -> None:
    assert word_errors(text, heard).wrong == wrong


def test_readings() -> None:
    assert readings("902") == ["nine zero two", "ninety two"]
    assert readings("05") == ["zero five"]
    assert readings("17") == ["one seven", "seventeen"]
    assert readings("1234567") == ["one two three four five six seven"]


def test_the_rate_is_over_all_words() -> None:
    assert word_error_rate([Errors(2, 4), Errors(0, 6)]) == 0.2
    assert Errors(2, 4).rate == 0.5
