"""The names that a misspelt one may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ALL_OF = 12
"""Up to so many names are all listed."""

CLOSE = 0.8
"""How like each other a misspelt name and the one that was meant are, of 1."""

LONGEST = 64
"""Letters of a name that count: the comparison takes the product of both lengths."""


def nearest(name: object, names: Iterable[str], count: int = 3) -> list[str]:
    """All of a few ``names``, or ``count`` of many, the likest first; dashes and capitals don't count."""
    by_likeness = sorted(sorted(names), key=lambda other: -likeness(name, other))
    return by_likeness if len(by_likeness) <= ALL_OF else by_likeness[:count]


def likeness(name: object, other: str) -> float:
    """How like each other two names are: 1 if they are the same."""
    return difflib.SequenceMatcher(None, _flat(str(name)), _flat(other)).ratio()


def _flat(name: str) -> str:
    return name[:LONGEST].lower().replace("-", "_")
