"""Trained voice -> the weights folders of the package.

    python export.py DATA_FOLDER WEIGHTS_FOLDER

Writes ``talker/`` (Talker and code predictor, prefixes ``talker.`` and ``code_predictor.``, and the text pieces) and
``code2wav/`` (prefix ``code2wav.``): config.json and model.safetensors in fp16.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from code2wav_model import (
    CODEBOOK_SIZES,
    DELAY_SAMPLES,
    HOP,
    LEFT_CONTEXT_CODES,
    N_FFT,
    OVERLAP_GAIN,
    SAMPLES_PER_CODE,
    UPSAMPLE,
    WARMUP_CODES,
)
from features import SAMPLE_RATE
from safetensors.torch import save_file
from talker_model import (
    CODEC_BOS,
    CODEC_EOS,
    CODEC_PAD,
    HEAD_DIM,
    MAX_FRAMES,
    NORM_EPS,
    PREDICTOR_LAYERS,
    PROMPT_ROWS,
    ROPE_THETA,
    TextTable,
)
from torch import Tensor

State = dict[str, Tensor]
VOICE = "slt"
MAX_POSITIONS = 192


def count(state: State, pattern: str) -> int:
    """How many numbers stand for the * in names such as ``talker.layers.*.o``."""
    head, tail = pattern.split("*")
    return len({n[len(head) :].split(".")[0] for n in state if n.startswith(head) and n.endswith(tail)})


def talker_config(state: State, table: TextTable) -> dict[str, Any]:
    hidden = state["talker.norm"].shape[0]
    return {
        "architectures": ["MiniTalkerForCausalLM"],
        "model_type": "stagevox_mini_talker",
        "dtype": "float32",
        "hidden_size": hidden,
        "num_hidden_layers": count(state, "talker.layers.*.o"),
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": hidden // HEAD_DIM,
        "head_dim": HEAD_DIM,
        "intermediate_size": state["talker.layers.0.down"].shape[1],
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "vocab_size": state["talker.codec_embedding.0"].shape[0],
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "voices": [VOICE],
        "text_vocab_size": table.pad_id + 1,
        "text_eos_id": table.eos_id,
        "text_pad_id": table.pad_id,
        "prompt_text_rows": PROMPT_ROWS,
        "codebook_sizes": list(CODEBOOK_SIZES),
        "codec_eos_id": CODEC_EOS,
        "codec_bos_id": CODEC_BOS,
        "codec_pad_id": CODEC_PAD,
        "lm_head_size": state["talker.lm_head"].shape[0],
        "max_frames": MAX_FRAMES,
        "predictor_layers": PREDICTOR_LAYERS,
        "predictor_intermediate_size": state["code_predictor.blocks.0.fc1.weight"].shape[0],
    }


def code2wav_config(state: State, silence: Tensor) -> dict[str, Any]:
    pre, post = "code2wav.pre", "code2wav.post"
    layers = {p: count(state, f"{p}.*.scale") for p in (pre, post)}
    return {
        "architectures": ["MiniCode2Wav"],
        "model_type": "stagevox_mini_code2wav",
        "dtype": "float32",
        "hidden_size": state["code2wav.norm.weight"].shape[0],
        "num_hidden_layers": sum(layers.values()),
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": CODEBOOK_SIZES[0],
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "sample_rate": SAMPLE_RATE,
        "frame_rate": SAMPLE_RATE // SAMPLES_PER_CODE,
        "codebook_sizes": list(CODEBOOK_SIZES),
        "embedding_size": state["code2wav.embedding.0"].shape[1],
        "pre_layers": layers[pre],
        "pre_kernel": state[f"{pre}.0.dw.weight"].shape[-1],
        "pre_intermediate_size": state[f"{pre}.0.fc1.weight"].shape[0],
        "post_layers": layers[post],
        "post_kernel": state[f"{post}.0.dw.weight"].shape[-1],
        "post_intermediate_size": state[f"{post}.0.fc1.weight"].shape[0],
        "upsample": UPSAMPLE,
        "n_fft": N_FFT,
        "hop": HOP,
        "ola_gain": OVERLAP_GAIN,
        "layer_norm_eps": 1e-5,
        "samples_per_code": SAMPLES_PER_CODE,
        "delay_samples": DELAY_SAMPLES,
        "warmup_codes": WARMUP_CODES,
        "left_context_codes": LEFT_CONTEXT_CODES,
        "silence_codes": silence.tolist(),
    }


def write(folder: Path, state: State, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    save_file({name: t.half().contiguous() for name, t in state.items()}, path, metadata={"format": "pt"})
    path.chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{folder}: {sum(t.numel() for t in state.values())} weights, {path.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("weights", type=Path)
    a = parser.parse_args()
    talker = torch.load(a.folder / "talker2.pt")
    write(a.weights / "talker", talker, talker_config(talker, TextTable(a.folder / "tokenizer.json")))
    shutil.copyfile(a.folder / "tokenizer.json", a.weights / "talker" / "tokenizer.json")
    code2wav = {f"code2wav.{name}": t for name, t in torch.load(a.folder / "code2wav.pt").items()}
    silence = code2wav.pop("code2wav.silence")
    write(a.weights / "code2wav", code2wav, code2wav_config(code2wav, silence))


if __name__ == "__main__":
    main()
