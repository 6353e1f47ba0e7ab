"""The Talker's decoder, on vLLM's layers: a Qwen2 whose heads may be wider together than its hidden state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.qwen2 import Qwen2MLP


class TalkerAttention(nn.Module):
    """Grouped-query attention with M-RoPE over the paged KV cache."""

    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        size, head, quant = config.hidden_size, config.head_dim, vllm_config.quant_config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.qkv_proj = QKVParallelLinear(size, head, heads, kv_heads, bias=True, quant_config=quant, prefix=f"{prefix}.qkv_proj")
        self.o_proj = RowParallelLinear(heads * head, size, bias=False, quant_config=quant, prefix=f"{prefix}.o_proj")
        self.rotary_emb = get_rope(head, config.max_position_embeddings, rope_parameters=config.rope_parameters)
        own, own_kv = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads  # of this tensor-parallel rank
        self.sizes = [own * head, own_kv * head, own_kv * head]
        self.attn = Attention(
            own,
            head,
            head**-0.5,
            num_kv_heads=own_kv,
            cache_config=vllm_config.cache_config,
            quant_config=quant,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``positions [3, n]`` and ``x [n, H]`` to ``[n, H]``."""
        q, k, v = self.qkv_proj(x)[0].split(self.sizes, dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v))[0]


class TalkerLayer(nn.Module):
    """Pre-norm attention and gated MLP."""

    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = TalkerAttention(config, vllm_config, f"{prefix}.self_attn")
        self.mlp = Qwen2MLP(size, config.intermediate_size, config.hidden_act, vllm_config.quant_config, prefix=f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(size, eps=eps)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``x [n, H]`` and what runs beside it, which is None for the first layer."""
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(positions, x), residual)
        return self.mlp(x), residual


class TalkerDecoder(nn.Module):
    """Codec embeddings ``[codes, E]``, layers, last norm; parameter names are those of the checkpoint."""

    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.embedding_size, prefix=f"{prefix}.embed_tokens")
        self.layers = nn.ModuleList(
            [TalkerLayer(config, vllm_config, f"{prefix}.layers.{i}") for i in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, positions: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """``embeds [n, H]`` to hidden states after the last norm ``[n, H]``."""
        x, residual = embeds, None
        for layer in self.layers:
            x, residual = layer(positions, x, residual)
        return self.norm(x, residual)[0]
