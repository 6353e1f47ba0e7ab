"""The packaged model's three stages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagevox.config.topology import StageSpec, Topology
from stagevox.contract import StageExecutionType
from stagevox.errors import CheckpointError, UnknownModelError

from .pieces import WEIGHTS
from .text import ThinkerTokenizer

NAME = "mini"
EXAMPLES = ("Good morning! 5 + 7 = 12.", "7:30 tomorrow morning", "the small dog", "where is my book", "Thank you!")
FILES = {
    "thinker": ("config.json", "model.safetensors", "tokens.json"),
    "talker": ("config.json", "model.safetensors", "tokenizer.json"),
    "code2wav": ("config.json", "model.safetensors"),
}
"""The folders of a checkpoint, one a stage, and what each must hold."""

VOCABULARIES = (Path("thinker/tokens.json"), Path("talker/tokenizer.json"))
"""Files that the code of the bridge depends on: a checkpoint has other weights, never another vocabulary."""

FIXED = {
    "talker": (
        "voices",
        "prompt_text_rows",
        "text_vocab_size",
        "codebook_sizes",
        "codec_eos_id",
        "codec_bos_id",
        "codec_pad_id",
        "max_frames",
        "max_position_embeddings",
    ),
    "code2wav": ("sample_rate", "codebook_sizes", "warmup_codes", "silence_codes"),
}
"""Fields of a stage's config that the code of the front end and of the bridge depends on, too."""

MODEL_TYPES = {"talker": "stagevox_mini_talker", "code2wav": "stagevox_mini_code2wav"}

LAPTOP: Mapping[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "gpu_memory_utilization": 0.05,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
}
"""Engine arguments of all stages: small enough for a laptop without a GPU."""

MIB = 1 << 20


def looks_like(folder: Path) -> bool:
    """True if a folder claims to hold this family's stages."""
    return any((folder / stage).is_dir() for stage in ("talker", "code2wav"))


def topology(folder: Path = WEIGHTS) -> Topology:
    """The stages of the checkpoint in ``folder``.

    Raises :class:`CheckpointError` with the name of a file that is missing or not this family's.
    """
    _check(folder)
    front_end = f"{__package__}.front_end:MiniFrontEnd"
    return Topology(
        name=NAME, stages=stages(folder), front_end=front_end, checkpoint=folder, text_stage="thinker", examples=EXAMPLES
    )


def stages(folder: Path = WEIGHTS) -> tuple[StageSpec, ...]:
    """Thinker, Talker and Code2Wav of a checkpoint that has been checked."""
    tokenizer = ThinkerTokenizer(folder / "thinker" / "tokens.json")
    talker = json.loads((folder / "talker" / "config.json").read_text(encoding="utf-8"))
    bridge = f"{__package__}.bridge"
    return (
        StageSpec(
            name="thinker",
            execution_type=StageExecutionType.AR,
            checkpoint=folder / "thinker",
            engine_args={**LAPTOP, "max_model_len": 256, "kv_cache_memory_bytes": 32 * MIB},
            sampling={"temperature": 0.0, "max_tokens": 80},
            constraints={"stop_token_ids": [tokenizer.eos_id], "allowed_token_ids": tokenizer.spoken_ids},
            chunk_processor="stagevox.connectors.chunks:WholeReply",
        ),
        StageSpec(
            name="talker",
            execution_type=StageExecutionType.AR,
            checkpoint=folder / "talker",
            engine_args={**LAPTOP, "max_model_len": talker["max_position_embeddings"], "kv_cache_memory_bytes": 16 * MIB},
            # top_k only matters once a client sets a temperature.
            sampling={"temperature": 0.0, "top_k": 20},
            constraints={"stop_token_ids": [talker["codec_eos_id"]]},
            chunk_processor=f"{bridge}:TalkerFrames",
            input_adapter=f"{bridge}:TalkerInput",
        ),
        StageSpec(
            name="code2wav",
            execution_type=StageExecutionType.GENERATION,
            checkpoint=folder / "code2wav",
            # Ids only hold places: to the prefix cache all requests would look alike.
            engine_args={**LAPTOP, "max_model_len": 192, "kv_cache_memory_bytes": MIB, "enable_prefix_caching": False},
            input_adapter=f"{bridge}:Code2WavInput",
        ),
    )


def _config(folder: Path, stage: str) -> dict[str, Any]:
    try:
        config = json.loads((folder / stage / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError("model", f"{folder}: {stage}/config.json can't be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(
            "model", f"{folder}: {stage}/config.json can't be read: not an object but a {type(config).__name__}"
        )
    return config


def _tensor_names(path: Path) -> set[str]:
    """The names in a safetensors file's header."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, MIB)))
        return set(header) - {"__metadata__"}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError("model", f"{path} is no safetensors file: {error}") from error


def _check_thinker(folder: Path) -> None:
    """Check the names of the Thinker's tensors: vLLM's own models start without those that a checkpoint lacks.

    Raises:
        CheckpointError: tensors are missing or unknown.
    """
    layers = _config(folder, "thinker").get("num_hidden_layers")
    if not isinstance(layers, int):
        raise CheckpointError("model", f"{folder}: thinker/config.json has num_hidden_layers {layers!r}")
    packaged, found = (_tensor_names(where / "thinker" / "model.safetensors") for where in (WEIGHTS, folder))
    wanted = {re.sub(r"\.layers\.\d+\.", f".layers.{layer}.", name) for name in packaged for layer in range(layers)}
    for problem, names in (("lacks the tensors", wanted - found), ("holds unknown tensors", found - wanted)):
        if names:
            raise CheckpointError("model", f"{folder}: thinker/model.safetensors {problem} {', '.join(sorted(names))}")


def _check(folder: Path) -> None:
    for stage, names in FILES.items():
        for name in names:
            if not (folder / stage / name).is_file():
                raise CheckpointError("model", f"{folder} lacks {stage}/{name}")
    for stage in FILES:
        config, expected = _config(folder, stage), MODEL_TYPES.get(stage)
        if expected is not None and config.get("model_type") != expected:
            raise UnknownModelError("model", f"{folder}/{stage} is of type {config.get('model_type')!r}", (expected,))
        for field in FIXED.get(stage, ()):
            if config.get(field) != (wanted := _config(WEIGHTS, stage)[field]):
                raise CheckpointError("model", f"{folder}: {stage}/config.json must have {field} {json.dumps(wanted)}")
    for path in VOCABULARIES:
        if (folder / path).read_bytes() != (WEIGHTS / path).read_bytes():
            raise CheckpointError("model", f"{folder / path} differs from the packaged model's vocabulary")
    _check_thinker(folder)
