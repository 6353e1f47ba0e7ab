"""What the requests say."""

from __future__ import annotations

import hashlib
from pathlib import Path

from stagevox.errors import ConfigError

BUILT_IN = (
    "sixty two minus nineteen equals forty three",
    "five six five one seven nine",
    "the answer is thirty five",
    "fifty seven minus thirty is twenty seven",
    "thirty one plus nineteen is fifty",
    "go to the small pink chair on the left",
    "thirty seven minus fifteen is twenty two",
    "seven three seven zero three",
)
"""Sentences that the packaged voice can say, of about the same length."""


def read_prompts(path: Path | None) -> tuple[str, ...]:
    """The lines of a UTF-8 file that aren't blank; without one the built-in prompts.

    Raises:
        ConfigError: no such file, not text, or nothing in it.
    """
    if path is None:
        return BUILT_IN
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError("prompts", f"can't read {str(path)!r}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError("prompts", f"{str(path)!r} is not UTF-8") from None
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise ConfigError("prompts", f"{str(path)!r} has no line that isn't blank")
    return prompts


def digest(prompts: tuple[str, ...]) -> str:
    """Tells two sets of prompts apart: the first 16 hexadecimal digits of their SHA-256."""
    return hashlib.sha256("\n".join(prompts).encode()).hexdigest()[:16]
