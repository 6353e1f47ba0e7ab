"""The border between a caller's chat and the Thinker's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagevox.config.topology import text_of
from stagevox.errors import BadParameterError, CheckpointError, EmptyTextError, UnknownVoiceError
from stagevox.models.checkpoint import require
from stagevox.models.prompts.chat import ChatTokenizer
from stagevox.models.prompts.media import FIELDS, read_media, sound_rate
from stagevox.stage.payload import StageRequest

from .config import CONFIG, RATE, codec_ids, read_config

TOKENS = (
    ("<|im_start|>", "im_start_token_id"),
    ("<|im_end|>", "im_end_token_id"),
    ("user", "user_token_id"),
    ("assistant", "assistant_token_id"),
    ("<tts_pad>", "tts_pad_token_id"),
    ("<tts_text_bos>", "tts_bos_token_id"),
    ("<tts_text_eod>", "tts_eos_token_id"),
    ("<|audio_pad|>", "thinker_config", "audio_token_id"),
    ("<|image_pad|>", "thinker_config", "image_token_id"),
    ("<|video_pad|>", "thinker_config", "video_token_id"),
)
"""What the tokenizer must have, and where the configuration says at which id."""

PUBLISHED_VOICE = "ethan"
"""The voice of a prompt that names none, if the checkpoint has it; else its first one."""

FILM_RATE = 1.0
"""Frames a second that films are taken to have; all of their frames are looked at."""


class Qwen3OmniFrontEnd:
    """Checks prompts before any engine works (:class:`stagevox.config.topology.FrontEnd`).

    A prompt has a ``text``, before which its media come (``images``, then ``audios``, then ``videos``), or ``messages`` as chats have
    them: mappings with a ``role`` and a ``content``, a text or a list of parts ``{"type": "text", "text": ...}``, ``{"type": "image"}``,
    ``{"type": "audio"}``, ``{"type": "video"}``. The media are those of the lists, in order. The last turn is the user's.
    """

    voices: tuple[str, ...]
    sample_rate = RATE
    fields = ("text", "messages", "voice", *FIELDS)

    def __init__(self, checkpoint: Path) -> None:
        self.voices = tuple(sorted(codec_ids(checkpoint).speakers))
        self._default = PUBLISHED_VOICE if PUBLISHED_VOICE in self.voices else self.voices[0]
        self._chat = ChatTokenizer(checkpoint, [token for token, *_ in TOKENS])
        self._rate = sound_rate(checkpoint)
        config = read_config(checkpoint)
        for token, *keys in TOKENS:
            number = require(checkpoint / CONFIG, config, *keys)
            if self._chat.id_of(token) != number:
                where = f"{checkpoint / 'tokenizer.json'} has {token} at {self._chat.id_of(token)}"
                raise CheckpointError("model", f"{where}, {CONFIG} has {'.'.join(keys)} {number}")

    def admit(self, req_id: str, prompt: Mapping[str, Any]) -> StageRequest:
        """The Thinker's request.

        Raises :class:`UnknownVoiceError`, :class:`EmptyTextError`, :class:`VocabularyError`, :class:`BadParameterError` or
        :class:`BadMediaError`.
        """
        media = read_media(prompt, self._rate)
        counts = {kind: len(items) for kind, items in media.items()}
        if prompt.get("messages") is None:
            text, voice = text_of({**prompt, "text": prompt.get("text", "" if media else None)}, self.voices)
            if not text.strip() and not media:
                raise EmptyTextError("text", "is blank")
            places = [{"type": kind} for kind in FIELDS.values() for _ in range(counts.get(kind, 0))]
            said = [{"type": "text", "text": self._chat.check("text", text)}]
            messages: list[dict[str, Any]] = [{"role": "user", "content": [*places, *said]}]
        else:
            if prompt.get("text") is not None:
                raise BadParameterError("text", "a prompt has a text or messages, not both")
            _, voice = text_of({**prompt, "text": ""}, self.voices)
            messages = self._chat.messages("messages", prompt["messages"], counts)
            if messages[-1]["role"] != "user":
                raise BadParameterError(f"messages[{len(messages) - 1}].role", "the last turn is the user's", ("user",))
        speaker = self._default if voice is None else voice.lower()
        if speaker not in self.voices:
            raise UnknownVoiceError("voice", f"no voice {voice!r}", self.voices)
        return StageRequest(
            req_id=req_id,
            prompt_token_ids=self._chat.encode(messages),
            media=media,
            media_options={"fps": FILM_RATE, "do_sample_frames": False} if "video" in media else {},
            options={"voice": speaker},
        )

    def reply_text(self, token_ids: list[int], prompt: Mapping[str, Any]) -> str:
        """The Thinker's tokens as text, without marks."""
        return self._chat.decode(token_ids)
