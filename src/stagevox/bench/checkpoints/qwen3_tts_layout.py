"""Names and shapes of a Qwen3-TTS checkpoint's tensors, as they follow from its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shapes = dict[str, tuple[int, ...]]


def talker_shapes(config: Mapping[str, Any]) -> Shapes:
    """The talker and its code predictor, from ``talker_config``."""
    predictor = config["code_predictor_config"]
    size, text, groups = (config[key] for key in ("hidden_size", "text_hidden_size", "num_code_groups"))
    shapes: Shapes = {
        "talker.model.codec_embedding.weight": (config["vocab_size"], size),
        "talker.model.text_embedding.weight": (config["text_vocab_size"], text),
        "talker.codec_head.weight": (config["vocab_size"], size),
        "talker.text_projection.linear_fc1.weight": (text, text),
        "talker.text_projection.linear_fc1.bias": (text,),
        "talker.text_projection.linear_fc2.weight": (size, text),
        "talker.text_projection.linear_fc2.bias": (size,),
    }
    shapes |= _decoder("talker.model.", config, norms=True)
    inner = predictor["hidden_size"]
    shapes |= _decoder("talker.code_predictor.model.", predictor, norms=True)
    for group in range(groups - 1):
        shapes[f"talker.code_predictor.model.codec_embedding.{group}.weight"] = (predictor["vocab_size"], size)
        shapes[f"talker.code_predictor.lm_head.{group}.weight"] = (predictor["vocab_size"], inner)
    if inner != size:
        shapes["talker.code_predictor.small_to_mtp_projection.weight"] = (inner, size)
        shapes["talker.code_predictor.small_to_mtp_projection.bias"] = (inner,)
    return shapes


def speech_tokenizer_shapes(config: Mapping[str, Any]) -> Shapes:
    """Both halves of the 12 Hz speech tokenizer; speech needs the decoder only."""
    return _vocoder(config["decoder_config"]) | _encoder(config["encoder_config"])


def _decoder(prefix: str, config: Mapping[str, Any], *, norms: bool) -> Shapes:
    """Layers of a decoder with grouped attention and a gated MLP, and the last norm; ``norms``: of queries and keys, too."""
    size, inner, head = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    shapes: Shapes = {f"{prefix}norm.weight": (size,)}
    for layer in range(config["num_hidden_layers"]):
        name = f"{prefix}layers.{layer}"
        for kind, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
            shapes[f"{name}.self_attn.{kind}_proj.weight"] = (config[heads] * head, size)
        shapes[f"{name}.self_attn.o_proj.weight"] = (size, config["num_attention_heads"] * head)
        if norms:
            shapes |= {f"{name}.self_attn.{kind}_norm.weight": (head,) for kind in "qk"}
        shapes |= {f"{name}.mlp.{kind}_proj.weight": (inner, size) for kind in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj.weight"] = (size, inner)
        shapes |= {f"{name}.{kind}_layernorm.weight": (size,) for kind in ("input", "post_attention")}
    return shapes


def _affine(name: str, out: int, *inputs: int) -> Shapes:
    return {f"{name}.weight": (out, *inputs), f"{name}.bias": (out,)}


def _transposed(name: str, size_in: int, size_out: int, kernel: int) -> Shapes:
    return {f"{name}.weight": (size_in, size_out, kernel), f"{name}.bias": (size_out,)}


def _snake(name: str, size: int) -> Shapes:
    return {f"{name}.alpha": (size,), f"{name}.beta": (size,)}


def _vocoder(config: Mapping[str, Any]) -> Shapes:
    latent, hidden, book, wide = (config[key] for key in ("latent_dim", "hidden_size", "codebook_dim", "decoder_dim"))
    shapes: Shapes = {}
    for part, count in (("first", 1), ("rest", config["num_quantizers"] - 1)):
        name = f"decoder.quantizer.rvq_{part}"
        shapes[f"{name}.input_proj.weight"] = (book // 2, book, 1)
        shapes[f"{name}.output_proj.weight"] = (book, book // 2, 1)
        for layer in range(count):
            shapes[f"{name}.vq.layers.{layer}._codebook.cluster_usage"] = (config["codebook_size"],)
            shapes[f"{name}.vq.layers.{layer}._codebook.embedding_sum"] = (config["codebook_size"], book // 2)
    shapes |= _affine("decoder.pre_conv.conv", latent, book, 3)
    transformer = "decoder.pre_transformer."
    shapes |= _affine(f"{transformer}input_proj", hidden, latent) | _affine(f"{transformer}output_proj", latent, hidden)
    shapes |= _decoder(transformer, config, norms=False)
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"{transformer}layers.{layer}.{kind}_layer_scale.scale": (hidden,) for kind in ("self_attn", "mlp")}
    for index, factor in enumerate(config["upsampling_ratios"]):
        name = f"decoder.upsample.{index}"
        shapes |= _transposed(f"{name}.0.conv", latent, latent, factor)
        shapes |= _affine(f"{name}.1.dwconv.conv", latent, 1, 7) | _affine(f"{name}.1.norm", latent)
        shapes |= _affine(f"{name}.1.pwconv1", 4 * latent, latent) | _affine(f"{name}.1.pwconv2", latent, 4 * latent)
        shapes[f"{name}.1.gamma"] = (latent,)
    shapes |= _affine("decoder.decoder.0.conv", wide, latent, 7)
    rates = config["upsample_rates"]
    for index, rate in enumerate(rates):
        size, name = wide // 2 ** (index + 1), f"decoder.decoder.{index + 1}.block"
        shapes |= _snake(f"{name}.0", 2 * size) | _transposed(f"{name}.1.conv", 2 * size, size, 2 * rate)
        for unit in (2, 3, 4):
            shapes |= _snake(f"{name}.{unit}.act1", size) | _affine(f"{name}.{unit}.conv1.conv", size, size, 7)
            shapes |= _snake(f"{name}.{unit}.act2", size) | _affine(f"{name}.{unit}.conv2.conv", size, size, 1)
    size = wide // 2 ** len(rates)
    shapes |= _snake(f"decoder.decoder.{len(rates) + 1}", size) | _affine(f"decoder.decoder.{len(rates) + 2}.conv", 1, size, 7)
    return shapes


def _encoder(config: Mapping[str, Any]) -> Shapes:
    """Mimi's encoder. Nothing in the chain from text to speech runs it; a published checkpoint holds it all the same."""
    hidden, size = config["hidden_size"], config["num_filters"]
    layers = "encoder.encoder.layers"
    shapes = _affine(f"{layers}.0.conv", size, config["audio_channels"], config["kernel_size"])
    index = 1
    for ratio in reversed(config["upsampling_ratios"]):
        half = size // config["compress"]
        shapes |= _affine(f"{layers}.{index}.block.1.conv", half, size, config["residual_kernel_size"])
        shapes |= _affine(f"{layers}.{index}.block.3.conv", size, half, 1)
        shapes |= _affine(f"{layers}.{index + 2}.conv", 2 * size, size, 2 * ratio)
        index, size = index + 3, 2 * size
    shapes |= _affine(f"{layers}.{index + 1}.conv", hidden, size, config["last_kernel_size"])
    for layer in range(config["num_hidden_layers"]):
        name = f"encoder.encoder_transformer.layers.{layer}"
        for kind, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
            shapes[f"{name}.self_attn.{kind}_proj.weight"] = (config[heads] * config["head_dim"], hidden)
        shapes[f"{name}.self_attn.o_proj.weight"] = (hidden, config["num_attention_heads"] * config["head_dim"])
        shapes[f"{name}.mlp.fc1.weight"] = (config["intermediate_size"], hidden)
        shapes[f"{name}.mlp.fc2.weight"] = (hidden, config["intermediate_size"])
        for kind in ("input", "post_attention"):
            shapes |= _affine(f"{name}.{kind}_layernorm", hidden)
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
