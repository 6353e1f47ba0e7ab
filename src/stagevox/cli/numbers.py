"""Numbers on the command line, for argparse."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def integer(low: int, high: float = math.inf) -> Callable[[str], int]:
    """A whole number from ``low`` to ``high``."""

    def integer(given: str) -> int:
        number = int(given)
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"not from {low} to {high}: {given}")
        return number

    return integer


def number(low: float, *, above: bool = False) -> Callable[[str], float]:
    """A number of at least ``low``, or ``above`` it."""

    def number(given: str) -> float:
        value = float(given)
        if math.isnan(value) or value < low or (above and value == low):
            raise argparse.ArgumentTypeError(f"not {'above' if above else 'at least'} {low:g}: {given}")
        return value

    return number


def seconds(given: str) -> float:
    """A finite number of seconds above 0."""
    value = float(given)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"not a number of seconds above 0: {given}")
    return value
