"""Models and voices, health and version."""

from __future__ import annotations

from typing import Literal

from .base import ResponseModel


class Model(ResponseModel):
    """One name that requests may give as ``model``."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """The packaged model or folder that answers."""


class ModelList(ResponseModel):
    """``GET /v1/models``."""

    object: Literal["list"]
    data: list[Model]


class Voice(ResponseModel):
    """One of the model's own voices."""

    id: str
    object: Literal["voice"]
    default: bool
    aliases: list[str]
    """OpenAI's names that mean this voice."""


class VoiceList(ResponseModel):
    """``GET /v1/audio/voices``."""

    object: Literal["list"]
    data: list[Voice]
    voices: list[str]
    """The ids alone."""


class Health(ResponseModel):
    """``GET /health`` and ``GET /ready``."""

    status: Literal["ok", "starting", "draining", "degraded"]
    stages: dict[str, str]
    requests_running: int
    requests_waiting: int


class Version(ResponseModel):
    """``GET /version``."""

    version: str


class Playground(ResponseModel):
    """``GET /playground/about``: what the page needs before it may ask for more."""

    needs_key: bool
    sample_rate: int
    """Hz of the model."""
    reads_aloud: bool
    """True if ``/v1/audio/speech`` takes a text."""
    examples: list[str]
