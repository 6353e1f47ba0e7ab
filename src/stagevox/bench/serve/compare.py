"""``stagevox bench compare``: two saved results side by side, with no conclusion inside the noise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagevox.errors import ConfigError

FIXED = (
    "endpoint",
    "modalities",
    "prompts_sha256",
    "num_prompts",
    "request_rate",
    "burstiness",
    "voice",
    "audio_format",
    "extra_body",
)
"""What must be the same in both, or the comparison means nothing."""
LEAST_REPEATS = 3


def load(path: Path) -> dict[str, Any]:
    """Read what ``bench serve --save-result`` has saved.

    Raises:
        ConfigError: no such file, or something else.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        result["bands"], result["runs"]
    except OSError as error:
        raise ConfigError("result", f"can't read {str(path)!r}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError("result", f"{str(path)!r} is no result of bench serve") from None
    return dict(result)


def verdict(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """``lower``, ``higher``, or ``within the noise`` where the bands touch."""
    if after["max"] < before["min"]:
        return "lower"
    return "higher" if after["min"] > before["max"] else "within the noise"


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Lines to print.

    Raises:
        ConfigError: results of different work, or of too few repeats to know the noise.
    """
    other = [name for name in FIXED if before.get(name) != after.get(name)]
    if other:
        raise ConfigError("result", f"the two did different work: {', '.join(other)}")
    by_concurrency = {band["max_concurrency"]: band for band in after["bands"]}
    shared = [
        (band, by_concurrency[band["max_concurrency"]]) for band in before["bands"] if band["max_concurrency"] in by_concurrency
    ]
    if not shared or any(min(one["repeats"], two["repeats"]) < LEAST_REPEATS for one, two in shared):
        raise ConfigError("result", f"no concurrency has {LEAST_REPEATS} repeats in both: the noise isn't known")
    lines = []
    for one, two in shared:
        lines.append(f"concurrency {one['max_concurrency'] or 'no limit'}")
        for name in one["figures"].keys() & two["figures"].keys():
            old, new = one["figures"][name], two["figures"][name]
            ratio = f"{new['median'] / old['median']:.3f}x" if old["median"] else "-"
            lines.append(f"  {name:<34}{old['median']:>11.4g}{new['median']:>11.4g}{ratio:>10}  {verdict(old, new)}")
    return lines
