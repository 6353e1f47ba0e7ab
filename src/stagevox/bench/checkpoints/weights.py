"""Random weights that depend on nothing but a seed and the tensor's name, and the files they are published in."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

SHARD_BYTES = 3 << 20
"""A tiny checkpoint has several shards too, as the published ones do."""


def normal(seed: int, name: str, shape: Sequence[int], scale: float = 1.0) -> torch.Tensor:
    """Normal values of standard deviation ``scale``, float32, from a generator of this tensor's own."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(tuple(shape), generator=generator) * scale


def dense(seed: int, name: str, shape: Sequence[int], gain: float = 1.4) -> torch.Tensor:
    """Normal values of standard deviation ``gain / sqrt(inputs)``: what a layer makes of unit values stays about as large."""
    return normal(seed, name, shape, gain / math.sqrt(math.prod(shape[1:])))


def write_shards(folder: Path, tensors: Mapping[str, torch.Tensor], shard_bytes: int = SHARD_BYTES) -> None:
    """Write ``model-0000k-of-0000n.safetensors`` and ``model.safetensors.index.json``, tensors in order of their names."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    room = shard_bytes
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and size > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= size
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards, 1):
        file = f"model-{index:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=1), encoding="utf-8")


def digest(folder: Path) -> str:
    """sha256 over names, shapes and bytes of all tensors under a folder, however they are sharded."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        prefix = path.parent.relative_to(folder).as_posix()
        with safe_open(path, "pt") as file:
            found |= {f"{prefix}/{name}": file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    total = hashlib.sha256()
    for name in sorted(found):
        tensor = found[name].contiguous()
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
