"""A tiny Qwen2.5-Omni checkpoint: Thinker, Talker and Token2Wav in one folder, in the layout in which the family is published.

Differences from the published one are sizes, the vocabulary of the text (ids of special tokens move with it) and the length of
audio that the preprocessor pads to. Codec ids are the published ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from .tokenizer import special_id, write_tokenizer
from .weights import dense, normal, write_shards

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|AUDIO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|vision_pad|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
)
"""The published special tokens from id 151643 on."""

EXTRA = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif part['type'] == 'video' %}<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEXT_EOS, END_OF_TEXT = special_id(151645), special_id(151643)
CODEC_EOS, CODES = 8294, 8192
VOCABULARY = 896

VOICES = {"Chelsie": 151872, "Ethan": 151873}
"""The voices and the text token that begins each one's speech."""

MEDIA_IDS = {
    "audio_token_index": special_id(151646),
    "image_token_index": special_id(151655),
    "video_token_index": special_id(151656),
    "audio_start_token_id": special_id(151647),
    "audio_end_token_id": special_id(151648),
    "vision_start_token_id": special_id(151652),
    "vision_end_token_id": special_id(151653),
    "position_id_per_seconds": 25,
    "seconds_per_chunk": 2,
}
HIDDEN, MEL, SPEAKER = 64, 16, 24


def _decoder(**fields: Any) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "intermediate_size": 128,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"mrope_section": [4, 6, 6], "rope_type": "default", "type": "default"},
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        **fields,
    }


def config(user_id: int) -> dict[str, Any]:
    """``config.json``; ``user_id`` is the token of the word "user"."""
    thinker = {
        "architectures": ["Qwen2OmniNaViTThinkerForConditionalGeneration"],
        "model_type": "qwen2_5_omni_thinker",
        "audio_config": {
            "model_type": "qwen2_5_omni_audio_encoder",
            "num_mel_bins": MEL,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "d_model": 32,
            "n_window": 50,
            "output_dim": HIDDEN,
            "max_source_positions": 1500,
        },
        "vision_config": {
            "model_type": "qwen2_5_omni_vision_encoder",
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
            "fullatt_block_indexes": [1],
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
        },
        "text_config": _decoder(
            model_type="qwen2_5_omni_text",
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            num_hidden_layers=3,
            num_attention_heads=2,
        ),
        "user_token_id": user_id,
        **MEDIA_IDS,
    }
    talker = _decoder(
        architectures=["Qwen2OmniTalkerForConditionalGeneration"],
        model_type="qwen2_5_omni_talker",
        vocab_size=8448,
        embedding_size=HIDDEN,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,  # heads are wider together than the hidden state, as in the published talker
        num_key_value_heads=2,
        head_dim=32,
        spatial_merge_size=2,
        tts_text_start_token_id=special_id(151860),
        tts_text_end_token_id=special_id(151861),
        tts_text_pad_token_id=special_id(151859),
        tts_codec_start_token_id=8293,
        tts_codec_end_token_id=CODEC_EOS,
        tts_codec_pad_token_id=8292,
        tts_codec_mask_token_id=8296,
        **MEDIA_IDS,
    )
    token2wav = {
        "model_type": "qwen2_5_omni_token2wav",
        "dit_config": {
            "model_type": "qwen2_5_omni_dit",
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "head_dim": 32,
            "ff_mult": 2,
            "emb_dim": 32,
            "block_size": 24,
            "look_ahead_layers": [1],
            "look_backward_layers": [0, 3],
            "repeats": 2,
            "num_embeds": 8193,
            "mel_dim": MEL,
            "enc_emb_dim": SPEAKER,
            "enc_dim": 16,
            "enc_channels": [32, 32, 32, 32, 96],
            "enc_attention_channels": 8,
            "enc_se_channels": 8,
            "dropout": 0.1,
        },
        "bigvgan_config": {"model_type": "qwen2_5_omni_bigvgan", "mel_dim": MEL, "upsample_initial_channel": 64},
    }
    return {
        "architectures": ["Qwen2_5OmniModel"],
        "model_type": "qwen2_5_omni",
        "enable_audio_output": True,
        "torch_dtype": "float32",
        "thinker_config": thinker,
        "talker_config": talker,
        "token2wav_config": token2wav,
    }


PREPROCESSOR = {
    "chunk_length": 30,
    "dither": 0.0,
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": MEL,
    "hop_length": 160,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "max_pixels": 50176,
    "merge_size": 2,
    "min_pixels": 3136,
    "n_fft": 400,
    "n_samples": 480000,
    "nb_max_frames": 3000,
    "padding_side": "right",
    "padding_value": 0.0,
    "patch_size": 14,
    "processor_class": "Qwen2_5OmniProcessor",
    "return_attention_mask": True,
    "sampling_rate": 16000,
    "temporal_patch_size": 2,
}


def tensors(settings: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint. Linear layers keep values about as large as they come, embeddings are of size one."""
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

    with torch.device("meta"):
        model = Qwen2_5OmniForConditionalGeneration._from_config(Qwen2_5OmniConfig(**settings))
    made = {name: _tensor(seed, name, list(tensor.shape)) for name, tensor in model.state_dict().items()}
    # A buffer that is published with the weights.
    size = settings["token2wav_config"]["dit_config"]["head_dim"]
    made["token2wav.code2wav_dit_model.rotary_embed.inv_freq"] = 1.0 / (10000.0 ** (torch.arange(0, size, 2).float() / size))
    _choose_what_can_win(made)
    return made


def _tensor(seed: int, name: str, shape: list[int]) -> torch.Tensor:
    field = name.rpartition(".")[2]
    if field in ("alpha", "beta") or field == "bias":
        return normal(seed, name, shape, 0.1)
    if len(shape) == 1:
        return 1.0 + normal(seed, name, shape, 0.1)
    if "embed_tokens" in name or "codec_embed" in name:
        return normal(seed, name, shape)
    if "conv_post" in name:
        return dense(seed, name, shape, 0.04)  # samples of about a quarter, not cut off at one
    if name.startswith("token2wav"):
        return dense(seed, name, shape, 1.0)
    return dense(seed, name, shape, 1.4)


def _choose_what_can_win(made: dict[str, torch.Tensor]) -> None:
    """Output rows of ids that no decoder may choose are zero; those of the two ends are large, so that replies do end."""
    text, codec = made["thinker.lm_head.weight"], made["talker.codec_head.weight"]
    text_end, codec_end = text[TEXT_EOS] * 2.0, codec[CODEC_EOS] * 1.9
    text[END_OF_TEXT:], codec[CODES:] = 0, 0
    text[TEXT_EOS], codec[CODEC_EOS] = text_end, codec_end


def speakers(seed: int) -> dict[str, dict[str, Any]]:
    """``spk_dict.pt``: text token, speaker embedding ``[1, d]`` and reference mel ``[1, frames, mel]`` of each voice."""
    return {
        name: {
            "bos_token": special_id(token),
            "cond": normal(seed, f"{name}.cond", [1, SPEAKER]),
            "ref_mel": normal(seed, f"{name}.ref_mel", [1, 60 + 10 * index, MEL]),
        }
        for index, (name, token) in enumerate(VOICES.items())
    }


def write(folder: Path, seed: int = 0) -> Path:
    """Make the checkpoint of a seed in ``folder`` and return it; about 9 MB."""
    tokenizer = write_tokenizer(folder, SPECIALS, EXTRA)
    (user_id,) = tokenizer.encode("user", add_special_tokens=False)
    settings = config(user_id)
    generation = {"eos_token_id": [TEXT_EOS, END_OF_TEXT], "pad_token_id": END_OF_TEXT}
    files: dict[str, Any] = {
        "config.json": settings,
        "generation_config.json": generation,
        "preprocessor_config.json": PREPROCESSOR,
        "chat_template.json": {"chat_template": CHAT_TEMPLATE},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=1), encoding="utf-8")
    write_shards(folder, tensors(settings, seed))
    torch.save(speakers(seed), folder / "spk_dict.pt")
    return folder
