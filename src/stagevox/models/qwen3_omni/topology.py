"""Qwen3-Omni's three stages on one checkpoint folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Qwen3OmniMoeConfig

from stagevox.config.env import MANY_KERNELS
from stagevox.config.topology import StageSpec, Topology
from stagevox.contract import StageExecutionType
from stagevox.errors import CheckpointError
from stagevox.models.checkpoint import check_tensors, read_tensors

from ..pools import kv_pool
from .config import CONFIG, accepted_layer, chat_ids, check_codes, codec_ids, read_config
from .layout import tensor_shapes

NAME = "qwen3_omni"

THINKER_SAMPLING = {"temperature": 0.0, "max_tokens": 1024}
TALKER_SAMPLING = {"temperature": 0.9, "top_k": 50, "repetition_penalty": 1.05, "max_tokens": 4096}
"""The defaults of the reference's ``generate``."""

MAX_POSITIONS = 32768
"""The longest context of Thinker and Talker, unless it is set."""

ENGINE: Mapping[str, Any] = {
    "block_size": 32,
    "enforce_eager": True,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 8,
    "disable_log_stats": True,
}


def topology(folder: Path) -> Topology:
    """The stages of the checkpoint in ``folder``; raises :class:`CheckpointError` with the file and the key that is wrong."""
    _check(folder)
    front_end = f"{__package__}.front_end:Qwen3OmniFrontEnd"
    return Topology(name=NAME, stages=_stages(folder), front_end=front_end, checkpoint=folder, text_stage="thinker")


def _stages(folder: Path) -> tuple[StageSpec, ...]:
    """Thinker, Talker and Code2Wav; the Talker starts when the reply is whole, as the reference does it.

    With the option ``stream`` of the Thinker's chunks it starts once the prompt is read, and hears the reply as it is written: codes and
    samples are the same. Sound comes in chunks either way.
    """
    bridge = f"{__package__}.bridge"
    config = read_config(folder)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "auto")
    engine = {**ENGINE, "dtype": dtype}
    thinker, talker = (config[f"{stage}_config"]["text_config"] for stage in ("thinker", "talker"))
    return (
        StageSpec(
            name="thinker",
            execution_type=StageExecutionType.AR,
            checkpoint=folder,
            architecture="Qwen3OmniThinker",
            engine_args={
                **engine,
                **kv_pool(thinker, min(thinker["max_position_embeddings"], MAX_POSITIONS), dtype),
                "skip_mm_profiling": True,
            },
            sampling=THINKER_SAMPLING,
            constraints={"stop_token_ids": [chat_ids(folder).im_end]},
            chunk_processor="stagevox.connectors.chunks:ReplyRows",
            extra_token=True,
        ),
        StageSpec(
            name="talker",
            execution_type=StageExecutionType.AR,
            checkpoint=folder,
            architecture="Qwen3OmniTalker",
            config_part="talker_config",
            engine_args={
                **engine,
                **kv_pool(talker, min(talker["max_position_embeddings"], MAX_POSITIONS), dtype),
                "skip_tokenizer_init": True,
            },
            sampling=TALKER_SAMPLING,
            constraints={"stop_token_ids": [codec_ids(folder).eos]},
            chunk_processor="stagevox.models.qwen3_talker.frames:TalkerFrames",
            input_adapter=f"{bridge}:TalkerInput",
            extra_token=True,
        ),
        StageSpec(
            name="code2wav",
            execution_type=StageExecutionType.GENERATION,
            checkpoint=folder,
            architecture="Qwen3OmniCode2Wav",
            config_part="code2wav_config",
            # Ids only hold places: to the prefix cache all requests would look alike.
            engine_args={
                **engine,
                "max_model_len": config["code2wav_config"]["max_position_embeddings"],
                "gpu_memory_utilization": 0.05,
                "kv_cache_memory_bytes": 1 << 20,
                "skip_tokenizer_init": True,
                "enable_prefix_caching": False,
            },
            input_adapter=f"{bridge}:Code2WavInput",
            kernels=MANY_KERNELS,
        ),
    )


def _check(folder: Path) -> None:
    chat_ids(folder)
    codec_ids(folder)
    check_codes(folder)
    accepted_layer(folder)
    try:
        reference = Qwen3OmniMoeConfig.from_pretrained(folder)
        expected = tensor_shapes(reference)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise CheckpointError("model", f"{folder / CONFIG}: {error}") from error
    check_tensors(folder, read_tensors(folder), expected)
