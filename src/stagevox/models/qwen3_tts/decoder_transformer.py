"""The transformer inside the 12 Hz decoder: causal, each position sees the last 72."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .config import Qwen3TTSDecoderConfig


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., size]`` to the same, computed in float32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Scale(nn.Module):
    """A factor a channel, on what a block adds."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., size]`` to the same."""
        return self.scale * x


class Attention(nn.Module):
    """Rotary attention with a mask."""

    def __init__(self, config: Qwen3TTSDecoderConfig) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.attention_bias
        self.head_dim = config.head_dim
        self.shared = config.num_attention_heads != config.num_key_value_heads
        self.q_proj = nn.Linear(size, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, size, bias=bias)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """``[B, T, H]`` to the same; ``cos`` and ``sin`` are ``[T, head_dim]``, ``mask [T, T]`` is True where a row may look."""
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (part * cos + _turn(part) * sin for part in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.shared)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


def _turn(x: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([-high, low], -1)


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., size]`` to the same."""
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and MLP, each after a norm and scaled before it is added."""

    def __init__(self, config: Qwen3TTSDecoderConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config)
        self.mlp = GatedMLP(size, config.intermediate_size)
        self.input_layernorm = Norm(size, eps)
        self.post_attention_layernorm = Norm(size, eps)
        self.self_attn_layer_scale = Scale(size)
        self.mlp_layer_scale = Scale(size)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """``[B, T, H]`` to the same."""
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), cos, sin, mask))
        out: torch.Tensor = x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))
        return out


class DecoderTransformer(nn.Module):
    """All layers, between two projections."""

    def __init__(self, config: Qwen3TTSDecoderConfig) -> None:
        super().__init__()
        self.window = config.sliding_window
        self.input_proj = nn.Linear(config.latent_dim, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.output_proj = nn.Linear(config.hidden_size, config.latent_dim)
        self.head_dim, self.theta = config.head_dim, config.rope_theta

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, T, latent]`` to the same."""
        x = self.input_proj(x)
        positions = torch.arange(x.shape[1], device=x.device)
        exponents = torch.arange(0, self.head_dim, 2, device=x.device).float() / self.head_dim
        angles = positions[:, None].float() * (1.0 / self.theta**exponents)
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        ago = positions[:, None] - positions
        mask = (ago >= 0) & (ago < self.window)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        out: torch.Tensor = self.output_proj(self.norm(x))
        return out
