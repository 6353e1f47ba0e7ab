"""What YAML users write for a type, and what is no such value."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import TypeAdapter

from stagevox.config.coerce import byte_size, checker, coerce, count


@pytest.mark.parametrize(
    "hint, given, value",
    [
        (int, "4", 4),
        (int, 4.0, 4),
        (int, "1e3", 1000),
        (int, "0x10", 16),
        (float, 1, 1),
        (float, "1e-3", 0.001),
        (bool, "yes", True),
        (bool, "Off", False),
        (str, "yes", "yes"),
        (str, "4", "4"),
        (int | None, None, None),
        (int | str, "4", "4"),
        (bool | str | None, "on", "on"),
        (list[int], ["1", 2.0, 3], [1, 2, 3]),
        (dict[str, int], {"a": 1}, {"a": 1}),
        (Literal[1, 8], "8", 8),
        (Literal["auto", "half"], "half", "half"),
    ],
)
def test_taken(hint, given, value):
    found = coerce(checker(TypeAdapter(hint)), given)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    "hint, given, message",
    [
        (int, 4.5, "4.5: input should be a valid integer"),
        (int, True, "True: input should be a valid integer"),
        (int, "yes", "'yes': "),
        (int, "010", "'010': "),
        (int, "4 seqs", "'4 seqs': "),
        (int, "", "'': "),
        (int, 1e300, "1e\\+300: "),
        (bool, 1, "1: input should be a valid boolean"),
        (bool, "1", "'1': "),
        (bool, "y", "'y': "),
        (float, True, "True: "),
        (float, float("nan"), "not a finite number: nan"),
        (float, ".inf", "'.inf': "),
        (str, 4, "4: .*put it in quotes"),
        (str, False, "False: .*put it in quotes"),
        (Literal["on", "off"], True, "True: .*put it in quotes"),
        (list[int], 4, "4: "),
        (int | None, "null", "'null': "),
    ],
)
def test_refused(hint, given, message):
    with pytest.raises(ValueError, match=message):
        coerce(checker(TypeAdapter(hint)), given)


def test_sizes():
    sizes = ["32MiB", "32 Mi", "1.5GB", "2kB", "1k", "1K", "4M", "1Ti"]
    assert [byte_size(text) for text in sizes] == [32 << 20, 32 << 20, 1_500_000_000, 2000, 1000, 1024, 4 << 20, 1 << 40]
    for other in ("32 mb", "MiB", "-1MiB", "1.3 KiB", "32", 7, None):
        assert byte_size(other) == other
    assert [count(text) for text in ("4k", "4K", "1.5k", "2M")] == [4000, 4096, 1500, 2 << 20]
    for other in ("4kB", "4 k", "k", "0.0001k", 7):
        assert count(other) == other
