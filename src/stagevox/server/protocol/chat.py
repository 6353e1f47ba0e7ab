"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .base import Number, RequestModel, ResponseModel, StageParams
from .messages import Message

MAX_STOPS = 4
MAX_MESSAGES = 4096
MAX_MODALITIES = 16


class VoiceId(RequestModel):
    """A voice as an object, which OpenAI's clients may send."""

    id: str


class AudioOptions(RequestModel):
    """How the speech of an answer is to be."""

    voice: str | VoiceId | None = None
    format: str = "wav"
    sample_rate: int | None = Field(
        default=None, description="Hz of the file. Default: the model's, but 24000 for pcm16, as OpenAI's."
    )


class StreamOptions(RequestModel):
    """What a stream holds besides the answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(default=None, description="Taken and ignored.")


class ChatRequest(RequestModel):
    """Honoured, harmless and refused fields; docs/serving.md says which is which."""

    # fail_fast: pydantic would keep an error for each wrong item, which takes hundreds of times the memory of the item.
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    model: str | None = None
    modalities: (
        Annotated[list[Literal["text", "audio"]], Field(min_length=1, max_length=MAX_MODALITIES, fail_fast=True)] | None
    ) = None
    audio: AudioOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    seed: int | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    min_tokens: int | None = None
    repetition_penalty: Number | None = None
    stage_params: StageParams | None = None

    # Harmless: what OpenAI's clients send and no answer depends on.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    parallel_tool_calls: bool | None = None

    # Refused unless they ask for nothing.
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_cap(self) -> ChatRequest:
        caps = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(caps) > 1:
            raise ValueError("max_tokens and max_completion_tokens are one setting; they were given two values")
        return self


class PromptDetails(ResponseModel):
    """Of the prompt's tokens."""

    audio_tokens: int
    cached_tokens: int


class CompletionDetails(ResponseModel):
    """Of the answer's tokens."""

    text_tokens: int
    audio_tokens: int
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(ResponseModel):
    """Tokens of all choices together. Audio tokens are codec frames."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Audio(ResponseModel):
    """The speech of a message."""

    id: str
    data: str
    expires_at: int
    transcript: str


class AnswerMessage(ResponseModel):
    """What the assistant said."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    audio: Audio | None = None


class Choice(ResponseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    finish_reason: Literal["stop", "length"]
    logprobs: None = None


class ChatCompletion(ResponseModel):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class DeltaAudio(ResponseModel):
    """A piece of speech, of its transcript, or both; ``expires_at`` comes with the last."""

    id: str
    data: str | None = None
    transcript: str | None = None
    expires_at: int | None = None


class Delta(ResponseModel):
    """What a chunk adds to a choice."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    audio: DeltaAudio | None = None


class ChunkChoice(ResponseModel):
    """A choice in a chunk."""

    index: int
    delta: Delta
    finish_reason: Literal["stop", "length"] | None
    logprobs: None = None


class ChatChunk(ResponseModel):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
