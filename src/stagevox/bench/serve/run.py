"""A whole benchmark: warm-ups, a run for each concurrency and repeat, the table, and what is saved."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import wave
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm  # type: ignore[import-untyped]

from stagevox.audio.wav import write_whole
from stagevox.errors import RequestFailedError

from . import server
from .ask import ask
from .figures import bands, figures
from .load import Load, run_load
from .options import Options
from .outcome import Outcome
from .prompts import digest
from .table import band_table, table

SCHEMA = 1
"""Of the JSON file."""


async def benchmark(options: Options) -> dict[str, Any]:
    """Run it and print tables; returns what ``--save-result`` saves.

    Raises:
        RequestFailedError: the server isn't ready in time, or a warm-up failed.
    """
    headers = {"accept-encoding": "identity"}
    if options.api_key is not None:
        headers["authorization"] = f"Bearer {options.api_key}"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    # The whole request has a time limit of its own; proxies of the environment have no place between a benchmark and its server.
    async with httpx.AsyncClient(
        base_url=options.base_url, headers=headers, limits=limits, timeout=None, trust_env=False
    ) as http:
        await _until_ready(http, options)
        result = _head(options) | {"server": await server.about(http)}
        await _warm_up(http, options)
        runs = []
        for concurrency in options.concurrency:
            for repeat in range(1, options.repeats + 1):
                run = await _run(http, options, concurrency, repeat)
                print(table(run, options.percentiles), flush=True)
                runs.append(run)
        result["runs"] = runs
        result["bands"] = []
        if options.repeats > 1:
            for concurrency in options.concurrency:
                alike = [run for run in runs if run["max_concurrency"] == concurrency]
                result["bands"].append({"max_concurrency": concurrency, "repeats": len(alike), "figures": bands(alike)})
                print(band_table(concurrency, result["bands"][-1]["figures"], len(alike)), flush=True)
    return result


async def _until_ready(http: httpx.AsyncClient, options: Options) -> None:
    """Wait for ``/health``, if a wait is asked for."""
    end = time.monotonic() + options.ready_timeout
    while options.ready_timeout:
        with suppress(httpx.HTTPError, TimeoutError):  # one that takes connections may say nothing
            async with asyncio.timeout(max(0.0, end - time.monotonic())):
                if (await http.get("health")).status_code == 200:
                    return
        if time.monotonic() > end:
            raise RequestFailedError(f"{options.base_url} was not ready within {options.ready_timeout:g} s")
        await asyncio.sleep(0.2)


async def _warm_up(http: httpx.AsyncClient, options: Options) -> None:
    for number in range(options.warmups):
        outcome = await ask(http, options, number, options.prompts[number % len(options.prompts)], time.perf_counter())
        if not outcome.ok:
            raise RequestFailedError(f"warm-up {number + 1} of {options.warmups} failed: {outcome.failure}: {outcome.detail}")


async def _run(http: httpx.AsyncClient, options: Options, concurrency: int | None, repeat: int) -> dict[str, Any]:
    before = await server.snapshot(http)
    # Not disable=None: the bar stands on stderr, whose being a terminal is what counts.
    with tqdm(total=options.num_prompts, disable=not (options.progress and sys.stderr.isatty()), leave=False) as bar:
        load = await run_load(http, options, concurrency, options.seed + repeat - 1, lambda _: bar.update() and None)
    after = await server.snapshot(http)
    await server.look_up(http, load.outcomes)
    run: dict[str, Any] = {"max_concurrency": concurrency, "repeat": repeat} | figures(load, options)
    run["stages"] = server.between(before, after)
    run["counters"] = server.counted(before, after)
    wavs = _save_wavs(options, load, f"c{concurrency or 'inf'}-r{repeat}")
    run["requests"] = [_entry(outcome, options, wavs.get(outcome.index)) for outcome in load.outcomes]
    return run


def _save_wavs(options: Options, load: Load, prefix: str) -> dict[int, str]:
    """Write each whole answer's samples as they came; returns the files' names by request."""
    names: dict[int, str] = {}
    if options.save_wavs is None:
        return names
    for outcome in load.outcomes:
        if outcome.ok and outcome.spoken:
            names[outcome.index] = f"{prefix}-{outcome.index:05d}.wav"
            _write_wav(options.save_wavs / names[outcome.index], outcome)
    return names


def _write_wav(path: Path, outcome: Outcome) -> None:
    assert outcome.sample_rate is not None
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(outcome.sample_rate)
        file.writeframes(outcome.samples().astype("<i2").tobytes())


def _entry(outcome: Outcome, options: Options, wav: str | None) -> dict[str, Any]:
    play = outcome.playback() if outcome.ok else None
    entry: dict[str, Any] = {
        "index": outcome.index,
        "prompt": outcome.prompt,
        "id": outcome.server_id,
        "failure": outcome.failure,
        "detail": outcome.detail,
        "late_s": outcome.sent_at - outcome.due_at,
        "ttft_s": outcome.ttft,
        "ttfa_s": outcome.ttfa,
        "e2el_s": outcome.e2el,
        "audio_rtf": outcome.rtf if outcome.ok else None,
        "audio_seconds": outcome.audio_seconds,
        "audio_samples": outcome.num_samples,
        "sample_rate": outcome.sample_rate,
        "text_tokens": outcome.text_tokens,
        "audio_tokens": outcome.audio_tokens,
        "finish_reason": outcome.finish_reason,
        "underruns": play and play.underruns,
        "stalled_s": play and play.stalled_seconds,
        "wav": wav,
    }
    if options.save_detailed:
        entry["text"] = outcome.text
        entry["arrivals"] = [[arrival.at - outcome.sent_at, arrival.samples] for arrival in outcome.arrivals]
        entry["server"] = outcome.server
    return entry


def _head(options: Options) -> dict[str, Any]:
    """What makes two benchmarks comparable."""
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "base_url": options.base_url,
        "endpoint": options.endpoint,
        "modalities": ["audio"] if options.endpoint == "speech" else list(options.modalities),
        "model": options.model,
        "voice": options.voice,
        "audio_format": options.audio_format,
        "extra_body": dict(options.extra_body),
        "prompts": options.prompts_from,
        "prompts_sha256": digest(options.prompts),
        "num_prompts": options.num_prompts,
        "request_rate": options.request_rate if options.request_rate != float("inf") else "inf",
        "burstiness": options.burstiness,
        "seed": options.seed,
        "num_warmups": options.warmups,
        "metadata": dict(options.metadata),
    }


def run(options: Options) -> int:
    """Run it, save it; the exit code: 0, or 1 if in some run nothing succeeded."""
    result = asyncio.run(benchmark(options))
    if options.result is not None:
        write_whole(options.result, (json.dumps(result, indent=2, allow_nan=False) + "\n").encode())
        print(f"saved {options.result}")
    dead = [one for one in result["runs"] if not one["completed"]]
    for one in dead:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in one["failures"].items())
        print(f"stagevox: error: no request succeeded: {kinds}", file=sys.stderr)
    return 1 if dead else 0
