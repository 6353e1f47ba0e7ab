"""The three stages of a Qwen2.5-Omni checkpoint, which share one folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagevox.config.env import MANY_KERNELS
from stagevox.config.topology import StageSpec, Topology
from stagevox.contract import StageExecutionType

from ..pools import kv_pool
from .config import check_checkpoint, read_ids
from .speakers import speakers_of

NAME = "qwen2_5_omni"

COMMON: Mapping[str, Any] = {
    "enforce_eager": True,
    "block_size": 32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "disable_log_stats": True,
}


def topology(folder: Path) -> Topology:
    """The stages of the checkpoint in ``folder``, its files checked.

    Raises:
        CheckpointError: names the file, and the key, tensor or voice that is missing or wrong.
    """
    config = check_checkpoint(folder)
    speakers_of(folder, config)
    return Topology(
        name=NAME,
        stages=stages(folder, config),
        front_end=f"{__package__}.front_end:Qwen2_5OmniFrontEnd",
        checkpoint=folder,
        text_stage="thinker",
    )


def stages(folder: Path, config: Any) -> tuple[StageSpec, ...]:
    """Thinker, Talker and Code2Wav; the Talker starts when the reply is whole, the vocoder when the codes are.

    That is what the published model does. With the options ``stream`` of the Thinker's chunks, and ``sizes`` of the Talker's chunks
    and of Code2Wav's input, each starts as soon as it can: text and codes are the same, samples those of a vocoder that sees a
    window of the frames. Windows are best multiples of the vocoder's attention blocks of 12 frames.
    """
    ids = read_ids(folder)
    thinker, talker = config.thinker_config.text_config, config.talker_config
    bridge = f"{__package__}.bridge"
    return (
        StageSpec(
            name="thinker",
            execution_type=StageExecutionType.AR,
            checkpoint=folder,
            engine_args={**COMMON, **kv_pool(thinker, thinker.max_position_embeddings), "skip_mm_profiling": True},
            sampling={"temperature": 0.0, "max_tokens": 1024},
            constraints={"stop_token_ids": list(ids.text_end)},
            chunk_processor="stagevox.connectors.chunks:ReplyRows",
            architecture="Qwen2_5OmniThinker",
            extra_token=True,
        ),
        StageSpec(
            name="talker",
            execution_type=StageExecutionType.AR,
            checkpoint=folder,
            engine_args={**COMMON, **kv_pool(talker, talker.max_position_embeddings), "skip_tokenizer_init": True},
            sampling={
                "temperature": 0.9,
                "top_p": 0.8,
                "top_k": 40,
                "seed": 42,
                "repetition_penalty": 1.05,
                "max_tokens": 2048,
            },
            constraints={"stop_token_ids": list(ids.codec_end)},
            chunk_processor=f"{bridge}:TalkerCodes",
            input_adapter=f"{bridge}:TalkerInput",
            config_part="talker_config",
            architecture="Qwen2_5OmniTalker",
        ),
        StageSpec(
            name="code2wav",
            execution_type=StageExecutionType.GENERATION,
            checkpoint=folder,
            engine_args={
                **COMMON,
                "dtype": "float32",
                "max_model_len": 2048,
                "kv_cache_memory_bytes": 1 << 20,
                "gpu_memory_utilization": 0.05,
                "enable_prefix_caching": False,  # ids only hold places: to the cache all requests would look alike
                "skip_tokenizer_init": True,
            },
            input_adapter=f"{bridge}:Code2WavInput",
            kernels=MANY_KERNELS,
            config_part="token2wav_config",
            architecture="Qwen2_5OmniToken2Wav",
        ),
    )
