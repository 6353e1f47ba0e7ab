"""Names and shapes of the tensors of Mimi's encoder, which the 12 Hz speech tokenizer of Qwen3-TTS has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagevox.models.qwen3_talker.layout import Shapes, affine


def mimi_encoder_shapes(config: Mapping[str, Any]) -> Shapes:
    """Mimi's encoder. Nothing in the chain from text to speech runs it; a published checkpoint holds it all the same."""
    hidden, size = config["hidden_size"], config["num_filters"]
    layers = "encoder.encoder.layers"
    shapes = affine(f"{layers}.0.conv", size, config["audio_channels"], config["kernel_size"])
    index = 1
    for ratio in reversed(config["upsampling_ratios"]):
        half = size // config["compress"]
        shapes |= affine(f"{layers}.{index}.block.1.conv", half, size, config["residual_kernel_size"])
        shapes |= affine(f"{layers}.{index}.block.3.conv", size, half, 1)
        shapes |= affine(f"{layers}.{index + 2}.conv", 2 * size, size, 2 * ratio)
        index, size = index + 3, 2 * size
    shapes |= affine(f"{layers}.{index + 1}.conv", hidden, size, config["last_kernel_size"])
    for layer in range(config["num_hidden_layers"]):
        name = f"encoder.encoder_transformer.layers.{layer}"
        for kind, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
            shapes[f"{name}.self_attn.{kind}_proj.weight"] = (config[heads] * config["head_dim"], hidden)
        shapes[f"{name}.self_attn.o_proj.weight"] = (hidden, config["num_attention_heads"] * config["head_dim"])
        shapes[f"{name}.mlp.fc1.weight"] = (config["intermediate_size"], hidden)
        shapes[f"{name}.mlp.fc2.weight"] = (hidden, config["intermediate_size"])
        for kind in ("input", "post_attention"):
            shapes |= affine(f"{name}.{kind}_layernorm", hidden)
        shapes |= {f"{name}.{kind}_layer_scale.scale": (hidden,) for kind in ("self_attn", "mlp")}
    shapes["encoder.downsample.conv.weight"] = (hidden, hidden, 4)
    book, inner = config["codebook_dim"], config["vector_quantization_hidden_dimension"]
    semantic = config["num_semantic_quantizers"]
    for kind, count in (("semantic", semantic), ("acoustic", config["num_quantizers"] - semantic)):
        name = f"encoder.quantizer.{kind}_residual_vector_quantizer"
        shapes |= {f"{name}.input_proj.weight": (inner, hidden, 1), f"{name}.output_proj.weight": (hidden, inner, 1)}
        for layer in range(count):
            codebook = f"{name}.layers.{layer}.codebook"
            shapes[f"{codebook}.cluster_usage"] = (config["codebook_size"],)
            shapes[f"{codebook}.embed_sum"] = (config["codebook_size"], book)
            shapes[f"{codebook}.initialized"] = (1,)
    return shapes
