"""What the benchmarks share: ratios in one run, and a JSON file."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any


def parser(doc: str) -> argparse.ArgumentParser:
    """An argument parser with ``--json`` and ``--rounds``."""
    made = argparse.ArgumentParser(description=doc.strip().splitlines()[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    made.add_argument("--rounds", type=int, default=7, help="interleaved rounds, of which the median counts (default 7)")
    return made


def interleave(first: Callable[[], float], second: Callable[[], float], pairs: int) -> tuple[float, float]:
    """Run two timed actions in turn ``pairs`` times; the median seconds of each."""
    times = [(first(), second()) for _ in range(pairs)]
    return statistics.median(a for a, _ in times), statistics.median(b for _, b in times)


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest of some rounds."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def write(path: Path | None, numbers: dict[str, Any]) -> None:
    """Write the numbers if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(numbers, indent=2) + "\n")
