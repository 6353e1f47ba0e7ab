"""The voices of a checkpoint: ``spk_dict.pt``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from stagevox.errors import CheckpointError

FILE = "spk_dict.pt"
USUAL = "Chelsie"
"""The voice of whoever asks for none, if the checkpoint has it."""


class Speaker(NamedTuple):
    """One voice."""

    bos_token: int
    """The Thinker's token that begins its speech."""
    cond: torch.Tensor
    """Speaker embedding ``[1, enc_emb_dim]``, float32."""
    ref_mel: torch.Tensor
    """Reference mel spectrogram ``[1, frames, mel_dim]``, float32."""


def read_speakers(folder: Path, embedding: int, mel: int, vocabulary: int) -> dict[str, Speaker]:
    """All voices by name, the usual one first; nothing but tensors and numbers is ever unpickled.

    Raises:
        CheckpointError: names the file, and the voice and entry that are missing or of another shape.
    """
    path = folder / FILE
    try:
        raw = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError("model", f"{path} is missing") from None
    except Exception as error:  # a damaged archive, or one that holds more than tensors
        raise CheckpointError("model", f"{path} can't be read: {type(error).__name__}") from error
    if not isinstance(raw, dict) or not raw:
        raise CheckpointError("model", f"{path} holds no voices")
    speakers = {str(name): _speaker(path, str(name), entry, embedding, mel, vocabulary) for name, entry in raw.items()}
    return dict(sorted(speakers.items(), key=lambda item: (item[0] != USUAL, item[0])))


def _speaker(path: Path, name: str, entry: object, embedding: int, mel: int, vocabulary: int) -> Speaker:
    for key in Speaker._fields:
        if not isinstance(entry, dict) or key not in entry:
            raise CheckpointError("model", f"{path}: voice {name} lacks {key}")
    assert isinstance(entry, dict)
    token = entry["bos_token"]
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
        raise CheckpointError("model", f"{path}: bos_token of voice {name} is {token!r}, no id of the Thinker")
    cond, ref_mel = (_tensor(path, name, key, entry[key]) for key in ("cond", "ref_mel"))
    if cond.shape != (1, embedding):
        raise CheckpointError("model", f"{path}: cond of voice {name} has shape {list(cond.shape)}, expected [1, {embedding}]")
    shape = list(ref_mel.shape)
    if ref_mel.dim() != 3 or not ref_mel.numel() or shape != [1, shape[1], mel]:
        raise CheckpointError("model", f"{path}: ref_mel of voice {name} has shape {shape}, expected [1, frames, {mel}]")
    return Speaker(token, cond, ref_mel)


def _tensor(path: Path, name: str, key: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.isfinite().all():
        raise CheckpointError("model", f"{path}: {key} of voice {name} is no tensor of finite numbers")
    return value.float()


def speakers_of(folder: Path, config: Any) -> dict[str, Speaker]:
    """The voices that fit a ``transformers`` Qwen2_5OmniConfig."""
    dit = config.token2wav_config.dit_config
    return read_speakers(folder, dit.enc_emb_dim, dit.mel_dim, config.thinker_config.text_config.vocab_size)
