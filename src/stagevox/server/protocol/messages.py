"""The messages of a conversation, with media."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .base import RequestModel

MAX_PARTS = 1024
"""Of one message."""


class TextPart(RequestModel):
    """A text."""

    type: Literal["text"]
    text: str


class RefusalPart(RequestModel):
    """An earlier answer that was a refusal; read as text."""

    type: Literal["refusal"]
    refusal: str


class AudioData(RequestModel):
    """A sound file in base64."""

    data: str
    format: str | None = None


class AudioPart(RequestModel):
    """A sound, sent with the message."""

    type: Literal["input_audio"]
    input_audio: AudioData


class MediaUrl(RequestModel):
    """An ``http(s):``, ``data:`` or ``file:`` URL."""

    url: str
    detail: str | None = None


class ImageUrlPart(RequestModel):
    """An image behind a URL."""

    type: Literal["image_url"]
    image_url: MediaUrl


class AudioUrlPart(RequestModel):
    """A sound behind a URL."""

    type: Literal["audio_url"]
    audio_url: MediaUrl


class VideoUrlPart(RequestModel):
    """A video behind a URL."""

    type: Literal["video_url"]
    video_url: MediaUrl


Part = Annotated[
    TextPart | RefusalPart | AudioPart | ImageUrlPart | AudioUrlPart | VideoUrlPart,
    Field(discriminator="type"),
]


class EarlierAudio(BaseModel):
    """The speech of an earlier answer: its id is enough while the server remembers it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    id: str
    transcript: str | None = None


class Message(RequestModel):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    audio: EarlierAudio | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, data: Any) -> Any:
        """Clients send an answer back with all its empty fields."""
        if isinstance(data, dict) and data.get("role") == "assistant":
            return {key: value for key, value in data.items() if value is not None and value != []}
        return data
