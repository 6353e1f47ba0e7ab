"""A tiny random Qwen3-TTS checkpoint (CustomVoice, 12 Hz) in the published layout."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from stagevox.models.qwen3_talker.layout import Shapes
from stagevox.models.qwen3_tts.layout import talker_shapes, vocoder_shapes

from .mimi_layout import mimi_encoder_shapes
from .tokenizer import special_id, write_tokenizer
from .weights import dense, normal, write_shards

SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    *("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>"),
    "<|audio_pad|>",
)
CODES = 256
"""Codes of a group; the 1024 ids after them are control ids, in the order of the published ones."""

GROUPS = 16
END_GAIN = 1.7
"""How much larger the head's row of the end is than others, so that speech ends after some ten frames."""

LOUDNESS = 0.1
"""Of the decoder's last convolution: random samples should seldom reach the limits of 1."""


def control(published: int) -> int:
    """The control id here that has the id ``published`` where a group has 2048 codes."""
    return published - 2048 + CODES


TALKER: Mapping[str, Any] = {
    "model_type": "qwen3_tts_talker",
    "vocab_size": CODES + 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": [6, 5, 5], "interleaved": True},
    "num_code_groups": GROUPS,
    "text_hidden_size": 96,
    "text_vocab_size": 704,
    "position_id_per_seconds": 13,
    "codec_pad_id": control(2148),
    "codec_bos_id": control(2149),
    "codec_eos_token_id": control(2150),
    "codec_think_id": control(2154),
    "codec_nothink_id": control(2155),
    "codec_think_bos_id": control(2156),
    "codec_think_eos_id": control(2157),
    "spk_id": {
        "vivian": control(3065),
        "serena": control(3066),
        "eric": control(2875),
        "dylan": control(2878),
        "ryan": control(3061),
    },
    "spk_is_dialect": {
        "vivian": False,
        "serena": False,
        "eric": "sichuan_dialect",
        "dylan": "beijing_dialect",
        "ryan": False,
    },
    "codec_language_id": {
        "chinese": control(2055),
        "english": control(2050),
        "german": control(2053),
        "sichuan_dialect": control(2062),
        "beijing_dialect": control(2074),
    },
    "code_predictor_config": {
        "model_type": "qwen3_tts_talker_code_predictor",
        "vocab_size": CODES,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 65536,
        "rope_theta": 1e6,
        "num_code_groups": GROUPS,
    },
}
GENERATION: Mapping[str, Any] = {
    "do_sample": True,
    "repetition_penalty": 1.05,
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": 50,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.9,
    "subtalker_top_p": 1.0,
    "subtalker_top_k": 50,
    "max_new_tokens": 8192,
}
SPEECH_TOKENIZER: Mapping[str, Any] = {
    "architectures": ["Qwen3TTSTokenizerV2Model"],
    "model_type": "qwen3_tts_tokenizer_12hz",
    "encoder_valid_num_quantizers": GROUPS,
    "input_sample_rate": 24000,
    "output_sample_rate": 24000,
    "encode_downsample_rate": 1920,
    "decode_upsample_rate": 1920,
    "decoder_config": {
        "codebook_size": CODES,
        "codebook_dim": 32,
        "latent_dim": 48,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "max_position_embeddings": 8000,
        "sliding_window": 72,
        "layer_scale_initial_scale": 0.01,
        "num_quantizers": GROUPS,
        "num_semantic_quantizers": 1,
        "decoder_dim": 64,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    },
    "encoder_config": {
        "model_type": "mimi",
        "audio_channels": 1,
        "codebook_dim": 8,
        "codebook_size": CODES,
        "compress": 2,
        "frame_rate": 12.5,
        "head_dim": 16,
        "hidden_size": 32,
        "intermediate_size": 64,
        "kernel_size": 7,
        "last_kernel_size": 3,
        "num_attention_heads": 2,
        "num_filters": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "num_quantizers": 32,
        "num_residual_layers": 1,
        "num_semantic_quantizers": 1,
        "residual_kernel_size": 3,
        "sampling_rate": 24000,
        "upsample_groups": 32,
        "upsampling_ratios": [8, 6, 5, 4],
        "vector_quantization_hidden_dimension": 8,
    },
}
FEATURES: Mapping[str, Any] = {
    "feature_extractor_type": "EncodecFeatureExtractor",
    "feature_size": 1,
    "sampling_rate": 24000,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "chunk_length_s": None,
    "overlap": None,
}


def write(folder: Path, seed: int = 0) -> Path:
    """Write the whole checkpoint into ``folder`` and return it."""
    tokenizer = write_tokenizer(folder, SPECIALS)
    config = {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": "1b7",
        "tts_model_type": "custom_voice",
        "im_start_token_id": special_id(151644),
        "im_end_token_id": special_id(151645),
        "tts_pad_token_id": special_id(151671),
        "tts_bos_token_id": special_id(151672),
        "tts_eos_token_id": special_id(151673),
        "assistant_token_id": tokenizer.encode("assistant")[0],
        "talker_config": TALKER,
    }
    _json(folder / "config.json", config)
    _json(folder / "generation_config.json", GENERATION)
    _json(folder / "preprocessor_config.json", {"processor_class": "Qwen3TTSProcessor"})
    tensors = _fill(seed, talker_shapes(TALKER))
    tensors["talker.codec_head.weight"][TALKER["codec_eos_token_id"]] *= END_GAIN
    write_shards(folder, tensors, shard_bytes=1 << 20)
    speech = folder / "speech_tokenizer"
    speech.mkdir(exist_ok=True)
    _json(speech / "config.json", SPEECH_TOKENIZER)
    _json(speech / "preprocessor_config.json", FEATURES)
    shapes = vocoder_shapes(SPEECH_TOKENIZER["decoder_config"]) | mimi_encoder_shapes(SPEECH_TOKENIZER["encoder_config"])
    save_file(_fill(seed, shapes), speech / "model.safetensors", metadata={"format": "pt"})
    return folder


def _json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _fill(seed: int, shapes: Shapes) -> dict[str, torch.Tensor]:
    return {name: _tensor(seed, name, shape) for name, shape in shapes.items()}


def _tensor(seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    last = name.rsplit(".", 1)[-1]
    if last == "initialized":
        return torch.ones(shape)
    if last == "cluster_usage":
        return normal(seed, name, shape).abs() + 0.5
    if last in ("scale", "gamma"):
        return normal(seed, name, shape, 0.1) + 0.3
    if last in ("alpha", "beta"):
        return normal(seed, name, shape, 0.3)
    if last == "bias":
        return normal(seed, name, shape, 0.1)
    if len(shape) == 1:
        return normal(seed, name, shape, 0.1) + 1
    if "embed" in name:
        return normal(seed, name, shape)
    if "codec_head" in name or "lm_head" in name:
        return dense(seed, name, shape, 4.0)
    if name == "decoder.decoder.6.conv.weight":
        return dense(seed, name, shape, LOUDNESS)
    if re.match(r"decoder\.(decoder\.\d+\.block\.1|upsample\.\d+\.0)\.conv", name):
        # Transposed: inputs come first; two of them meet in a sample where the kernel is twice the stride.
        return normal(seed, name, shape, 0.9 / math.sqrt(2 * shape[0]))
    if name.startswith("decoder.decoder"):
        return dense(seed, name, shape, 0.6)  # its residual units add up
    return dense(seed, name, shape, 1.2)
