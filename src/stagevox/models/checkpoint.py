"""What a checkpoint folder in the Hugging Face layout holds, read from its headers alone: no tensor is loaded.

Every complaint names the file and the key.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from stagevox.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEADER_LIMIT = 100 << 20
"""Bytes; the format's own limit for a header."""

DTYPES = ("BF16", "F16", "F32", "F64")
"""Types of weights, as safetensors spells them. vLLM would cast any other one without a word, scales left out."""

LARGEST = (1 << 31) - 1
"""No size of a model is larger."""
MOST_LAYERS = 4096
"""No model has more layers, experts or codebooks; a loop over as many as a damaged file asks for might never end."""

_SIZES = ("_size", "_dim", "_heads", "max_position_embeddings", "d_model", "_sample_rate")
_COUNTS = ("_layers", "depth", "num_experts", "num_code_groups", "num_quantizers")
_NAMES = ("tts_model_size",)
"""End like a size, and are words."""


class TensorEntry(NamedTuple):
    """Where a tensor stands, its shape and type."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors spells it."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises :class:`CheckpointError` if the file is missing or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError("model", f"{path} can't be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError("model", f"{path} is no object but a {type(value).__name__}")
    return value


def require(path: Path, value: Mapping[str, Any], *keys: str) -> Any:
    """``value[key][key]...`` of the JSON object in ``path``; raises :class:`CheckpointError` that names the missing key."""
    found: Any = value
    for depth, key in enumerate(keys):
        if not isinstance(found, Mapping) or key not in found:
            raise CheckpointError("model", f"{path} lacks {'.'.join(keys[: depth + 1])}")
        found = found[key]
    return found


def integer(path: Path, value: Mapping[str, Any], *keys: str) -> int:
    """:func:`require` of an integer; raises :class:`CheckpointError` that names the key if it is something else."""
    found = require(path, value, *keys)
    if isinstance(found, bool) or not isinstance(found, int):
        raise CheckpointError("model", f"{path}: {'.'.join(keys)} is no integer: {found!r:.40}")
    return found


def check_sizes(path: Path, value: Mapping[str, Any], *keys: str) -> None:
    """Check all sizes and counts of a config, whatever the model: integers of a sensible range, absent or null.

    Raises:
        CheckpointError: names the file and the key.
    """
    for key, found in value.items():
        at = (*keys, key)
        limit = MOST_LAYERS if key.endswith(_COUNTS) else LARGEST if key.endswith(_SIZES) and key not in _NAMES else None
        if limit is None and isinstance(found, Mapping):
            check_sizes(path, found, *at)
        if limit is None or found is None or isinstance(found, list):
            continue
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= limit:
            raise CheckpointError("model", f"{path}: {'.'.join(at)} is {found!r:.40}, no integer of 0 to {limit}")


@contextmanager
def blamed_on(path: Path) -> Iterator[None]:
    """Turn what a file's values make the block trip over into :class:`CheckpointError`; named errors pass."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError("model", f"{path} has values that can't be used: {reason}") from error


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(size, HEADER_LIMIT):
                raise ValueError(f"its header claims {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(f"{size} bytes, its header speaks of {8 + length + end}")
        return {name: TensorEntry(path, tuple(entry["shape"]), str(entry["dtype"])) for name, entry in header.items()}
    except FileNotFoundError:
        raise CheckpointError("model", f"{path} is missing") from None
    except (OSError, ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError) as error:
        raise CheckpointError("model", f"{path} is no whole safetensors file: {error}") from None


def read_tensors(folder: Path) -> dict[str, TensorEntry]:
    """All tensors of a folder: of the shards that its index names, or of its one file.

    Raises:
        CheckpointError: a shard is missing or cut short, or lacks a tensor that the index promises.
    """
    index = folder / INDEX
    if not index.is_file():
        return read_header(folder / SINGLE)
    promised = require(index, read_json(index), "weight_map")
    if not isinstance(promised, Mapping):
        raise CheckpointError("model", f"{index}: weight_map is a {type(promised).__name__}")
    tensors: dict[str, TensorEntry] = {}
    for shard in sorted({str(name) for name in promised.values()}):
        if Path(shard).name != shard:
            raise CheckpointError("model", f"{index} names {shard!r}, which is no file of this folder")
        tensors |= read_header(folder / shard)
    for name, shard in promised.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError("model", f"{folder / str(shard)} lacks tensor {name}")
    return tensors


def check_tensors(
    folder: Path, found: Mapping[str, TensorEntry], expected: Mapping[str, Sequence[int]], optional: Iterable[str] = ()
) -> None:
    """Compare what is there with what a model needs: names, shapes and floats, nothing missing, nothing left over.

    Raises:
        CheckpointError: names the file and the first key that differs.
    """
    for name, shape in expected.items():
        entry = found.get(name)
        if entry is None:
            raise CheckpointError("model", f"{folder}: no file has tensor {name}")
        if entry.shape != tuple(shape):
            raise CheckpointError("model", f"{entry.file}: tensor {name} has shape {list(entry.shape)}, expected {list(shape)}")
        if entry.dtype not in DTYPES:
            raise CheckpointError("model", f"{entry.file}: tensor {name} is of {entry.dtype}", DTYPES)
    extra = sorted(set(found) - set(expected) - set(optional))
    if extra:
        more = f" and {len(extra) - 1} more" if extra[1:] else ""
        raise CheckpointError("model", f"{found[extra[0]].file}: tensor {extra[0]}{more} belongs to no part of the model")
