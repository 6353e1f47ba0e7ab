"""Messages as the prompt of a model's front end.

A front end that takes ``messages`` gets them all, as ``{"role", "content": [parts]}`` with the parts ``{"type": "text", "text"}``
and ``{"type": "audio" | "image"}``; media stand in fields of their own, in the order of their places. One that takes ``text`` gets
the last message of the user. Videos are refused: front ends take frames, which nothing here makes of a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import refused
from .media import FIELDS, MediaPart
from .protocol.messages import AudioPart, AudioUrlPart, ImageUrlPart, Message, Part, RefusalPart, TextPart, VideoUrlPart
from .state import ServerState


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt without its media, and those."""

    prompt: dict[str, Any]
    media: tuple[MediaPart, ...]
    names: dict[str, str]
    """What the client calls the prompt's fields."""


def read_conversation(messages: Sequence[Message], state: ServerState) -> Conversation:
    """Check the messages against what the model takes.

    Raises:
        ApiError: 400; a message without content, a kind of media that the model doesn't take, or an audio id that is unknown.
    """
    fields = state.blueprint.front_end.fields
    media: list[MediaPart] = []
    turns = [_turn(number, message, state, media) for number, message in enumerate(messages)]
    for part in media:
        if FIELDS[part.kind] not in fields:
            raise refused(part.param, f"this model takes no {part.kind}", "unsupported_media")
    if len(media) > state.settings.max_media_items:
        raise refused("messages", f"{len(media)} images and sounds; at most {state.settings.max_media_items} are allowed")
    if "messages" in fields:
        return Conversation({"messages": turns}, tuple(media), {"messages": "messages"} | _names(media))
    last = max((number for number, message in enumerate(messages) if message.role == "user"), default=None)
    if last is None:
        raise refused("messages", "no message of the user")
    text = "\n".join(part["text"] for part in turns[last]["content"])
    return Conversation({"text": text}, (), {"text": f"messages[{last}].content"})


def _names(media: Sequence[MediaPart]) -> dict[str, str]:
    """Each item's place in its field, as front ends name it, and the client's name of it."""
    names: dict[str, str] = {}
    for field in FIELDS.values():
        params = [part.param for part in media if FIELDS[part.kind] == field]
        names |= {f"{field}[{place}]": param for place, param in enumerate(params)}
    return names


def _turn(number: int, message: Message, state: ServerState, media: list[MediaPart]) -> dict[str, Any]:
    param = f"messages[{number}]"
    role = "system" if message.role == "developer" else message.role  # OpenAI's new name, which chat templates don't know
    content = message.content
    if content is None and message.audio is not None:
        content = message.audio.transcript or state.transcripts.get(message.audio.id)
        if content is None:
            raise refused(f"{param}.audio.id", "no such audio, or it has expired: send its transcript as content")
    if content is None:
        raise refused(f"{param}.content", "is missing")
    if isinstance(content, str):
        return {"role": role, "content": [{"type": "text", "text": content}]}
    if not content:
        raise refused(f"{param}.content", "is empty")
    return {
        "role": role,
        "content": [_part(part, f"{param}.content[{place}]", media) for place, part in enumerate(content)],
    }


def _part(part: Part, param: str, media: list[MediaPart]) -> dict[str, Any]:
    match part:
        case TextPart():
            return {"type": "text", "text": part.text}
        case RefusalPart():
            return {"type": "text", "text": part.refusal}
        case AudioPart():
            item = MediaPart("audio", f"{param}.input_audio.data", data=part.input_audio.data)
        case AudioUrlPart():
            item = MediaPart("audio", f"{param}.audio_url.url", url=part.audio_url.url)
        case ImageUrlPart():
            item = MediaPart("image", f"{param}.image_url.url", url=part.image_url.url)
        case VideoUrlPart():
            raise refused(f"{param}.video_url.url", "videos are not supported over HTTP: send images", "unsupported_media")
    media.append(item)
    return {"type": item.kind}
