"""``GET /v1/timings`` and ``GET /v1/timings/{id}``. Times are seconds from a request's arrival; null: not yet, or never."""

from __future__ import annotations

from typing import Literal

from .base import ResponseModel


class StageTotals(ResponseModel):
    """One stage since the server started."""

    name: str
    steps: int
    tokens: int
    """Token ids, and positions of a generation stage, in its outputs."""
    seconds: float
    """Time inside its steps."""


class Timings(ResponseModel):
    """All stages, in order."""

    object: Literal["timings"]
    stages: list[StageTotals]


class StageTiming(ResponseModel):
    """What a stage gave one request, and when."""

    name: str
    first_s: float | None
    last_s: float | None
    outputs: int
    tokens: int
    marks: list[tuple[float, int]]
    """Its outputs as ``[when, tokens]``; of many, neighbours are joined."""


class RequestTiming(ResponseModel):
    """One request; counts are there once it is over."""

    id: str
    object: Literal["timing"]
    endpoint: str
    stream: bool
    queue_s: float | None
    first_text_s: float | None
    first_audio_s: float | None
    finished_s: float | None
    audio_seconds: float
    audio_rtf: float | None
    prompt_tokens: int
    text_tokens: int
    audio_tokens: int
    finish_reason: str | None
    error: str | None
    stages: list[StageTiming]
