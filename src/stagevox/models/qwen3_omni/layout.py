"""The tensors of a published checkpoint, by name, from its configuration: what a folder is checked against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

EXPERTS = ".experts"


def tensor_shapes(config: Qwen3OmniMoeConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors. ``transformers`` stacks experts; published are the matrices of each expert."""
    with torch.device("meta"):
        model = Qwen3OmniMoeForConditionalGeneration(config)
    return {name: shape for whole, tensor in model.state_dict().items() for name, shape in _parts(whole, tuple(tensor.shape))}


def _parts(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    stem, _, leaf = name.rpartition(".")
    if not stem.endswith(EXPERTS):
        yield name, shape
        return
    count, rows, columns = shape
    for expert in range(count):
        if leaf == "gate_up_proj":
            yield from ((f"{stem}.{expert}.{part}.weight", (rows // 2, columns)) for part in ("gate_proj", "up_proj"))
        else:
            yield f"{stem}.{expert}.{leaf}.weight", (rows, columns)
