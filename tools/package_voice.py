"""Package a voice for stagevox: ``package_voice.py SRC OUT``.

SRC holds ``config.json``, ``tokenizer.json``, ``talker.safetensors``, ``code_predictor.safetensors`` and
``code2wav.safetensors``, as the voice's training exports them. OUT gets one folder a stage, each with the ``config.json``
and ``model.safetensors`` that vLLM loads: tensors keep their names under a prefix, and their fp16 storage.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def talker_config(voice: dict[str, Any], name: str) -> dict[str, Any]:
    """The Talker's config: what vLLM reads, then the model's own fields."""
    t, p = voice["talker"], voice["code_predictor"]
    prompt = t["prompt_text_rows"] + 2
    return {
        "architectures": ["MiniTalkerForCausalLM"],
        "model_type": "stagevox_mini_talker",
        "dtype": "float32",
        "hidden_size": t["hidden_size"],
        "num_hidden_layers": t["num_hidden_layers"],
        "num_attention_heads": t["num_attention_heads"],
        "num_key_value_heads": t["num_attention_heads"],
        "head_dim": t["head_dim"],
        "intermediate_size": t["intermediate_size"],
        "hidden_act": "silu",
        "rms_norm_eps": t["rms_norm_eps"],
        "rope_parameters": {"rope_type": "default", "rope_theta": t["rope_theta"]},
        "vocab_size": t["codec_embedding_rows"][0],
        "max_position_embeddings": _round_up(prompt + t["max_frames"] + 1, 32),
        "tie_word_embeddings": False,
        "voices": [name],
        "text_vocab_size": t["text_vocab_size"],
        "text_eos_id": t["text_eos_id"],
        "text_pad_id": t["text_pad_id"],
        "prompt_text_rows": t["prompt_text_rows"],
        "codebook_sizes": t["codebook_sizes"],
        "codec_eos_id": t["codec_eos_id"],
        "codec_bos_id": t["codec_bos_id"],
        "codec_pad_id": t["codec_pad_id"],
        "lm_head_size": t["lm_head_size"],
        "max_frames": t["max_frames"],
        "predictor_layers": p["num_layers"],
        "predictor_intermediate_size": p["intermediate_size"],
    }


def code2wav_config(voice: dict[str, Any]) -> dict[str, Any]:
    """Code2Wav's config. The attention fields only satisfy vLLM: the net has none."""
    t, c = voice["talker"], voice["code2wav"]
    frames = c["warmup_codes"] + t["max_frames"] + 1
    return {
        "architectures": ["MiniCode2Wav"],
        "model_type": "stagevox_mini_code2wav",
        "dtype": "float32",
        "hidden_size": c["hidden_size"],
        "num_hidden_layers": c["pre_layers"] + c["post_layers"],
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": t["codebook_sizes"][0],
        "max_position_embeddings": _round_up(frames, 32),
        "tie_word_embeddings": False,
        "sample_rate": voice["sample_rate"],
        "frame_rate": voice["frame_rate"],
        "codebook_sizes": t["codebook_sizes"],
        "embedding_size": c["embedding_size"],
        "pre_layers": c["pre_layers"],
        "pre_kernel": c["pre_kernel"],
        "pre_intermediate_size": c["pre_ff"],
        "post_layers": c["post_layers"],
        "post_kernel": c["post_kernel"],
        "post_intermediate_size": c["post_ff"],
        "upsample": c["upsample"],
        "n_fft": c["n_fft"],
        "hop": c["hop"],
        "ola_gain": c["ola_gain"],
        "layer_norm_eps": c["layer_norm_eps"],
        "samples_per_code": c["samples_per_code"],
        "delay_samples": c["delay_samples"],
        "warmup_codes": c["warmup_codes"],
        "left_context_codes": c["left_context_codes"],
        "silence_codes": c["silence_codes"],
    }


def _tensors(src: Path, *parts: str) -> dict[str, torch.Tensor]:
    return {f"{part}.{name}": tensor for part in parts for name, tensor in load_file(src / f"{part}.safetensors").items()}


def package(src: Path, out: Path, name: str) -> None:
    """Write ``out/talker`` and ``out/code2wav`` from the voice in ``src``."""
    voice = json.loads((src / "config.json").read_text())
    stages = {
        "talker": (talker_config(voice, name), _tensors(src, "talker", "code_predictor")),
        "code2wav": (code2wav_config(voice), _tensors(src, "code2wav")),
    }
    for stage, (config, tensors) in stages.items():
        folder = out / stage
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(src / "tokenizer.json", out / "talker" / "tokenizer.json")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Package a voice for stagevox.")
    parser.add_argument("src", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--name", default="slt", help="the voice's name")
    args = parser.parse_args()
    package(args.src, args.out, args.name)


if __name__ == "__main__":
    main()
