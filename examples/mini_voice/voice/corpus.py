"""The texts that the teacher speaks: a closed vocabulary of 138 words.

    python corpus.py DATA_FOLDER --utterances 9000 --more 13500

Writes ``train.txt``, ``held.txt`` (one text in twenty, never trained on), ``held_kinds.txt`` (the template class of each) and
``more.txt`` (a second batch for training, encoded with the first batch's codebooks). With the default numbers the texts are those
of the shipped voice: the order of the random draws is part of the recipe.
"""

# ruff: noqa: SIM905
from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path

DIGITS = "zero one two three four five six seven eight nine".split()
TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
DAYS = "monday tuesday wednesday thursday friday saturday sunday".split()
MONTHS = "january february march april may june july august september october november december".split()
COLOURS = "red green blue yellow black white orange purple brown pink".split()
ANIMALS = "cat dog bird fish horse cow lion rabbit".split()
OBJECTS = "book table chair door window car house ball apple cup box flower".split()
PARTS = "morning evening afternoon".split()
LITTLE_WORDS = (
    "plus minus times equals is the a my your i we you see have want need it there here what where time number today "
    "tomorrow yesterday was half past quarter to in on at now and hello goodbye good thank please yes no welcome open close big "
    "small water music very much answer ready go stop left right"
).split()
THINGS = ANIMALS + OBJECTS
VOCABULARY = sorted({*DIGITS, *TEENS, *TENS, *DAYS, *MONTHS, *COLOURS, *THINGS, *PARTS, *LITTLE_WORDS})

RANDOM_WORDS = 13  # the class of random word strings; evaluation leaves it out
HELD_OUT_SHARE = 20

Make = Callable[[random.Random], str]


def say(number: int) -> str:
    """0..99 in words."""
    if number < 20:
        return (DIGITS + TEENS)[number]
    return TENS[number // 10 - 2] + ("" if number % 10 == 0 else " " + DIGITS[number % 10])


def noun_phrase(r: random.Random, determiner: str = "") -> str:
    determiner = determiner or r.choice(["the", "the", "my", "your", "a"])
    words = []
    if r.random() < 0.3:
        words.append(r.choice(["big", "small"]))
    if r.random() < 0.6:
        words.append(r.choice(COLOURS))
    words.append(r.choice(THINGS))
    if determiner == "a" and words[0][0] in "aeiou":
        determiner = "the"
    return " ".join([determiner, *words])


def clock(r: random.Random) -> str:
    kind, hour = r.random(), say(r.randint(1, 12))
    if kind < 0.4:
        return f"half past {hour}"
    if kind < 0.6:
        return f"quarter past {hour}"
    if kind < 0.8:
        return f"quarter to {hour}"
    minutes = say(r.choice([5, 10, 20]))
    return f"{minutes} {r.choice(['past', 'to'])} {hour}"


def digit_string(r: random.Random) -> str:
    return " ".join(r.choice(DIGITS) for _ in range(r.randint(3, 6)))


def numbers(r: random.Random) -> str:
    template = r.choice(
        ["number {}", "the number is {}", "the answer is {}", "{} and {}", "{} {}", "go to number {}"],
    )
    return template.replace("{}", say(r.randint(0, 99)), 1).replace("{}", say(r.randint(0, 99)))


def arithmetic(r: random.Random) -> str:
    equals, kind = r.choice(["is", "is", "equals"]), r.randrange(3)
    if kind == 2:
        a, b = r.randint(0, 9), r.randint(0, 10)
        return f"{say(a)} times {say(b)} {equals} {say(a * b)}"
    a, b = r.randint(0, 60), r.randint(0, 39)
    if kind == 0:
        return f"{say(a)} plus {say(b)} {equals} {say(a + b)}"
    return f"{say(a + b)} minus {say(b)} {equals} {say(a)}"


def times(r: random.Random) -> str:
    template = r.choice([
        "it is {c}", "it is {c} in the {p}", "the time is {c}", "it is {c} now", "see you at {h}", "{d} at {h}",
        "see you {d} at {h}", "see you {d}", "good {p} it is {c}",
    ])  # fmt: skip
    c, h, p = clock(r), say(r.randint(1, 12)), r.choice(PARTS)
    return template.format(c=c, h=h, p=p, d=r.choice([*DAYS, "tomorrow", "today"]))


def days(r: random.Random) -> str:
    template = r.choice([
        "today is {d}", "tomorrow is {d}", "yesterday was {d}", "see you on {d}", "see you on {d} {p}", "good {p} today is {d}",
        "it was {d} yesterday", "we go on {d}",
    ])  # fmt: skip
    return template.format(d=r.choice(DAYS), p=r.choice(PARTS))


def dates(r: random.Random) -> str:
    template = r.choice([
        "it is {m} {n}", "today is {m} {n}", "{d} {m} {n}", "see you in {m}", "we go in {m}", "it was {m} {n}",
        "see you on {m} {n}",
    ])  # fmt: skip
    return template.format(m=r.choice(MONTHS), d=r.choice(DAYS), n=say(r.randint(1, 31)))


def things(r: random.Random) -> str:
    return r.choice([
        f"i see {noun_phrase(r)} and {noun_phrase(r)}", f"we have {noun_phrase(r)}", f"i want {noun_phrase(r)}",
        f"you need {noun_phrase(r)}", f"where is {noun_phrase(r)}", f"here is {noun_phrase(r)}",
        f"there is {noun_phrase(r)} here", f"i see {noun_phrase(r)} on {noun_phrase(r)}",
    ])  # fmt: skip


def properties(r: random.Random) -> str:
    thing = noun_phrase(r, r.choice(["the", "my", "your"]))
    very = r.choice(["very", "", "", ""])
    return f"{thing} is {very} {r.choice([*COLOURS, 'big', 'small', 'ready', 'open', 'here', 'there'])}".replace("  ", " ")


def requests(r: random.Random) -> str:
    return r.choice([
        f"please {r.choice(['open', 'close'])} {noun_phrase(r, r.choice(['the', 'my', 'your']))}",
        f"{r.choice(['open', 'close'])} {noun_phrase(r, 'the')} please",
        f"please stop the {r.choice(['car', 'music'])} {r.choice(['now', 'here'])}",
        f"go {r.choice(['left', 'right'])} at the {r.choice(THINGS)}",
        f"go to {noun_phrase(r, 'the')} on the {r.choice(['left', 'right'])}",
    ])  # fmt: skip


def greetings(r: random.Random) -> str:
    template = r.choice([
        "hello good {p}", "good {p} and welcome", "hello and welcome", "thank you very much", "goodbye see you {d}",
        "hello here is your {t}", "good {p} where is my {t}", "welcome to my house", "thank you and goodbye",
        "hello today is {w}",
    ])  # fmt: skip
    p = r.choice(PARTS)
    d = r.choice(["tomorrow", "today", "in the morning", "on monday", "on friday", "on sunday"])
    return template.format(p=p, d=d, t=r.choice(THINGS), w=r.choice(DAYS))


def replies(r: random.Random) -> str:
    template = r.choice([
        "yes please", "no thank you", "yes i see the {t}", "no i want the {c} {t}", "yes it is {n}", "no it is {n}",
        "yes we have {n}",
        "no it was {d}", "yes today is {d}",
    ])  # fmt: skip
    t, c, n = r.choice(THINGS), r.choice(COLOURS), say(r.randint(0, 99))
    return template.format(t=t, c=c, n=n, d=r.choice(DAYS))


def questions(r: random.Random) -> str:
    template = r.choice([
        "i want {n} now", "we need water and {n}", "what is {a} plus {b}", "what is {a} times {b}", "what time is it now",
        "where is the {t} now", "what is your number", "my number is {x}", "your number is {x}", "what is on the {t}",
    ])  # fmt: skip
    n, a, b, t = noun_phrase(r), say(r.randint(0, 50)), say(r.randint(0, 12)), r.choice(THINGS)
    return template.format(n=n, a=a, b=b, t=t, x=" ".join(r.choice(DIGITS) for _ in range(r.randint(3, 4))))


def colours(r: random.Random) -> str:
    return " ".join(r.choice(COLOURS) for _ in range(r.randint(3, 4)))


def random_words(r: random.Random) -> str:
    return " ".join(r.choice(VOCABULARY) for _ in range(r.randint(3, 6)))


KINDS: tuple[tuple[Make, int], ...] = (
    (digit_string, 24), (numbers, 8), (arithmetic, 12), (times, 9), (days, 6), (dates, 5), (things, 9), (properties, 6),
    (requests, 6), (greetings, 4), (replies, 4), (questions, 4), (colours, 3), (random_words, 14),
)  # fmt: skip


def corpus(count: int, seed: int = 0) -> list[tuple[int, str]]:
    """``count`` distinct texts of 2 to 9 words with their template classes."""
    r, out, seen = random.Random(seed), [], set()
    while len(out) < count:
        kind = r.choices(range(len(KINDS)), [weight for _, weight in KINDS])[0]
        text = KINDS[kind][0](r)
        if text not in seen and 2 <= len(text.split()) <= 9:
            seen.add(text)
            out.append((kind, text))
    return out


def split(rows: list[tuple[int, str]]) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Training texts in their order, then held-out ones."""
    order = list(range(len(rows)))
    random.Random(7).shuffle(order)
    held = order[: len(rows) // HELD_OUT_SHARE]
    out = set(held)
    return [row for i, row in enumerate(rows) if i not in out], [rows[i] for i in held]


def second_batch(count: int, taken: set[str]) -> list[str]:
    """More texts for training; the last twelfth or so are runs of digits and of numbers."""
    texts = [t for _, t in corpus(max(1, round(count * 12500 / 13500)), seed=1) if t not in taken][:count]
    r, have = random.Random(5), set(taken)
    while len(texts) < count:
        if r.random() < 0.6:
            text = " ".join(r.choice(DIGITS) for _ in range(r.randint(4, 7)))
        else:
            text = " ".join(say(r.randint(0, 99)) for _ in range(r.randint(2, 3)))
        if text not in have:
            texts.append(text)
            have.add(text)
    r.shuffle(texts)
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--utterances", type=int, default=9000)
    parser.add_argument("--more", type=int, default=13500)
    a = parser.parse_args()
    train, held = split(corpus(a.utterances))
    taken = {t for _, t in train} | {t for _, t in held}
    assert len(taken) == a.utterances
    a.folder.mkdir(parents=True, exist_ok=True)
    files = {
        "train": [t for _, t in train], "held": [t for _, t in held], "held_kinds": [str(k) for k, _ in held],
        "more": second_batch(a.more, taken),
    }  # fmt: skip
    for name, lines in files.items():
        (a.folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
    print({name: len(lines) for name, lines in files.items()})


if __name__ == "__main__":
    main()
