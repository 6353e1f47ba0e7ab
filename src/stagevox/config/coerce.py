"""Values as YAML users write them, made what a setting's type asks for; nothing is bent that might have been a mistake.

``"4"`` and ``4.0`` pass for 4, 1 for 1.0, ``"yes"`` for true, ``"1e-3"`` for 0.001. Not: 1 for true, true for 1, 4 for ``"4"``,
4.5 for 4.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from .yaml_text import plain_scalar

T = TypeVar("T")

_BYTES = re.compile(r"^([0-9]+(?:\.[0-9]+)?) ?([kKMGT])(i?)(B?)$")
_COUNT = re.compile(r"^([0-9]+(?:\.[0-9]+)?)([kKmMgG])$")
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


def candidates(value: Any) -> Iterator[Any]:
    """``value``, then what it may stand for."""
    yield value
    for unquoted in (value, _each(value, _unquoted)):
        yield unquoted
        yield _each(unquoted, _whole)


def coerce(check: Callable[[Any], T], value: Any) -> T:
    """The first reading of ``value`` that passes ``check``; raises the ``ValueError`` or error of ours for ``value`` itself."""
    first: Exception | None = None
    for candidate in candidates(value):
        try:
            return check(candidate)
        except Exception as error:
            first = first or error
    assert first is not None
    raise first


def checker(adapter: TypeAdapter[Any]) -> Callable[[Any], Any]:
    """A check of plain values against a type, as JSON: lists pass for tuples, names for enums. Returns the plain value."""

    def check(value: Any) -> Any:
        if isinstance(value, int) and value.bit_length() > 64:
            raise ValueError("an integer of more than 64 bits")
        try:
            text = json.dumps(value, allow_nan=False)
        except ValueError:
            raise ValueError(f"not a finite number: {value!r}") from None
        try:
            adapter.validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ValueError(
                f"{shortened(repr(value))}: {first['msg'][0].lower()}{first['msg'][1:]}{_hint(adapter, value)}"
            ) from None
        return value

    return check


def shortened(text: str, length: int = 200) -> str:
    """A text for a message of one line, cut if it is long."""
    return text if len(text) <= length else f"{text[:length]}..."


def byte_size(value: Any) -> Any:
    """A text such as ``32 MiB`` or ``1.5GB`` as a number of bytes; anything else as it is.

    KiB, Ki are 1024 bytes, kB and KB 1000; a bare letter is vLLM's: k is 1000, K is 1024, M 1024 * 1024.
    """
    found = _BYTES.match(value) if isinstance(value, str) else None
    if found is None:
        return value
    number, letter, binary, byte = found.groups()
    return _times(number, letter, 1024 if binary or (not byte and letter != "k") else 1000, value)


def count(value: Any) -> Any:
    """A text such as ``4k`` (4000) or ``4K`` (4096) as a number, as vLLM reads it; anything else as it is."""
    found = _COUNT.match(value) if isinstance(value, str) else None
    return _times(found[1], found[2], 1000 if found[2].islower() else 1024, value) if found else value


def _times(number: str, letter: str, base: int, otherwise: Any) -> Any:
    size = float(number) * base ** _POWERS[letter.upper()]
    return int(size) if size.is_integer() else otherwise


def _hint(adapter: TypeAdapter[Any], value: Any) -> str:
    """For a truth value or a number that would do as a text: YAML has read more into it than was meant."""
    if isinstance(value, bool):
        texts = ["on", "yes", "true"] if value else ["off", "no", "false"]
    elif isinstance(value, int | float):
        texts = [str(value)]
    else:
        return ""
    for text in texts:
        try:
            adapter.validate_python(text, strict=True)
        except ValidationError:
            continue
        return "; put it in quotes if a text is meant"
    return ""


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """``change`` for a scalar, or for each item of a list."""
    return [change(item) for item in value] if isinstance(value, list) else change(value)


def _unquoted(value: Any) -> Any:
    return plain_scalar(value.strip()) if isinstance(value, str) else value


def _whole(value: Any) -> Any:
    """A float without a fraction as an integer, as far as floats count exactly."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer() and abs(value) <= 2**53:
        return int(value)
    return value
