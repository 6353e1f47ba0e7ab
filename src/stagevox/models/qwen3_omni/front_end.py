"""The border between a caller's chat and the Thinker's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from stagevox.config.topology import text_of
from stagevox.errors import BadMediaError, BadParameterError, CheckpointError, EmptyTextError, UnknownVoiceError
from stagevox.models.checkpoint import read_json, require
from stagevox.models.prompt_media import READERS, read_media
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

MEDIA_TOKENS = {"audio": "<|audio_pad|>", "image": "<|image_pad|>", "video": "<|video_pad|>"}

ROLES = ("system", "user", "assistant")

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
    fields = ("text", "messages", "voice", *READERS)

    def __init__(self, checkpoint: Path) -> None:
        self.voices = tuple(sorted(codec_ids(checkpoint).speakers))
        self._default = PUBLISHED_VOICE if PUBLISHED_VOICE in self.voices else self.voices[0]
        self._tokenizer = _tokenizer(checkpoint)

    def admit(self, req_id: str, prompt: Mapping[str, Any]) -> StageRequest:
        """The Thinker's request.

        Raises :class:`UnknownVoiceError`, :class:`EmptyTextError`, :class:`BadParameterError` or :class:`BadMediaError`.
        """
        media = read_media(prompt)
        if prompt.get("messages") is None:
            text, voice = text_of(prompt, self.voices)
            if not text.strip() and not media:
                raise EmptyTextError("text", "is blank")
            kinds = [kind for kind, _ in READERS.values() for _ in media.get(kind, ())]
            messages: Any = [{"role": "user", "content": [*({"type": kind} for kind in kinds), {"type": "text", "text": text}]}]
        else:
            if prompt.get("text") is not None:
                raise BadParameterError("text", "a prompt has a text or messages, not both")
            _, voice = text_of({**prompt, "text": ""}, self.voices)
            messages = _checked(prompt["messages"])
        speaker = self._default if voice is None else voice.lower()
        if speaker not in self.voices:
            raise UnknownVoiceError("voice", f"no voice {voice!r}", self.voices)
        chat = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        for kind, token in MEDIA_TOKENS.items():
            if chat.count(token) != len(media.get(kind, ())):
                raise BadMediaError(f"{kind}s", f"{chat.count(token)} in the text, {len(media.get(kind, ()))} are given")
        ids = self._tokenizer(chat)["input_ids"]
        films = {"fps": FILM_RATE, "do_sample_frames": False} if "video" in media else {}
        return StageRequest(
            req_id=req_id, prompt_token_ids=list(ids), media=media, media_options=films, options={"voice": speaker}
        )

    def reply_text(self, token_ids: list[int], prompt: Mapping[str, Any]) -> str:
        """The Thinker's tokens as text, without marks."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


def _tokenizer(checkpoint: Path) -> Any:
    """The folder's tokenizer; raises :class:`CheckpointError` if it lacks what the configuration's ids stand for."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    except Exception as error:  # the library raises what its parser trips over
        raise CheckpointError("model", f"{checkpoint}: its tokenizer can't be read: {error}") from error
    template = checkpoint / "chat_template.json"
    if template.is_file():
        tokenizer.chat_template = read_json(template).get("chat_template") or tokenizer.chat_template
    if not tokenizer.chat_template:
        raise CheckpointError("model", f"{checkpoint} has no chat template")
    config, known = read_config(checkpoint), tokenizer.get_vocab()
    for token, *keys in TOKENS:
        number = require(checkpoint / CONFIG, config, *keys)
        if known.get(token) != number:
            name = ".".join(keys)
            raise CheckpointError("model", f"{checkpoint}: the tokenizer has {token} at {known.get(token)}, {name} is {number}")
    return tokenizer


def _checked(messages: Any) -> list[dict[str, Any]]:
    """The turns of a chat, copied; raises :class:`BadParameterError` that names the part which is none."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise BadParameterError("messages", "not a list of turns")
    checked = []
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            raise BadParameterError(field, "no turn with a role", ROLES)
        checked.append({"role": message["role"], "content": _content(field, message.get("content"))})
    if checked[-1]["role"] != "user":
        raise BadParameterError(f"messages[{len(checked) - 1}]", "the last turn is the user's", ("user",))
    return checked


def _content(field: str, content: Any) -> Any:
    kinds = ("text", *(kind for kind, _ in READERS.values()))
    if isinstance(content, str):
        return content
    if isinstance(content, bytes) or not isinstance(content, Sequence):
        raise BadParameterError(f"{field}.content", "neither a text nor a list of parts")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in kinds:
            raise BadParameterError(f"{field}.content", "a part without a type", kinds)
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise BadParameterError(f"{field}.content", "a part of text without a text")
    return [dict(part) for part in content]
