"""The figures of one run, and their spread over several. Failures count as failures and as nothing else."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .load import Load
from .options import Options
from .outcome import Outcome

SPREADS = ("duration", "request_throughput", "audio_seconds_per_second", "continuity", "underruns", "failed")
"""Besides latencies, what is compared between repeats."""


def figures(load: Load, options: Options) -> dict[str, Any]:
    """Totals, rates and latencies: ``mean_``, ``std_``, ``min_``, ``max_`` and ``p50_`` ... of ``ttft_ms`` (first text),
    ``ttfa_ms`` (first sample), ``e2el_ms`` (last byte), ``audio_rtf``, ``chunk_gap_ms`` and ``late_ms`` (sent after it was due).
    """
    good = [outcome for outcome in load.outcomes if outcome.ok]
    bad = [outcome for outcome in load.outcomes if not outcome.ok]
    seconds = load.seconds
    audio = sum(outcome.audio_seconds for outcome in good)
    found: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(bad),
        "failures": dict(Counter(outcome.failure for outcome in bad)),
        "finish_reasons": dict(Counter(outcome.finish_reason or "unknown" for outcome in good)),
        "most_in_flight": load.most_in_flight,
        "request_throughput": len(good) / seconds if seconds else 0.0,
        "total_audio_seconds": audio,
        "total_audio_samples": sum(outcome.num_samples for outcome in good),
        "audio_seconds_per_second": audio / seconds if seconds else 0.0,
        "total_text_tokens": _total(outcome.text_tokens for outcome in good),
        "total_audio_tokens": _total(outcome.audio_tokens for outcome in good),
    }
    found |= _listening(good)
    series: dict[str, list[float]] = {
        "ttft_ms": [1e3 * outcome.ttft for outcome in good if outcome.ttft is not None],
        "ttfa_ms": [1e3 * outcome.ttfa for outcome in good if outcome.ttfa is not None],
        "e2el_ms": [1e3 * outcome.e2el for outcome in good],
        "audio_rtf": [outcome.rtf for outcome in good if outcome.rtf is not None],
        "chunk_gap_ms": [1e3 * gap for outcome in good for gap in outcome.gaps],
    }
    if math.isfinite(options.request_rate):
        series["late_ms"] = [1e3 * (outcome.sent_at - outcome.due_at) for outcome in load.outcomes]
    for name, values in series.items():
        if values:
            found |= _statistics(name, values, options.percentiles)
    found |= _by_the_server(good, options.percentiles)
    return found


def _listening(good: Sequence[Outcome]) -> dict[str, Any]:
    """What players that start at the first chunk would have made of it."""
    plays = [play for outcome in good if (play := outcome.playback()) is not None]
    if not plays:
        return {}
    audio, stalled = sum(play.audio_seconds for play in plays), sum(play.stalled_seconds for play in plays)
    return {
        "underruns": sum(play.underruns for play in plays),
        "requests_with_underruns": sum(play.underruns > 0 for play in plays),
        "stalled_seconds": stalled,
        "continuity": audio / (audio + stalled),
        "worst_continuity": min(play.continuity for play in plays),
        "needed_head_start_ms": 1e3 * max(play.needed_head_start for play in plays),
    }


def _by_the_server(good: Sequence[Outcome], percentiles: Sequence[float]) -> dict[str, Any]:
    """Where the time went by the server's own records: the queue, then each stage's first and last output."""
    kept = [(outcome, outcome.server) for outcome in good if outcome.server is not None]
    if not kept:
        return {}
    series: dict[str, list[float]] = {}
    for outcome, record in kept:
        for key, value in (("server_queue_ms", record.get("queue_s")), ("server_e2el_ms", record.get("finished_s"))):
            if value is not None:
                series.setdefault(key, []).append(1e3 * value)
        if record.get("finished_s") is not None:
            series.setdefault("outside_server_ms", []).append(1e3 * (outcome.e2el - record["finished_s"]))
        for stage in record.get("stages", ()):
            for key in ("first", "last"):
                if stage.get(f"{key}_s") is not None:
                    series.setdefault(f"{stage['name']}_{key}_ms", []).append(1e3 * stage[f"{key}_s"])
    found: dict[str, Any] = {
        "server_audio_seconds": sum(record["audio_seconds"] for _, record in kept),
        "server_records": len(kept),
    }
    for name, values in series.items():
        found |= _statistics(name, values, percentiles)
    return found


def _statistics(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    array = np.asarray(values)
    found = {f"mean_{name}": array.mean(), f"std_{name}": array.std(), f"min_{name}": array.min(), f"max_{name}": array.max()}
    found |= {f"p{percentile:g}_{name}": np.percentile(array, percentile) for percentile in percentiles}
    return {key: float(value) for key, value in found.items()}


def _total(values: Any) -> int | None:
    """Their sum; None unless all are known."""
    known = list(values)
    return None if None in known or not known else sum(known)


def bands(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Median, least and greatest of the repeats of one run: a difference within them says nothing."""
    names = [name for name in runs[0] if name in SPREADS or name.startswith(("mean_", "p"))]
    found = {}
    for name in names:
        values = [run[name] for run in runs if isinstance(run.get(name), int | float)]
        if len(values) == len(runs):
            found[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    for stage in runs[0].get("stages") or {}:
        values = [run["stages"][stage]["ms_per_token"] for run in runs if run.get("stages")]
        if len(values) == len(runs) and None not in values:
            found[f"{stage}_ms_per_token"] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return found
