"""Voices: the model's own, and OpenAI's names for them."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter

from stagevox.errors import UnknownVoiceError

from .protocol.chat import VoiceId
from .protocol.lists import Voice, VoiceList
from .state import ServerState

OPENAI_VOICES = (
    "alloy",
    "ash",
    "ballad",
    "cedar",
    "coral",
    "echo",
    "fable",
    "marin",
    "nova",
    "onyx",
    "sage",
    "shimmer",
    "verse",
)
"""Names that OpenAI's clients send. They say nothing about how a voice sounds here."""


def aliases(voices: Sequence[str]) -> dict[str, str]:
    """OpenAI's names to the model's voices, dealt out in order; a voice that has such a name keeps it."""
    return {name: voices[number % len(voices)] for number, name in enumerate(OPENAI_VOICES) if voices and name not in voices}


def resolve_voice(given: str | VoiceId | None, voices: Sequence[str], field: str) -> str | None:
    """The model's voice that is meant; None for its default.

    Raises:
        UnknownVoiceError: no such voice, to the letter; ``field`` is its name.
    """
    if given is None:
        return None
    name = given.id if isinstance(given, VoiceId) else given
    if name in voices:
        return name
    voice = aliases(voices).get(name)
    if voice is None:
        raise UnknownVoiceError(field, f"no voice {name[:100]!r}", voices)
    return voice


def router(state: ServerState) -> APIRouter:
    """``GET /v1/audio/voices``."""
    routes = APIRouter(tags=["voices"])

    @routes.get("/v1/audio/voices", response_model=VoiceList)
    async def list_voices() -> VoiceList:
        """The model's voices, the default first."""
        voices = state.blueprint.front_end.voices
        names = aliases(voices)
        data = [
            Voice(id=voice, object="voice", default=number == 0, aliases=[name for name, own in names.items() if own == voice])
            for number, voice in enumerate(voices)
        ]
        return VoiceList(object="list", data=data, voices=list(voices))

    return routes
