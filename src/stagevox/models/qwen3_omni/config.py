"""What Qwen3-Omni's ``config.json`` says: ids and sizes, read and checked once, with names that say what they are for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stagevox.errors import CheckpointError
from stagevox.models.checkpoint import read_json, require

CONFIG = "config.json"

CONTROL_IDS = 1024
"""The last ids of the Talker's vocabulary are no codes."""

RATE = 24_000
"""Samples a second of the waveform; the published configuration doesn't say it."""


class ChatIds(NamedTuple):
    """Ids of the Thinker's vocabulary that structure a chat."""

    im_start: int
    im_end: int
    user: int
    assistant: int
    media: tuple[int, ...]
    """Placeholders of sound, picture and film: their positions hold features, not embeddings."""
    tts_bos: int
    tts_eos: int
    tts_pad: int


class CodecIds(NamedTuple):
    """Ids of the Talker's layer-0 vocabulary."""

    vocab_size: int
    eos: int
    prefix: tuple[int, int, int]
    """No think, begin of thought, end of thought: what stands before the speaker."""
    pad: int
    bos: int
    speakers: Mapping[str, int]


def _id(path: Path, config: Mapping[str, Any], size: int, *keys: str) -> int:
    value = require(path, config, *keys)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
        raise CheckpointError("model", f"{path}: {'.'.join(keys)} is {value!r}, no id below {size}")
    return value


def read_config(checkpoint: Path) -> dict[str, Any]:
    """The whole ``config.json``."""
    return read_json(checkpoint / CONFIG)


def chat_ids(checkpoint: Path) -> ChatIds:
    """Raises :class:`CheckpointError` that names an id which is missing or outside the vocabulary."""
    path, config = checkpoint / CONFIG, read_config(checkpoint)
    size = require(path, config, "thinker_config", "text_config", "vocab_size")

    def find(*keys: str) -> int:
        return _id(path, config, size, *keys)

    return ChatIds(
        im_start=find("im_start_token_id"),
        im_end=find("im_end_token_id"),
        user=find("user_token_id"),
        assistant=find("assistant_token_id"),
        media=tuple(find("thinker_config", f"{kind}_token_id") for kind in ("audio", "image", "video")),
        tts_bos=find("tts_bos_token_id"),
        tts_eos=find("tts_eos_token_id"),
        tts_pad=find("tts_pad_token_id"),
    )


def codec_ids(checkpoint: Path) -> CodecIds:
    """Raises :class:`CheckpointError` that names an id which is missing or outside the vocabulary."""
    path, config = checkpoint / CONFIG, read_config(checkpoint)
    size = require(path, config, "talker_config", "text_config", "vocab_size")

    def find(*keys: str) -> int:
        return _id(path, config, size, "talker_config", *keys)

    speakers = require(path, config, "talker_config", "speaker_id")
    if not isinstance(speakers, Mapping) or not speakers:
        raise CheckpointError("model", f"{path}: talker_config.speaker_id names no speaker")
    return CodecIds(
        vocab_size=size,
        eos=find("codec_eos_token_id"),
        prefix=(find("codec_nothink_id"), find("codec_think_bos_id"), find("codec_think_eos_id")),
        pad=find("codec_pad_id"),
        bos=find("codec_bos_id"),
        speakers={str(name).lower(): find("speaker_id", name) for name in speakers},
    )


def accepted_layer(checkpoint: Path) -> int:
    """Which of the Thinker's layers the Talker hears media through: so many layers are below its rows."""
    path, config = checkpoint / CONFIG, read_config(checkpoint)
    layers = require(path, config, "thinker_config", "text_config", "num_hidden_layers")
    layer = require(path, config, "talker_config", "accept_hidden_layer")
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 < layer < layers:
        raise CheckpointError("model", f"{path}: talker_config.accept_hidden_layer is {layer!r}, not one of 1..{layers - 1}")
    return layer


def check_codes(checkpoint: Path) -> None:
    """Check that the codes that the Talker and its predictor can make are those of the vocoder.

    Raises :class:`CheckpointError` that names the field which doesn't fit.
    """
    path, config = checkpoint / CONFIG, read_config(checkpoint)
    codes = require(path, config, "code2wav_config", "codebook_size")
    groups = require(path, config, "code2wav_config", "num_quantizers")
    wanted = {
        ("talker_config", "text_config", "vocab_size"): codes + CONTROL_IDS,
        ("talker_config", "code_predictor_config", "vocab_size"): codes,
        ("talker_config", "code_predictor_config", "num_code_groups"): groups,
        ("talker_config", "num_code_groups"): groups,
    }
    for keys, value in wanted.items():
        if (found := require(path, config, *keys)) != value:
            raise CheckpointError("model", f"{path}: {'.'.join(keys)} is {found!r}, the vocoder needs {value!r}")
