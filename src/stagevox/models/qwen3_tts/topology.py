"""The two stages of Qwen3-TTS."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagevox.config.env import MANY_KERNELS
from stagevox.config.sampling import check_sampling
from stagevox.config.topology import StageSpec, Topology
from stagevox.contract import StageExecutionType
from stagevox.errors import BadParameterError, CheckpointError, UnknownModelError
from stagevox.models.checkpoint import blamed_on, check_sizes, check_tensors, read_json, read_tensors, require

from ..pools import kv_pool
from .layout import ENCODING, talker_shapes, vocoder_shapes

NAME = "qwen3_tts"

ENGINE: Mapping[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "gpu_memory_utilization": 0.05,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
}
"""Engine arguments of both stages that suit a CPU."""

MAX_POSITIONS = 4096
"""Of a prompt and its frames, if the model has room for more: some five minutes of speech."""

MIB = 1 << 20

SAMPLING: Mapping[str, tuple[str, Any]] = {
    "temperature": ("temperature", 0.9),
    "top_k": ("top_k", 50),
    "top_p": ("top_p", 1.0),
    "repetition_penalty": ("repetition_penalty", 1.05),
    "max_tokens": ("max_new_tokens", 8192),
}
"""Sampling parameters, their names in the generation config, and the values where it has none."""

TALKER_FIELDS = (
    *("vocab_size", "text_vocab_size", "hidden_size", "text_hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "intermediate_size", "max_position_embeddings", "spk_id", "spk_is_dialect", "codec_language_id"),
    *("codec_eos_token_id", "codec_pad_id", "codec_bos_id", "codec_think_id", "codec_nothink_id", "codec_think_bos_id"),
    *("codec_think_eos_id", "num_code_groups", "code_predictor_config"),
)
"""What the talker's config must say."""


def topology(folder: Path) -> Topology:
    """The stages of the checkpoint in ``folder``.

    Raises:
        CheckpointError: names the file and the key that is missing or wrong.
        UnknownModelError: a Qwen3-TTS of another kind.
    """
    path = folder / "config.json"
    config = read_json(path)
    for key, wanted in (("tts_model_type", "custom_voice"), ("tokenizer_type", "qwen3_tts_tokenizer_12hz")):
        if require(path, config, key) != wanted:
            raise UnknownModelError("model", f"{path} has {key} {config[key]!r}", (wanted,))
    talker = require(path, config, "talker_config")
    for key in TALKER_FIELDS:
        require(path, config, "talker_config", key)
    _check_ids(path, talker)
    speech = folder / "speech_tokenizer"
    speech_config = read_json(speech / "config.json")
    check_sizes(speech / "config.json", speech_config)
    decoder = require(speech / "config.json", speech_config, "decoder_config")
    if decoder.get("num_quantizers") != talker["num_code_groups"]:
        reason = f"decoder_config.num_quantizers is {decoder.get('num_quantizers')}, the talker makes {talker['num_code_groups']} groups"
        raise CheckpointError("model", f"{speech / 'config.json'}: {reason}")
    try:
        wanted_talker = talker_shapes(talker)
        with blamed_on(speech / "config.json"):
            wanted_decoder = vocoder_shapes(decoder)
    except KeyError as error:
        raise CheckpointError("model", f"{folder}: a config lacks {error}") from None
    check_tensors(folder, read_tensors(folder), wanted_talker)
    found = read_tensors(speech)
    check_tensors(speech, found, wanted_decoder, optional=[name for name in found if name.startswith(ENCODING)])
    return Topology(
        name=NAME, stages=_stages(folder, talker), front_end=f"{__package__}.front_end:Qwen3TTSFrontEnd", checkpoint=folder
    )


def _check_ids(path: Path, talker: Mapping[str, Any]) -> None:
    """Every control code has an embedding, and every speaker says whether it speaks a dialect."""
    named = {key: talker[key] for key in TALKER_FIELDS if key.startswith("codec_") and key.endswith("_id")}
    named["codec_eos_token_id"] = talker["codec_eos_token_id"]
    for group in ("spk_id", "codec_language_id"):
        for name, code in (named.pop(group, None) or talker[group]).items():
            named[f"{group}.{name}"] = code
    for name, code in named.items():
        if not (isinstance(code, int) and 0 <= code < talker["vocab_size"]):
            raise CheckpointError("model", f"{path}: talker_config.{name} is {code!r}, outside the vocabulary")
    if not talker["spk_id"]:
        raise CheckpointError("model", f"{path}: talker_config.spk_id names no speaker")
    for name in talker["spk_id"]:
        dialect = require(path, talker, "spk_is_dialect", name)
        if dialect and dialect not in talker["codec_language_id"]:
            raise CheckpointError("model", f"{path}: talker_config.codec_language_id lacks {dialect}, which {name} speaks")


def _stages(folder: Path, talker: Mapping[str, Any]) -> tuple[StageSpec, StageSpec]:
    length = min(talker["max_position_embeddings"], MAX_POSITIONS)
    bridge = f"{__package__}.bridge"
    return (
        StageSpec(
            name="talker",
            execution_type=StageExecutionType.AR,
            checkpoint=folder,
            config_part="talker_config",
            architecture="Qwen3TTSTalkerForConditionalGeneration",
            engine_args={**ENGINE, **kv_pool(talker, length)},
            sampling=_sampling(folder / "generation_config.json"),
            constraints={"stop_token_ids": [talker["codec_eos_token_id"]], "min_tokens": 2},
            # The frame of a layer-0 code is made in the step that feeds it: each token that counts has its frame.
            extra_token=True,
            chunk_processor="stagevox.models.qwen3_talker.frames:TalkerFrames",
        ),
        StageSpec(
            name="code2wav",
            execution_type=StageExecutionType.GENERATION,
            checkpoint=folder / "speech_tokenizer",
            architecture="Qwen3TTSCode2Wav",
            # Ids only hold places: to the prefix cache all requests would look alike.
            engine_args={**ENGINE, "max_model_len": length, "kv_cache_memory_bytes": MIB, "enable_prefix_caching": False},
            input_adapter=f"{bridge}:Code2WavInput",
            kernels=MANY_KERNELS,
        ),
    )


def _sampling(path: Path) -> dict[str, Any]:
    """How layer-0 codes are drawn, from the generation config; what a client may not set, a checkpoint may not either."""
    generation = read_json(path)
    found = {key: generation.get(name, usual) for key, (name, usual) in SAMPLING.items()}
    try:
        sampling: dict[str, Any] = check_sampling(found, ["talker"]).get("talker", {})
    except BadParameterError as error:
        raise CheckpointError("model", f"{path}: {SAMPLING.get(error.field, (error.field,))[0]}: {error}") from None
    return sampling if generation.get("do_sample", True) else sampling | {"temperature": 0.0}
