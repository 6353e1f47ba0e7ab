"""A tiny random checkpoint of Qwen3-Omni: the published layout, fields and tensor names, small numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3OmniMoeConfig

from stagevox.bench.checkpoints.tokenizer import special_id, write_tokenizer
from stagevox.bench.checkpoints.weights import dense, normal, write_shards
from stagevox.models.qwen3_omni.layout import tensor_shapes

GROUPS = 8
"""Code groups of a frame (published: 16)."""

CODES = 256
"""Codes of a group (published: 2048); the control ids of the talker come after these, in the last 1024 of its vocabulary."""

TEXT_EOS_GAIN = 2.4
CODEC_EOS_GAIN = 1.5
"""How much larger the rows of the two end ids are than other rows, so that replies end by themselves now and then."""

SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
]

MEDIA_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SPEAKERS = {"aiden": 2303, "chelsie": 2301, "ethan": 2302}
"""Names and their ids in the published vocabulary."""


def codec_id(published: int) -> int:
    """The talker's id here of what the published vocabulary has at ``published`` (2048 and up)."""
    return published - 2048 + CODES


def _rope(section: list[int] | None) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "default", "type": "default"}
    if section is not None:
        scaling |= {"interleaved": True, "mrope_interleaved": True, "mrope_section": section}
    return {"rope_scaling": scaling if section else None, "rope_theta": 1_000_000}


def _decoder(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "num_attention_heads": 2,
        "num_hidden_layers": layers,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }


def _experts(size: int) -> dict[str, Any]:
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": size,
        "norm_topk_prob": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }


def config(word_ids: dict[str, int]) -> dict[str, Any]:
    """``config.json``; ``word_ids`` has the tokens of the three roles."""
    media = {
        "audio_end_token_id": special_id(151670),
        "audio_start_token_id": special_id(151669),
        "audio_token_id": special_id(151675),
        "image_token_id": special_id(151655),
        "video_token_id": special_id(151656),
        "vision_end_token_id": special_id(151653),
        "vision_start_token_id": special_id(151652),
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
    }
    thinker = {
        "model_type": "qwen3_omni_moe_thinker",
        "audio_config": {
            "model_type": "qwen3_omni_moe_audio_encoder",
            "conv_chunksize": 500,
            "d_model": 64,
            "downsample_hidden_size": 16,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "encoder_layers": 1,
            "max_source_positions": 1500,
            "n_window": 50,
            "n_window_infer": 400,
            "num_mel_bins": 16,
            "output_dim": 64,
        },
        "vision_config": {
            "model_type": "qwen3_omni_moe_vision_encoder",
            "apply_vit_abs_pos_embed": True,
            "deepstack_visual_indexes": [0],
            "depth": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 64,
            "image_size": 128,
            "in_channels": 3,
            "intermediate_size": 64,
            "num_heads": 2,
            "num_position_embeddings": 64,
            "out_hidden_size": 64,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "text_config": {
            "model_type": "qwen3_omni_moe_text",
            **_decoder(64, 4),
            **_experts(32),
            **_rope([6, 5, 5]),
            "intermediate_size": 128,
            "max_position_embeddings": 4096,
            "vocab_size": 704,
        },
        "tie_word_embeddings": False,
        "user_token_id": word_ids["user"],
        **media,
    }
    talker = {
        "model_type": "qwen3_omni_moe_talker",
        "accept_hidden_layer": 2,
        "code_predictor_config": {
            "model_type": "qwen3_omni_moe_talker_code_predictor",
            **_decoder(64, 2),
            **_rope(None),
            "intermediate_size": 96,
            "max_position_embeddings": 4096,
            "num_code_groups": GROUPS,
            "vocab_size": CODES,
        },
        "codec_bos_id": codec_id(2149),
        "codec_eos_token_id": codec_id(2150),
        "codec_nothink_id": codec_id(2155),
        "codec_pad_id": codec_id(2148),
        "codec_think_bos_id": codec_id(2156),
        "codec_think_eos_id": codec_id(2157),
        "num_code_groups": GROUPS,
        "spatial_merge_size": 2,
        "speaker_id": {name: codec_id(number) for name, number in SPEAKERS.items()},
        "text_config": {
            "model_type": "qwen3_omni_moe_talker_text",
            **_decoder(64, 2),
            **_experts(32),
            **_rope([6, 5, 5]),
            "intermediate_size": 128,
            "max_position_embeddings": 4096,
            "shared_expert_intermediate_size": 48,
            "vocab_size": CODES + 1024,
        },
        "thinker_hidden_size": 64,
        **media,
    }
    code2wav = {
        "model_type": "qwen3_omni_moe_code2wav",
        "codebook_size": CODES,
        "decoder_dim": 48,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 64,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_quantizers": GROUPS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "sliding_window": 72,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    }
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "assistant_token_id": word_ids["assistant"],
        "code2wav_config": code2wav,
        "dtype": "float32",
        "enable_audio_output": True,
        "im_end_token_id": special_id(151645),
        "im_start_token_id": special_id(151644),
        "model_type": "qwen3_omni_moe",
        "system_token_id": word_ids["system"],
        "talker_config": talker,
        "thinker_config": thinker,
        "tts_bos_token_id": special_id(151672),
        "tts_eos_token_id": special_id(151673),
        "tts_pad_token_id": special_id(151671),
        "user_token_id": word_ids["user"],
    }


def _weight(seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if len(shape) == 1:
        if name.endswith(("alpha", "beta", "bias")):
            return normal(seed, name, shape, 0.1)
        if name.endswith(("scale", "gamma")):
            return 0.3 + normal(seed, name, shape, 0.05)
        return 1 + normal(seed, name, shape, 0.1)  # a norm
    if "embed" in name and "patch_embed" not in name:
        return normal(seed, name, shape)
    if name.startswith("code2wav"):
        return dense(seed, name, shape, 0.15 if shape[0] == 1 else 0.8)  # the last layer: stay within -1..1
    return dense(seed, name, shape, 1.5)


def tensors(reference: Qwen3OmniMoeConfig, seed: int) -> dict[str, torch.Tensor]:
    """All tensors, each from ``(seed, name)`` alone."""
    made = {name: _weight(seed, name, shape) for name, shape in tensor_shapes(reference).items()}
    text_head = made["thinker.lm_head.weight"]
    end = special_id(151645)
    text_head[special_id(151643) :] = 0  # no special token can win but the one that ends a reply
    text_head[end] = dense(seed, "thinker.lm_head.end", (1, text_head.shape[1]), 1.5)[0] * TEXT_EOS_GAIN
    made["talker.codec_head.weight"][codec_id(2150)] *= CODEC_EOS_GAIN
    return made


def _json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def write(folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint: configuration, tokenizer, processors, chat template and sharded weights."""
    tokenizer = write_tokenizer(folder, SPECIALS, MEDIA_TOKENS)
    word_ids = {word: tokenizer.convert_tokens_to_ids(word) for word in ("system", "user", "assistant")}
    _json(folder / "config.json", config(word_ids))
    end, none = special_id(151645), special_id(151643)
    _json(folder / "generation_config.json", {"eos_token_id": [end, none], "pad_token_id": none})
    _json(folder / "chat_template.json", {"chat_template": CHAT_TEMPLATE})
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    _json(folder / "tokenizer_config.json", tokenizer_config | {"chat_template": CHAT_TEMPLATE})
    _json(
        folder / "preprocessor_config.json",
        {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen3OmniMoeProcessor",
            "chunk_length": 300,
            "dither": 0.0,
            "feature_size": 16,
            "hop_length": 160,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "max_pixels": 12845056,
            "merge_size": 2,
            "min_pixels": 3136,
            "n_fft": 400,
            "n_samples": 4800000,
            "nb_max_frames": 30000,
            "padding_side": "right",
            "padding_value": 0.0,
            "patch_size": 16,
            "return_attention_mask": True,
            "sampling_rate": 16000,
            "temporal_patch_size": 2,
        },
    )
    write_shards(folder, tensors(Qwen3OmniMoeConfig.from_pretrained(folder), seed))
    return folder
