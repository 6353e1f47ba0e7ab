"""What a chat request asks for, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stagevox.errors import UnknownVoiceError

from .conversation import read_conversation
from .errors import as_api_error, refused
from .generate import Plan
from .protocol.chat import AudioOptions, ChatRequest
from .sampling import by_stage
from .sound import check_sound
from .state import ServerState
from .voices import resolve_voice

ASKS_FOR_NOTHING: Mapping[str, Callable[[Any], bool]] = {
    "logprobs": lambda value: value is False,
    "top_logprobs": lambda value: value == 0,
    "logit_bias": lambda value: value == {},
    "tools": lambda value: value == [],
    "tool_choice": lambda value: value in ("none", "auto"),
    "functions": lambda value: value == [],
    "function_call": lambda value: value in ("none", "auto"),
    "response_format": lambda value: value == {"type": "text"},
    "prediction": lambda value: False,
    "reasoning_effort": lambda value: value == "none",
    "verbosity": lambda value: False,
    "web_search_options": lambda value: False,
}
"""Fields that can't be honoured, and the values besides null with which they ask for nothing."""

SAMPLED = (
    "temperature",
    "top_p",
    "frequency_penalty",
    "presence_penalty",
    "top_k",
    "min_p",
    "min_tokens",
    "repetition_penalty",
)
"""Fields for the stage that writes the text."""


def read_plan(body: ChatRequest, state: ServerState) -> Plan:
    """Check everything that can be checked before the pipeline is asked.

    Raises:
        ApiError: 400 or 404.
    """
    state.check_model(body.model)
    text_stage = state.blueprint.topology.text_stage
    if text_stage is None:
        raise refused("model", "this model speaks and doesn't write: use /v1/audio/speech", "no_text")
    for field, asks_for_nothing in ASKS_FOR_NOTHING.items():
        value = getattr(body, field)
        if value is not None and not asks_for_nothing(value):
            raise refused(field, "is not possible here", "unsupported")
    spoken = "audio" in (body.modalities or ())
    choices = 1 if body.n is None else body.n
    most = min(state.settings.max_choices, state.gate.max_running)
    if choices > most:
        raise refused("n", f"at most {most} choices are possible")
    if body.seed is not None and not 0 <= body.seed <= 2**63 - choices:
        raise refused("seed", "out of range (allowed: 0 to 2^63 - n)")
    if body.audio is not None and not spoken:
        raise refused("audio", 'only goes with modalities ["text", "audio"]')
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "only go with stream: true")
    cap = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    standard = {field: (field, getattr(body, field)) for field in SAMPLED} | {cap: ("max_tokens", getattr(body, cap))}
    sampling, names = by_stage(state, body.stage_params, text_stage, standard)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if "" in stops:
        raise refused("stop", "holds an empty text")
    if stops and spoken:
        raise refused("stop", "can't cut speech: it goes with text only", "unsupported")
    talk = read_conversation(body.messages, state)
    names |= talk.names | {"voice": "audio.voice", "seed": "seed"}
    prompt = talk.prompt
    if spoken:
        options = body.audio or AudioOptions()
        check_sound(options.format, options.sample_rate, None, lambda field: f"audio.{field}")
        try:
            voice = resolve_voice(options.voice, state.blueprint.front_end.voices, "audio.voice")
        except UnknownVoiceError as error:
            raise as_api_error(error) from error
        prompt |= {"voice": voice} if voice is not None else {}
    return Plan(prompt, sampling, talk.media, choices, body.seed, not spoken, tuple(stops), names)
