"""YAML of operators: what it means, with lines, and what is refused by name."""

from __future__ import annotations

import random
import time

import pytest

from stagevox.config import yaml_text
from stagevox.config.yaml_text import MAX_BYTES, parse_document, parse_value, plain_scalar, read_document
from stagevox.errors import ConfigError


def parse(text):
    return parse_document(text, "a.yaml", "deploy_config")


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-3", 0.001),
        ("1E5", 1e5),
        ("-.5e+2", -50.0),
        ("5.", 5.0),
        ("1_000", 1000),
        ("0x10", 16),
        ("0o17", 15),
        ("-7", -7),
        ("yes", True),
        ("On", True),
        ("off", False),
        ("NO", False),
        ("null", None),
        ("~", None),
        ("", None),
        (".inf", float("inf")),
        ("-.INF", float("-inf")),
        # no numbers, though YAML 1.1 says so: octal 8, 90 seconds, a day
        ("010", "010"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1__0", "1__0"),
        ("y", "y"),
        ("'4'", "4"),
        ("!!str 4", "4"),
        ("!!float 4", 4.0),
        ("[1, {a: b}]", [1, {"a": "b"}]),
    ],
)
def test_values(text, value):
    found = parse(f"a: {text}").value["a"]
    assert (found, type(found)) == (value, type(value))


def test_keys_are_texts_as_they_are_written():
    assert parse("on: 1\n0: 2\nnull: 3\n1e3: 4").value == {"on": 1, "0": 2, "null": 3, "1e3": 4}


def test_lines():
    document = parse("# a comment\nstages:\n  talker:\n    sizes:\n      - 4\n      - 5\n  thinker: {a: 1,\n    b: 2}\n")
    assert document.line(("stages",)) == 2
    assert document.line(("stages", "talker", "sizes", 1)) == 6
    assert document.line(("stages", "thinker", "b")) == 8
    assert document.line(("stages", "talker", "not there", "at all")) == 3


def test_anchors_and_merges_are_taken():
    document = parse("a: &a {x: 1, y: 2}\nb: &b {y: 3}\nc:\n  <<: [*a, *b]\n  z: 4\n  x: 5\nd: *a")
    assert document.value["c"] == {"x": 5, "y": 2, "z": 4}
    assert document.value["d"] == {"x": 1, "y": 2}
    assert document.line(("c", "x")) == 6 and document.line(("c", "y")) == 1


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)
)


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: 1\nb: 2\na: 3", "a.yaml, line 3: 'a' stands there twice, first in line 1"),
        ("x: {a: 1, 'a': 1}", "line 1: 'a' stands there twice"),
        ("a: {<<: {b: 1}, <<: {c: 1}}", "stands there twice"),
        (BOMB, "more than 10000 values"),
        ("a: &a [*a]", "line 1: an alias inside of what it stands for"),
        ("a: &a {<<: *a}", "line 1: an alias inside of what it stands for"),
        ("a: {<<: 3}", "line 1: << merges mappings only"),
        ("[" * 100_000, "more than 24 levels deep"),
        ("- " * 50_000, "more than 24 levels deep|expected"),
        ("a: !!python/object/apply:os.system [ls]", "the tag !!python/object/apply:os.system is not taken"),
        ("a: !!binary aGk=", "the tag !!binary is not taken"),
        ("a: !env HOME", "the tag !env is not taken"),
        ("!x {a: 1}", "the tag !x is not taken"),
        ("a: !!int x", "not a value of type int: 'x'"),
        ("a: 1\n---\nb: 1", "another document"),
        ("\n? [a]\n: 1", "line 2: a key must be a text"),
        ("a: 1\n\tb: 1", "line 2: "),
        ("a: *b", "undefined alias"),
        ("a: {b: 1", "line 1: expected"),
        ("a: \x00", r"the character U\+0000 is not allowed"),
        ('a: "\\UFFFFFFFF"', "not YAML"),
        ("a: " + "9" * 5000, "a number with too many digits"),
        ("%YAML 3.0\n---\na: 1", "incompatible"),
    ],
)
def test_what_is_refused(text, message):
    started = time.monotonic()
    with pytest.raises(ConfigError, match=message) as caught:
        parse(text)
    assert time.monotonic() - started < 10
    assert caught.value.field == "deploy_config" and "a.yaml" in str(caught.value)


def test_any_text_is_a_document_or_one_named_error():
    random.seed(1)
    seeds = ["a: &x {b: [1, 2.5e3]}\nc:\n  <<: *x\n  'd': |\n    text\n", BOMB[:200], "- !t x\n? y\n: 'z'\n"]
    refused = 0
    for _ in range(1500):
        text = list(random.choice(seeds))
        for _ in range(random.randint(1, 6)):
            text[random.randrange(len(text))] = random.choice("&*!|>'\"%@`{}[],:?-#\n\t <~x1\x07\u2028\U0001f600")
        try:
            parse("".join(text))
        except ConfigError as error:
            refused += 1
            assert error.field == "deploy_config"
    assert 300 < refused < 1500


def test_the_limit_is_on_values_not_on_text():
    assert len(parse("\n".join(f"k{n}: {n}" for n in range(5000))).value) == 5000


def test_files(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: \xc3\xa9")
    assert read_document(path, "deploy_config").value == {"a": "é"}
    for data, message in (
        (b"a: \xff", "is not UTF-8: byte 3"),
        ("a: é".encode("utf-16"), "is not UTF-8: byte 0"),
        (b"#" * (MAX_BYTES + 1), "has more than 256 KiB"),
    ):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=f"^deploy_config: {path} {message}"):
            read_document(path, "deploy_config")
    for missing, message in (
        (tmp_path, "Is a directory"),
        (tmp_path / "b", "No such file"),
        (tmp_path / ("x" * 300), "too long"),
    ):
        with pytest.raises(ConfigError, match=f"can't read .*: .*{message}"):
            read_document(missing, "deploy_config")


def test_an_endless_file_is_refused():
    with pytest.raises(ConfigError, match="has more than 256 KiB"):
        read_document(yaml_text.Path("/dev/zero"), "deploy_config")


def test_values_of_the_command_line():
    assert (
        parse_value("[1, 2]", "x") == [1, 2] and parse_value("{a: on}", "x") == {"a": True} and parse_value("a b", "x") == "a b"
    )
    with pytest.raises(ConfigError, match=r"^x: expected"):
        parse_value("[1", "x")


def test_what_a_text_would_be_without_quotes():
    assert [plain_scalar(text) for text in ("4", "on", "1e3", ".inf", "null", "", "010")] == [
        4,
        True,
        1e3,
        float("inf"),
        "null",
        "",
        "010",
    ]
