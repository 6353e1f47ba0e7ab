"""Names and shapes of tensors that checkpoints of both families have: plain values, no model is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shapes = dict[str, tuple[int, ...]]
"""Tensor name to shape."""


def affine(name: str, out: int, *inputs: int) -> Shapes:
    """A weight and a bias."""
    return {f"{name}.weight": (out, *inputs), f"{name}.bias": (out,)}


def decoder_shapes(prefix: str, config: Mapping[str, Any], *, norms: bool = True) -> Shapes:
    """Layers of a decoder with grouped attention and a gated MLP, and the last norm; ``norms``: of queries and keys, too."""
    size, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or size // config["num_attention_heads"]
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


def predictor_shapes(prefix: str, config: Mapping[str, Any], talker_size: int) -> Shapes:
    """The code predictor of a talker of width ``talker_size``, from ``code_predictor_config``."""
    size, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes = decoder_shapes(f"{prefix}model.", config)
    for group in range(config["num_code_groups"] - 1):
        shapes[f"{prefix}model.codec_embedding.{group}.weight"] = (vocabulary, talker_size)
        shapes[f"{prefix}lm_head.{group}.weight"] = (vocabulary, size)
    if size != talker_size:
        shapes |= affine(f"{prefix}small_to_mtp_projection", size, talker_size)
    return shapes
