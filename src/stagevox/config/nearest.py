"""The names that a misspelt one may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ALL_OF = 12
"""Up to so many names are all listed."""


def nearest(name: object, names: Iterable[str], count: int = 3) -> list[str]:
    """All of a few ``names``, or ``count`` of many, the likest first; dashes and capitals don't count."""
    known = sorted(names)
    given = _flat(str(name))
    by_likeness = sorted(known, key=lambda other: -difflib.SequenceMatcher(None, given, _flat(other)).ratio())
    return by_likeness if len(known) <= ALL_OF else by_likeness[:count]


def _flat(name: str) -> str:
    return name.lower().replace("-", "_")
