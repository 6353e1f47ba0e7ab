"""What the server tells of itself: its models and version, what each stage has done, and its counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from .outcome import Outcome


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Totals at one time."""

    stages: Mapping[str, Mapping[str, float]] | None
    """``steps``, ``tokens`` and ``seconds`` by stage; None: the server doesn't say."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """By name and labels."""


async def about(http: httpx.AsyncClient) -> dict[str, Any]:
    """Version and models; None for what can't be had."""
    version = await _json(http, "version")
    models = await _json(http, "v1/models")
    names = [model.get("id") for model in models["data"]] if models and isinstance(models.get("data"), list) else None
    return {"version": version.get("version") if version else None, "models": names}


async def snapshot(http: httpx.AsyncClient) -> Snapshot:
    """The totals now."""
    timings = await _json(http, "v1/timings")
    stages = {stage["name"]: {key: stage[key] for key in KEYS} for stage in timings["stages"]} if timings else None
    return Snapshot(stages, await _counters(http))


KEYS = ("steps", "tokens", "seconds")


def between(before: Snapshot, after: Snapshot) -> dict[str, dict[str, float | None]] | None:
    """What each stage did meanwhile, and its milliseconds a token and a step; None if the server doesn't say."""
    if before.stages is None or after.stages is None:
        return None
    found: dict[str, dict[str, float | None]] = {}
    for name, totals in after.stages.items():
        earlier = before.stages.get(name, {})
        steps, tokens, seconds = (totals[key] - earlier.get(key, 0) for key in KEYS)
        found[name] = {
            "steps": steps,
            "tokens": tokens,
            "seconds": seconds,
            "ms_per_token": 1e3 * seconds / tokens if tokens else None,
            "ms_per_step": 1e3 * seconds / steps if steps else None,
        }
    return found


def counted(before: Snapshot, after: Snapshot) -> dict[str, float]:
    """The counters that moved, by how much."""
    moved = {name: value - before.counters.get(name, 0.0) for name, value in after.counters.items()}
    return {name: value for name, value in moved.items() if value}


async def look_up(http: httpx.AsyncClient, outcomes: list[Outcome]) -> None:
    """Add to each outcome what the server kept of it, the latest first; stops where it kept nothing."""
    for outcome in sorted(outcomes, key=lambda one: one.sent_at, reverse=True):
        if outcome.ok and outcome.server_id:
            kept = await _json(http, f"v1/timings/{outcome.server_id}")
            if kept is None:
                return
            outcome.server = kept
            outcome.text_tokens = kept.get("text_tokens") if outcome.text_tokens is None else outcome.text_tokens
            outcome.audio_tokens = kept.get("audio_tokens") if outcome.audio_tokens is None else outcome.audio_tokens
            outcome.finish_reason = outcome.finish_reason or kept.get("finish_reason")


async def _counters(http: httpx.AsyncClient) -> dict[str, float]:
    try:
        answer = await http.get("metrics")
        if answer.status_code != 200:
            return {}
        families = list(text_string_to_metric_families(answer.text))
    except (httpx.HTTPError, ValueError):
        return {}
    found = {}
    for family in families:
        if family.type == "counter":
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
                    found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


async def _json(http: httpx.AsyncClient, path: str) -> dict[str, Any] | None:
    try:
        answer = await http.get(path)
        body = answer.json() if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
    return body if isinstance(body, dict) else None
