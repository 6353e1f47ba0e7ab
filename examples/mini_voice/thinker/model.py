"""A Llama small enough to read: plain torch, parameter names as in a Hugging Face checkpoint.

Training needs one thing that the library's model doesn't give cheaply: the attention of one head, to be guided along the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The model's sizes."""

    vocab_size: int
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    feed_forward: int = 320
    rope_theta: float = 1000.0
    eps: float = 1e-5
    max_positions: int = 256

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def hf_config(self, bos: int, eos: int, pad: int) -> dict[str, object]:
        """config.json of a ``LlamaForCausalLM`` checkpoint."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.feed_forward,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "dtype": "float16",
        }


class RMSNorm(nn.Module):
    """Root mean square norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.head_dim = shape.heads, shape.head_dim
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(shape.hidden, shape.hidden, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """``x [B, T, H]`` -> output ``[B, T, H]`` and the log attention of head 0, ``[B, T, T]``."""
        batch, length, hidden = x.shape
        split = (batch, length, self.heads, self.head_dim)
        q, k, v = (p(x).view(split).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        scores = (q * self.head_dim**-0.5) @ k.transpose(2, 3) + mask
        out = scores.softmax(-1) @ v
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, hidden)), scores[:, 0].log_softmax(-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class FeedForward(nn.Module):
    """SiLU-gated."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y, attention = self.self_attn(self.input_layernorm(x), cos, sin, mask)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), attention


class Decoder(nn.Module):
    """What a checkpoint calls ``model``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)


class Thinker(nn.Module):
    """``forward(ids [B, T])`` -> logits ``[B, T, V]`` and each layer's log attention of head 0."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                gain = 0.4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(parameter, std=0.05 if "embed" in name else gain * parameter.shape[1] ** -0.5)

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        length, half = ids.shape[1], self.shape.head_dim // 2
        angle = torch.arange(length)[:, None] * self.shape.rope_theta ** -(torch.arange(half) / half)
        mask = torch.full((length, length), float("-inf")).triu(1)
        x, attention = self.model.embed_tokens(ids), []
        for layer in self.model.layers:
            x, a = layer(x, angle.cos(), angle.sin(), mask)
            attention.append(a)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight), attention
