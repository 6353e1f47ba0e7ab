"""A run, and its repeats, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

WIDTH = 66
LATENCIES = (
    ("ttft_ms", "Time to first text (ms)"),
    ("ttfa_ms", "Time to first audio (ms)"),
    ("e2el_ms", "End to end (ms)"),
    ("audio_rtf", "Audio RTF"),
    ("chunk_gap_ms", "Between chunks of audio (ms)"),
)
TOTALS = (
    ("completed", "Successful requests", "d"),
    ("failed", "Failed requests", "d"),
    ("duration", "Duration (s)", ".2f"),
    ("most_in_flight", "Most requests in flight", "d"),
    ("request_throughput", "Requests per second", ".2f"),
    ("total_text_tokens", "Text tokens", "d"),
    ("total_audio_tokens", "Audio tokens", "d"),
    ("total_audio_seconds", "Speech (s)", ".3f"),
    ("audio_seconds_per_second", "Audio seconds per second", ".2f"),
    ("underruns", "Underruns", "d"),
    ("requests_with_underruns", "Requests with underruns", "d"),
    ("continuity", "Continuity", ".4f"),
    ("needed_head_start_ms", "Head start that would avoid them (ms)", ".1f"),
)


def table(run: Mapping[str, Any], percentiles: Sequence[float]) -> str:
    """One run."""
    limit = "no limit" if run["max_concurrency"] is None else run["max_concurrency"]
    lines = [f" Concurrency {limit}, repeat {run['repeat']} ".center(WIDTH, "=")]
    for key, label, form in TOTALS:
        if run.get(key) is not None:
            lines.append(f"{label + ':':<44}{format(run[key], form):>{WIDTH - 44}}")
    for kind, count in run["failures"].items():
        lines.append(f"{'  ' + kind + ':':<44}{count:>{WIDTH - 44}}")
    lines += _latencies(run, percentiles)
    lines += _stages(run)
    lines += _records(run)
    return "\n".join(lines)


def _latencies(run: Mapping[str, Any], percentiles: Sequence[float]) -> Iterator[str]:
    columns = ["mean", *(f"p{percentile:g}" for percentile in percentiles)]
    yield "-" * WIDTH
    yield f"{'':<30}" + "".join(f"{column.upper() if column != 'mean' else 'Mean':>9}" for column in columns)
    for key, label in LATENCIES:
        if f"mean_{key}" in run:
            places = 4 if key == "audio_rtf" else 1
            yield f"{label:<30}" + "".join(f"{run[f'{column}_{key}']:>9.{places}f}" for column in columns)


def _stages(run: Mapping[str, Any]) -> Iterator[str]:
    if run.get("stages"):
        yield "-" * WIDTH
        yield f"{'Stage':<16}{'Steps':>8}{'Tokens':>9}{'Seconds':>10}{'ms/token':>11}{'ms/step':>12}"
        for name, stage in run["stages"].items():
            each = [f"{stage[key]:.3f}" if stage[key] is not None else "-" for key in ("ms_per_token", "ms_per_step")]
            yield f"{name:<16}{stage['steps']:>8g}{stage['tokens']:>9g}{stage['seconds']:>10.3f}{each[0]:>11}{each[1]:>12}"


def _records(run: Mapping[str, Any]) -> Iterator[str]:
    """Where the time of a request went, by the server's own records."""
    if "mean_server_e2el_ms" in run:
        yield "-" * WIDTH
        yield f"{'Mean, by the records of the server (ms)':<46}{'First':>10}{'Last':>10}"
        yield f"{'queue':<46}{'':>10}{run['mean_server_queue_ms']:>10.1f}"
        for name in run.get("stages") or {}:
            if f"mean_{name}_first_ms" in run:
                yield f"{name:<46}{run[f'mean_{name}_first_ms']:>10.1f}{run[f'mean_{name}_last_ms']:>10.1f}"
        yield f"{'end':<46}{'':>10}{run['mean_server_e2el_ms']:>10.1f}"
        yield f"{'outside the server':<46}{'':>10}{run['mean_outside_server_ms']:>10.1f}"


def band_table(concurrency: int | None, bands: Mapping[str, Mapping[str, float]], repeats: int) -> str:
    """The spread of the repeats at one concurrency."""
    lines = [f" Concurrency {concurrency or 'no limit'}: {repeats} repeats, median (least to greatest) ".center(WIDTH, "=")]
    for name in sorted(bands, key=lambda name: name.split("_", 1)[-1]):
        if name.startswith(("p50_", "p99_")) or not name.startswith(("mean_", "p")):
            band = bands[name]
            lines.append(f"{name + ':':<36}{band['median']:.4g} ({band['min']:.4g} to {band['max']:.4g})")
    return "\n".join(lines)
