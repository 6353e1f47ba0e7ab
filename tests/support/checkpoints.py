"""Checkpoints that differ from the packaged one in a single, stated way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from stagevox.models.mini.pieces import WEIGHTS

LM_HEAD = "talker.lm_head"


def copy_checkpoint(folder: Path) -> Path:
    """Copy the packaged checkpoint into ``folder``."""
    return Path(shutil.copytree(WEIGHTS, folder))


def edit_config(folder: Path, stage: str, **fields: Any) -> None:
    """Overwrite fields of a stage's config."""
    path = folder / stage / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def write_rows(folder: Path, stage: str, tensor: str, rows: int | slice, values: torch.Tensor) -> None:
    """Overwrite rows of one tensor of a stage."""
    path = folder / stage / "model.safetensors"
    tensors = load_file(path)
    tensors[tensor][rows] = values.to(tensors[tensor].dtype)
    save_file(tensors, path, metadata={"format": "pt"})
