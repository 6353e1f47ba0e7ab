"""The tensors of a published checkpoint: names and shapes, as its config says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Shapes = dict[str, tuple[int, ...]]

BUFFER = "token2wav.code2wav_dit_model.rotary_embed.inv_freq"
"""Published with the weights, and computed from the config all the same."""


def declared(config: Any) -> Shapes:
    """Every parameter of the three models of a ``transformers`` Qwen2_5OmniConfig."""
    shapes: Shapes = {}
    for prefix, entries in (
        ("thinker.audio_tower.", _audio(config.thinker_config.audio_config)),
        ("thinker.visual.", _vision(config.thinker_config.vision_config)),
        ("thinker.model.", _decoder(config.thinker_config.text_config)),
        ("thinker.lm_head.", _head(config.thinker_config.text_config)),
        ("talker.", _talker(config.talker_config)),
        ("token2wav.code2wav_dit_model.", _dit(config.token2wav_config.dit_config)),
        ("token2wav.code2wav_bigvgan_model.", _bigvgan(config.token2wav_config.bigvgan_config)),
    ):
        shapes |= {prefix + name: shape for name, shape in entries}
    return shapes


Entries = Iterator[tuple[str, tuple[int, ...]]]


def _dense(name: str, *shape: int, bias: bool = True) -> Entries:
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]


def _under(prefix: str, entries: Entries) -> Entries:
    return ((f"{prefix}.{name}", shape) for name, shape in entries)


def _audio(config: Any) -> Entries:
    size, out = config.d_model, config.output_dim
    yield from _dense("conv1", size, config.num_mel_bins, 3)
    yield from _dense("conv2", size, size, 3)
    yield "audio_bos_eos_token.weight", (2, out)
    for layer in range(config.encoder_layers):
        yield from _under(f"layers.{layer}", _audio_layer(size, config.encoder_ffn_dim))
    yield from _dense("ln_post", size)
    yield from _dense("proj", out, size)


def _audio_layer(size: int, inner: int) -> Entries:
    for part in ("k", "v", "q", "out"):
        yield from _dense(f"self_attn.{part}_proj", size, size, bias=part != "k")
    yield from _dense("self_attn_layer_norm", size)
    yield from _dense("fc1", inner, size)
    yield from _dense("fc2", size, inner)
    yield from _dense("final_layer_norm", size)


def _vision(config: Any) -> Entries:
    size, inner, merged = config.hidden_size, config.intermediate_size, config.hidden_size * config.spatial_merge_size**2
    patch = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
    yield "patch_embed.proj.weight", (size, *patch)
    for block in range(config.depth):
        yield from _under(f"blocks.{block}", _vision_block(size, inner))
    yield "merger.ln_q.weight", (size,)
    yield from _dense("merger.mlp.0", merged, merged)
    yield from _dense("merger.mlp.2", config.out_hidden_size, merged)


def _vision_block(size: int, inner: int) -> Entries:
    yield "norm1.weight", (size,)
    yield "norm2.weight", (size,)
    for part in ("q", "k", "v", "proj"):
        yield from _dense(f"attn.{part}", size, size)
    yield from _dense("mlp.gate_proj", inner, size)
    yield from _dense("mlp.up_proj", inner, size)
    yield from _dense("mlp.down_proj", size, inner)


def _decoder(config: Any, embedding_size: int | None = None) -> Entries:
    size, inner = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or size // config.num_attention_heads
    query, key = config.num_attention_heads * head, config.num_key_value_heads * head
    yield "embed_tokens.weight", (config.vocab_size, embedding_size or size)
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}"
        yield from _dense(f"{at}.self_attn.q_proj", query, size)
        yield from _dense(f"{at}.self_attn.k_proj", key, size)
        yield from _dense(f"{at}.self_attn.v_proj", key, size)
        yield f"{at}.self_attn.o_proj.weight", (size, query)
        yield f"{at}.mlp.gate_proj.weight", (inner, size)
        yield f"{at}.mlp.up_proj.weight", (inner, size)
        yield f"{at}.mlp.down_proj.weight", (size, inner)
        yield f"{at}.input_layernorm.weight", (size,)
        yield f"{at}.post_attention_layernorm.weight", (size,)
    yield "norm.weight", (size,)


def _head(config: Any) -> Entries:
    yield "weight", (config.vocab_size, config.hidden_size)


def _talker(config: Any) -> Entries:
    yield from _dense("thinker_to_talker_proj", config.hidden_size, config.embedding_size)
    yield from _under("model", _decoder(config, config.embedding_size))
    yield "codec_head.weight", (config.vocab_size, config.hidden_size)


def _dit(config: Any) -> Entries:
    size, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    yield from _dense("time_embed.time_mlp.0", size, 256)
    yield from _dense("time_embed.time_mlp.2", size, size)
    yield "text_embed.codec_embed.weight", (config.num_embeds + 1, config.emb_dim)
    yield from _dense("input_embed.proj", size, config.mel_dim + config.enc_dim + config.enc_emb_dim + config.emb_dim)
    yield from _under("input_embed.spk_encoder", _speaker(config))
    for block in range(config.num_hidden_layers):
        at = f"transformer_blocks.{block}"
        yield from _dense(f"{at}.attn_norm.linear", 6 * size, size)
        for part in "qkv":
            yield from _dense(f"{at}.attn.to_{part}", heads, size)
        yield from _dense(f"{at}.attn.to_out.0", size, heads)
        yield from _dense(f"{at}.ff.ff.0", size * config.ff_mult, size)
        yield from _dense(f"{at}.ff.ff.3", size, size * config.ff_mult)
    yield from _dense("norm_out.linear", 2 * size, size)
    yield from _dense("proj_out", config.mel_dim, size)


def _speaker(config: Any) -> Entries:
    channels, kernels, scale = config.enc_channels, config.enc_kernel_sizes, config.enc_res2net_scale
    last, attention = channels[-1], config.enc_attention_channels
    yield from _dense("blocks.0.conv", channels[0], config.mel_dim, kernels[0])
    for block in range(1, len(channels) - 1):
        at, size, part = f"blocks.{block}", channels[block], channels[block] // scale
        yield from _dense(f"{at}.tdnn1.conv", size, channels[block - 1], 1)
        for branch in range(scale - 1):
            yield from _dense(f"{at}.res2net_block.blocks.{branch}.conv", part, part, kernels[block])
        yield from _dense(f"{at}.tdnn2.conv", size, size, 1)
        yield from _dense(f"{at}.se_block.conv1", config.enc_se_channels, size, 1)
        yield from _dense(f"{at}.se_block.conv2", size, config.enc_se_channels, 1)
    yield from _dense("mfa.conv", last, last, kernels[-1])
    yield from _dense("asp.tdnn.conv", attention, 3 * last, 1)
    yield from _dense("asp.conv", last, attention, 1)
    yield from _dense("fc", config.enc_dim, 2 * last, 1)


def _bigvgan(config: Any) -> Entries:
    size = config.upsample_initial_channel
    yield from _dense("conv_pre", size, config.mel_dim, 7)
    for up, kernel in enumerate(config.upsample_kernel_sizes):
        yield from _transposed(f"ups.{up}.0", size, size // 2, kernel)
        size //= 2
        for block, (width, dilations) in enumerate(
            zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
        ):
            at = f"resblocks.{up * len(config.resblock_kernel_sizes) + block}"
            for conv in range(len(dilations)):
                yield from _dense(f"{at}.convs1.{conv}", size, size, width)
                yield from _dense(f"{at}.convs2.{conv}", size, size, width)
            for activation in range(2 * len(dilations)):
                yield f"{at}.activations.{activation}.act.alpha", (size,)
                yield f"{at}.activations.{activation}.act.beta", (size,)
    yield "activation_post.act.alpha", (size,)
    yield "activation_post.act.beta", (size,)
    yield "conv_post.weight", (1, size, 7)


def _transposed(name: str, size_in: int, size_out: int, kernel: int) -> Entries:
    yield f"{name}.weight", (size_in, size_out, kernel)
    yield f"{name}.bias", (size_out,)
