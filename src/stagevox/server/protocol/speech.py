"""``POST /v1/audio/speech``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import Number, RequestModel, ResponseModel, StageParams
from .chat import VoiceId


class SpeechRequest(RequestModel):
    """OpenAI's fields, and ``seed``, ``sample_rate`` and ``stage_params``."""

    input: str
    model: str | None = None
    voice: str | VoiceId | None = None
    instructions: str | None = Field(default=None, description="Refused unless the model takes instructions.")
    response_format: str | None = Field(default=None, description="mp3 (the default), opus, aac, flac, wav, pcm or pcm16.")
    speed: Number | None = Field(default=None, description="0.25 to 4.")
    stream_format: Literal["audio", "sse"] | None = Field(
        default=None,
        description="Send the audio as it is made. Default: pcm as it is made, other formats whole, with exact headers.",
    )
    sample_rate: int | None = Field(
        default=None, description="Hz of the file. Default: the model's, but 24000 for pcm, as OpenAI's."
    )
    seed: int | None = None
    stage_params: StageParams | None = None


class SpeechUsage(ResponseModel):
    """Tokens in and out; those out are text tokens and codec frames together."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpeechDelta(ResponseModel):
    """An event of ``stream_format: sse`` that holds audio."""

    type: Literal["speech.audio.delta"]
    audio: str


class SpeechDone(ResponseModel):
    """The last event of ``stream_format: sse``."""

    type: Literal["speech.audio.done"]
    usage: SpeechUsage
    finish_reason: Literal["stop", "length"]
