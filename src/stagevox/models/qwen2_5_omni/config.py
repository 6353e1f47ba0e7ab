"""What the stages read from a checkpoint folder beside its weights, checked before an engine starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagevox.errors import CheckpointError

from ..checkpoint import check_tensors, read_json, read_tensors, require
from .declared import BUFFER, declared

SAMPLE_RATE = 24000
"""Hz of all speech."""

MEDIA_TOKENS = {"image": "image_token_index", "audio": "audio_token_index", "video": "video_token_index"}
"""Kinds of media, and where the Thinker's config has the token that holds a place for each."""


@dataclass(frozen=True, slots=True)
class OmniIds:
    """Token ids, as the config has them; ``text`` ones belong to the Thinker, the others to the Talker."""

    text_end: tuple[int, ...]
    """What ends a reply."""
    text_eos: int
    """After the last word of the reply: its end, as the Talker is told of it."""
    text_pad: int
    """Ever after."""
    codec_mask: int
    """Holds the place of a prompt row that has no code."""
    codec_pad: int
    codec_bos: int
    codec_eos: int
    num_codes: int
    """Ids below this one have a row in the vocoder."""

    @property
    def codec_end(self) -> tuple[int, ...]:
        """What ends the codes."""
        return (self.codec_pad, self.codec_eos)


def read_ids(folder: Path) -> OmniIds:
    """The ids of the checkpoint in ``folder``; raises :class:`CheckpointError` for a key that is missing or no integer."""
    path = folder / "config.json"
    config = read_json(path)

    def number(*keys: str) -> int:
        value = require(path, config, *keys)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError("model", f"{path}: {'.'.join(keys)} is no integer: {value!r}")
        return value

    ends_path = folder / "generation_config.json"
    ends = require(ends_path, read_json(ends_path), "eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    if not ends or not all(isinstance(end, int) for end in ends):
        raise CheckpointError("model", f"{ends_path}: eos_token_id is {ends!r}")
    return OmniIds(
        text_end=tuple(ends),
        text_eos=number("talker_config", "tts_text_end_token_id"),
        text_pad=number("talker_config", "tts_text_pad_token_id"),
        codec_mask=number("talker_config", "tts_codec_mask_token_id"),
        codec_pad=number("talker_config", "tts_codec_pad_token_id"),
        codec_bos=number("talker_config", "tts_codec_start_token_id"),
        codec_eos=number("talker_config", "tts_codec_end_token_id"),
        num_codes=number("token2wav_config", "dit_config", "num_embeds") + 1,
    )


def read_config(folder: Path) -> Any:
    """The checkpoint's config as ``transformers`` has it; raises :class:`CheckpointError`."""
    from transformers import Qwen2_5OmniConfig

    path = folder / "config.json"
    raw = read_json(path)
    for part in ("thinker_config", "talker_config", "token2wav_config"):
        if not isinstance(require(path, raw, part), dict):
            raise CheckpointError("model", f"{path}: {part} is no object")
    try:
        return Qwen2_5OmniConfig(**raw)
    except Exception as error:  # whatever the config's own validation trips over
        reason = " ".join(str(error).split())
        raise CheckpointError("model", f"{path} is no config of this family: {reason}") from error


def check_checkpoint(folder: Path) -> Any:
    """Check ids, tensors and config of a folder; returns the config.

    Raises:
        CheckpointError: names the file and the key.
    """
    ids = read_ids(folder)
    config = read_config(folder)
    limits = (
        ("talker_config", config.talker_config.vocab_size),
        ("thinker_config", config.thinker_config.text_config.vocab_size),
    )
    for part, limit in limits:
        fields = ("codec_mask", "codec_pad", "codec_bos", "codec_eos") if part == "talker_config" else ("text_eos", "text_pad")
        for field in fields:
            if not 0 <= getattr(ids, field) < limit:
                raise CheckpointError("model", f"{folder / 'config.json'}: {field} {getattr(ids, field)} is no id of {part}")
    found, expected = read_tensors(folder), declared(config)
    tied = "thinker.lm_head.weight"
    if config.thinker_config.text_config.tie_word_embeddings and tied not in found:
        del expected[tied]
    check_tensors(folder, found, expected, optional=[BUFFER])
    return config
