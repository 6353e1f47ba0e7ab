"""Names and shapes of a Qwen3-TTS checkpoint's tensors, as they follow from its config: plain values, no model is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagevox.models.qwen3_talker.layout import Shapes, affine, decoder_shapes, predictor_shapes

ENCODING = ("encoder.", "decoder.quantizer.rvq_first.input_proj.", "decoder.quantizer.rvq_rest.input_proj.")
"""Tensors of the speech tokenizer that turn sound into codes; speech from text reads none of them."""


def talker_shapes(config: Mapping[str, Any]) -> Shapes:
    """The talker and its code predictor, from ``talker_config``."""
    size, text = config["hidden_size"], config["text_hidden_size"]
    return {
        "talker.model.codec_embedding.weight": (config["vocab_size"], size),
        "talker.model.text_embedding.weight": (config["text_vocab_size"], text),
        "talker.codec_head.weight": (config["vocab_size"], size),
        **affine("talker.text_projection.linear_fc1", text, text),
        **affine("talker.text_projection.linear_fc2", size, text),
        **decoder_shapes("talker.model.", config),
        **predictor_shapes("talker.code_predictor.", config["code_predictor_config"], size),
    }


def _transposed(name: str, size_in: int, size_out: int, kernel: int) -> Shapes:
    return {f"{name}.weight": (size_in, size_out, kernel), f"{name}.bias": (size_out,)}


def _snake(name: str, size: int) -> Shapes:
    return {f"{name}.alpha": (size,), f"{name}.beta": (size,)}


def vocoder_shapes(config: Mapping[str, Any]) -> Shapes:
    """The 12 Hz speech tokenizer's decoder, from ``decoder_config``; two of its tensors serve encoding alone."""
    latent, hidden, book, wide = (config[key] for key in ("latent_dim", "hidden_size", "codebook_dim", "decoder_dim"))
    shapes: Shapes = {}
    for part, count in (("first", 1), ("rest", config["num_quantizers"] - 1)):
        name = f"decoder.quantizer.rvq_{part}"
        shapes[f"{name}.input_proj.weight"] = (book // 2, book, 1)
        shapes[f"{name}.output_proj.weight"] = (book, book // 2, 1)
        for layer in range(count):
            shapes[f"{name}.vq.layers.{layer}._codebook.cluster_usage"] = (config["codebook_size"],)
            shapes[f"{name}.vq.layers.{layer}._codebook.embedding_sum"] = (config["codebook_size"], book // 2)
    shapes |= affine("decoder.pre_conv.conv", latent, book, 3)
    transformer = "decoder.pre_transformer."
    shapes |= affine(f"{transformer}input_proj", hidden, latent) | affine(f"{transformer}output_proj", latent, hidden)
    shapes |= decoder_shapes(transformer, config, norms=False)
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"{transformer}layers.{layer}.{kind}_layer_scale.scale": (hidden,) for kind in ("self_attn", "mlp")}
    for index, factor in enumerate(config["upsampling_ratios"]):
        name = f"decoder.upsample.{index}"
        shapes |= _transposed(f"{name}.0.conv", latent, latent, factor)
        shapes |= affine(f"{name}.1.dwconv.conv", latent, 1, 7) | affine(f"{name}.1.norm", latent)
        shapes |= affine(f"{name}.1.pwconv1", 4 * latent, latent) | affine(f"{name}.1.pwconv2", latent, 4 * latent)
        shapes[f"{name}.1.gamma"] = (latent,)
    shapes |= affine("decoder.decoder.0.conv", wide, latent, 7)
    rates = config["upsample_rates"]
    for index, rate in enumerate(rates):
        size, name = wide // 2 ** (index + 1), f"decoder.decoder.{index + 1}.block"
        shapes |= _snake(f"{name}.0", 2 * size) | _transposed(f"{name}.1.conv", 2 * size, size, 2 * rate)
        for unit in (2, 3, 4):
            shapes |= _snake(f"{name}.{unit}.act1", size) | affine(f"{name}.{unit}.conv1.conv", size, size, 7)
            shapes |= _snake(f"{name}.{unit}.act2", size) | affine(f"{name}.{unit}.conv2.conv", size, size, 1)
    size = wide // 2 ** len(rates)
    shapes |= _snake(f"decoder.decoder.{len(rates) + 1}", size) | affine(f"decoder.decoder.{len(rates) + 2}.conv", 1, size, 7)
    return shapes
