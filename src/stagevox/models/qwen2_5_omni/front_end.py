"""The border between a caller's words and media and the Thinker's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagevox.config.topology import text_of
from stagevox.errors import BadParameterError, EmptyTextError, UnknownVoiceError
from stagevox.stage.payload import StageRequest

from ..prompts.chat import ChatTokenizer
from ..prompts.media import FIELDS, read_media, sound_rate
from .config import SAMPLE_RATE, read_config
from .speakers import speakers_of

SYSTEM = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and visual inputs,"
    " as well as generating text and speech."
)
"""What the model was trained to be told where it is to speak."""

SPECIALS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|AUDIO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
)


class Qwen2_5OmniFrontEnd:
    """Checks prompts before any engine works (:class:`stagevox.config.topology.FrontEnd`).

    A prompt has ``text``, told to the model under its usual system prompt, after the media if there are any; or ``messages``,
    a conversation whose parts say where the media belong.
    """

    voices: tuple[str, ...]
    sample_rate = SAMPLE_RATE
    fields = ("text", "messages", "voice", *FIELDS)

    def __init__(self, checkpoint: Path) -> None:
        self._chat = ChatTokenizer(checkpoint, SPECIALS)
        self._rate = sound_rate(checkpoint)
        self.voices = tuple(speakers_of(checkpoint, read_config(checkpoint)))

    def admit(self, req_id: str, prompt: Mapping[str, Any]) -> StageRequest:
        """The Thinker's request for a prompt; ``voice`` None is the usual one.

        Raises:
            BadRequestError: ``field`` names what can't be served.
        """
        media = read_media(prompt, self._rate)
        counts = {kind: len(items) for kind, items in media.items()}
        voice = prompt.get("voice")
        if "messages" in prompt:
            if prompt.get("text") is not None:
                raise BadParameterError("text", "a prompt has either a text or messages")
            if not (voice is None or isinstance(voice, str)):
                raise BadParameterError("voice", f"not a name but a {type(voice).__name__}", self.voices)
            given = prompt["messages"]
        else:
            text, voice = text_of(prompt, self.voices)
            if not text.strip() and not media:
                raise EmptyTextError("text", "is blank")
            self._chat.check("text", text)
            parts: list[dict[str, Any]] = [{"type": kind} for kind, items in media.items() for _ in items]
            given = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
        if voice is not None and voice not in self.voices:
            raise UnknownVoiceError("voice", f"no voice {voice!r}", self.voices)
        return StageRequest(
            req_id=req_id,
            prompt_token_ids=self._chat.encode(self._chat.messages("messages", given, counts)),
            media=media,
            options={"voice": voice or self.voices[0]},
        )

    def reply_text(self, token_ids: list[int], prompt: Mapping[str, Any]) -> str:
        """The Thinker's tokens as text."""
        return self._chat.decode(token_ids)
