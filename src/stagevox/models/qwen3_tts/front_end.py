"""The border between a caller's words and the talker's prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagevox.config.topology import text_of, whole_text
from stagevox.errors import BadParameterError, CheckpointError, EmptyTextError, UnknownVoiceError, VocabularyError
from stagevox.models.checkpoint import integer, read_json, require
from stagevox.models.qwen3_talker.sampling import RESIDUAL, placeholder
from stagevox.stage.payload import StageRequest

from .prompt import AUTO, CLOSING, ROLE, TTSTokens, conditioning, control_codes

TURN = "<|im_start|>assistant\n{}<|im_end|>\n<|im_start|>assistant\n"
INSTRUCT = "<|im_start|>user\n{}<|im_end|>\n"
MARKS = {"tts_pad_token_id": "<tts_pad>", "tts_bos_token_id": "<tts_text_bos>", "tts_eos_token_id": "<tts_text_eod>"}
"""Fields of the config, and the tokens that they must be."""

NO_INSTRUCT = "0b6"
"""The size of model that was not trained to follow instructions."""


class Qwen3TTSFrontEnd:
    """Checks prompts and turns them into ids (:class:`stagevox.config.topology.FrontEnd`).

    Fields of a prompt: ``text``; ``voice``, any case, the checkpoint's first one if absent; ``language``, ``Auto`` if absent;
    ``instruct``, how to speak, in words; ``streaming_text``, whether the text comes a token a frame.
    """

    fields = ("text", "voice", "language", "instruct", "streaming_text")

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoTokenizer

        from .config import register_configs

        register_configs()
        path = checkpoint / "config.json"
        config = read_json(path)
        self._talker: dict[str, Any] = require(path, config, "talker_config")
        for key in ("spk_id", "spk_is_dialect", "codec_language_id"):
            require(path, config, "talker_config", key)
        self.voices = tuple(self._talker["spk_id"])
        self._languages = (AUTO, *(name for name in self._talker["codec_language_id"] if "dialect" not in name))
        speech = checkpoint / "speech_tokenizer" / "config.json"
        self.sample_rate = integer(speech, read_json(speech), "output_sample_rate")
        self._instructed = require(path, config, "tts_model_size") != NO_INSTRUCT
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
        except Exception as error:  # whatever a damaged file makes the library trip over
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise CheckpointError("model", f"{checkpoint}: the tokenizer can't be read: {reason}") from error
        self._specials = tuple(str(token) for token in self._tokenizer.get_added_vocab())
        self._marks = TTSTokens(*(integer(path, config, key) for key in MARKS))
        self._check_tokenizer(path, config)
        self._residual = _residual(checkpoint / "generation_config.json")
        self._place = placeholder(self._talker["vocab_size"], self._talker["codec_eos_token_id"])

    def admit(self, req_id: str, prompt: Mapping[str, Any]) -> StageRequest:
        """The talker's request for a prompt.

        Raises:
            EmptyTextError: nothing to say.
            VocabularyError: a text that contains special tokens.
            UnknownVoiceError: no such voice.
            BadParameterError: a field of another type, or no such language.
        """
        text, named = text_of(prompt, self.voices)
        voice = self._voice(named)
        language = self._language(prompt.get("language"))
        instruct = prompt.get("instruct")
        if instruct is not None:
            whole_text("instruct", instruct)
        if instruct and not self._instructed:
            raise BadParameterError("instruct", f"a model of size {NO_INSTRUCT!r} follows no instructions")
        streaming = prompt.get("streaming_text", False)
        if not isinstance(streaming, bool):
            raise BadParameterError("streaming_text", f"not a truth value: {streaming!r}", ("true", "false"))
        if not text.strip():
            raise EmptyTextError("text", "nothing to say")
        made = conditioning(
            self._encode("text", TURN, text),
            self._encode("instruct", INSTRUCT, instruct) if instruct else [],
            control_codes(self._talker, voice, language),
            self._marks,
            streaming_text=streaming,
        )
        digest = hashlib.sha256(json.dumps([made, self._residual]).encode()).hexdigest()
        payload = {
            "text_ids": made.text,
            "codec_ids": made.codec,
            "trailing_ids": made.trailing,
            "pad_id": self._marks.pad,
            RESIDUAL: self._residual,
        }
        return StageRequest(req_id, [self._place] * len(made.text), payload=payload, cache_salt=digest, options={"voice": voice})

    def reply_text(self, token_ids: list[int], prompt: Mapping[str, Any]) -> str:
        """The prompt's own text is what is spoken."""
        return str(prompt["text"])

    def _voice(self, name: str | None) -> str:
        if name is None:
            return self.voices[0]
        for voice in self.voices:
            if voice.lower() == name.lower():
                return voice
        raise UnknownVoiceError("voice", f"no voice {name!r}", self.voices)

    def _language(self, name: Any) -> str:
        if name is None:
            return AUTO
        if not isinstance(name, str):
            raise BadParameterError("language", f"not a name but a {type(name).__name__}", self._languages)
        for language in self._languages:
            if language.lower() == name.lower():
                return language
        raise BadParameterError("language", f"no language {name!r}", self._languages)

    def _encode(self, field: str, template: str, text: str) -> list[int]:
        """Token ids of a turn. Special tokens inside ``text`` would be marks of the prompt: they are refused."""
        for token in self._specials:
            if token in text:
                raise VocabularyError(field, f"holds the special token {token}")
        ids: list[int] = self._tokenizer(template.replace("{}", text))["input_ids"]
        return ids

    def _check_tokenizer(self, path: Path, config: Mapping[str, Any]) -> None:
        names = {"im_start_token_id": "<|im_start|>", "im_end_token_id": "<|im_end|>", **MARKS}
        vocabulary = self._tokenizer.get_vocab()
        for key, name in names.items():
            if name not in vocabulary:
                raise CheckpointError("model", f"{path.parent}: the tokenizer lacks {name}, the config's {key}")
            if vocabulary[name] != (wanted := require(path, config, key)):
                raise CheckpointError("model", f"{path}: {key} is {wanted}, the tokenizer has {name} at {vocabulary[name]}")
        rows = self._talker["text_vocab_size"]
        if len(self._tokenizer) > rows:
            raise CheckpointError("model", f"{path}: the tokenizer has {len(self._tokenizer)} tokens, text_vocab_size is {rows}")
        if len(self._tokenizer(TURN.replace("{}", ""))["input_ids"]) != ROLE + CLOSING:
            raise CheckpointError(
                "model", f"{path.parent}: the tokenizer cuts the marks of a turn in other pieces than {ROLE} + {CLOSING}"
            )


def _residual(path: Path) -> dict[str, float]:
    """How residual codes are drawn, from the ``subtalker_`` fields of the generation config."""
    config = read_json(path)
    drawn = config.get("subtalker_dosample", True)
    return {
        "temperature": float(config.get("subtalker_temperature", 0.9)) if drawn else 0.0,
        "top_k": int(config.get("subtalker_top_k", 50)),
        "top_p": float(config.get("subtalker_top_p", 1.0)),
    }
