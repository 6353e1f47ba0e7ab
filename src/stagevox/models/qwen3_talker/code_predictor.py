"""The code predictor: a small causal decoder that completes a frame, group after group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding, get_rope
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from stagevox.errors import CheckpointError
from stagevox.models.cpu_decoder import linear_of, silu_and_mul
from stagevox.models.mini.layers import add_rms_norm, rms_norm

STACKED = {
    ".q_proj": (".qkv_proj", "q"),
    ".k_proj": (".qkv_proj", "k"),
    ".v_proj": (".qkv_proj", "v"),
    ".gate_proj": (".gate_up_proj", 0),
    ".up_proj": (".gate_up_proj", 1),
}
"""Which published tensors are parts of one of ours."""

Pick = Callable[[torch.Tensor, int], torch.Tensor]
"""Codes ``[N]`` from the logits ``[N, V]`` of a group."""


class PredictorAttention(nn.Module):
    """Causal attention over the few positions of a frame; keys and values live in one dense tensor a call."""

    def __init__(self, config: Any, quant_config: Any, prefix: str) -> None:
        super().__init__()
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
        self.head_dim = head_dim = config.head_dim or size // heads
        bias = bool(getattr(config, "attention_bias", False))
        self.qkv_proj = QKVParallelLinear(
            size,
            head_dim,
            heads,
            kv_heads,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
            return_bias=False,
        )
        self.heads, self.kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.o_proj = RowParallelLinear(
            heads * head_dim, size, bias=bias, quant_config=quant_config, prefix=f"{prefix}.o_proj", return_bias=False
        )
        self.q_norm = RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.rope = get_rope(head_dim, config.num_code_groups, rope_parameters=rope_of(config))
        self._plan: tuple[Any, ...] | None = None

    def forward(self, positions: torch.Tensor, x: torch.Tensor, cache: torch.Tensor, first: int) -> torch.Tensor:
        """``x [N * n, H]``: positions ``first .. first + n - 1`` of N frames; ``cache [2, N, kv heads, Q, D]`` is written."""
        rows, total, size = cache.shape[1], len(x), self.head_dim
        count = total // rows
        end = first + count
        if self._plan is None:  # the weights are there, and stay
            parts = [norm.weight.data.expand(n, -1) for norm, n in ((self.q_norm, self.heads), (self.k_norm, self.kv_heads))]
            gains = torch.cat(parts), torch.ones_like(parts[0][0])
            self._plan = *gains, linear_of(self.qkv_proj), linear_of(self.o_proj), self._rotation(x)
        gains, ones, project_in, project_out, rotate = self._plan
        qkv = project_in(x)
        turned = (self.heads + self.kv_heads) * size
        # Queries and keys together: what a step costs is calls, not arithmetic.
        qk = rms_norm(qkv[:, :turned].reshape(-1, size), ones, self.q_norm.variance_epsilon).view(total, -1, size).mul_(gains)
        qk = rotate(positions, qk.view(total, -1)).view(rows, count, -1, size).transpose(1, 2)
        cache[0, :, :, first:end] = qk[:, self.heads :]
        cache[1, :, :, first:end] = qkv[:, turned:].view(rows, count, -1, size).transpose(1, 2)
        # More than one position comes at the start only, where the mask is square.
        out = F.scaled_dot_product_attention(
            qk[:, : self.heads],
            cache[0, :, :, :end],
            cache[1, :, :, :end],
            is_causal=first == 0,
            enable_gqa=self.heads != self.kv_heads,
        )
        projected: torch.Tensor = project_out(out.transpose(1, 2).reshape(total, -1))
        return projected

    def _rotation(self, x: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """A function that turns ``[n, heads * D]`` by positions ``[n]``; of what type ``x`` is."""
        rope = self.rope
        if x.is_cpu and type(rope) is RotaryEmbedding:
            table, rotate = rope.cos_sin_cache.to(x.dtype), torch.ops._C.rotary_embedding.default

            def turn(positions: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
                rotate(positions, heads, None, rope.head_size, table, rope.is_neox_style)
                return heads

            return turn
        return lambda positions, heads: rope.forward(positions, heads, None)[0]


class PredictorMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: Any, quant_config: Any, prefix: str) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            size, [inner] * 2, bias=False, quant_config=quant_config, prefix=f"{prefix}.gate_up_proj", return_bias=False
        )
        self.down_proj = RowParallelLinear(
            inner, size, bias=False, quant_config=quant_config, prefix=f"{prefix}.down_proj", return_bias=False
        )
        self.act = SiluAndMul()
        self._plan: tuple[Any, ...] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[n, H]`` to ``[n, H]``."""
        if self._plan is None:
            act = silu_and_mul if x.is_cpu else self.act.forward
            self._plan = linear_of(self.gate_up_proj), act, linear_of(self.down_proj)
        spread, act, gather = self._plan
        out: torch.Tensor = gather(act(spread(x)))
        return out


class PredictorLayer(nn.Module):
    """Attention and MLP, each after a norm."""

    def __init__(self, config: Any, quant_config: Any, prefix: str) -> None:
        super().__init__()
        self.self_attn = PredictorAttention(config, quant_config, f"{prefix}.self_attn")
        self.mlp = PredictorMLP(config, quant_config, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class PredictorDecoder(nn.Module):
    """The decoder and the embeddings of the residual groups; ``codec_embedding.g`` is group ``g + 1``'s."""

    def __init__(self, config: Any, embedding_size: int, quant_config: Any, prefix: str) -> None:
        super().__init__()
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList([PredictorLayer(config, quant_config, f"{prefix}.layers.{i}") for i in layers])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.eps = config.rms_norm_eps
        self._plan: tuple[Any, ...] | None = None
        groups = range(config.num_code_groups - 1)
        self.codec_embedding = nn.ModuleList([nn.Embedding(config.vocab_size, embedding_size) for _ in groups])

    def forward(self, x: torch.Tensor, positions: torch.Tensor, caches: Sequence[torch.Tensor], first: int) -> torch.Tensor:
        """``x [N, n, H]`` at ``positions [N * n]``, which begin with ``first``; hidden states ``[N, H]`` of the last, normed."""
        rows, count = x.shape[:2]
        if self._plan is None:
            gains = [layer.input_layernorm.weight.data for layer in self.layers] + [self.norm.weight.data]
            self._plan = (
                gains[0],
                [
                    (layer.self_attn.forward, layer.post_attention_layernorm.weight.data, layer.mlp.forward, gain)
                    for layer, gain in zip(self.layers, gains[1:], strict=True)
                ],
            )
        gain, layers = self._plan
        residual = x.reshape(rows * count, -1).clone()
        hidden = rms_norm(residual, gain, self.eps)
        for cache, (attend, post_gain, mlp, next_gain) in zip(caches, layers, strict=True):
            hidden = add_rms_norm(attend(positions, hidden, cache, first), residual, post_gain, self.eps)
            hidden = add_rms_norm(mlp(hidden), residual, next_gain, self.eps)
        return hidden.view(rows, count, -1)[:, -1]


class CodePredictor(nn.Module):
    """Groups 1 .. Q-1 of a frame, from the talker's hidden state and the layer-0 code.

    ``config`` is the checkpoint's ``code_predictor_config``; ``talker_size`` the talker's width, which is that of the code
    embeddings. Where it differs from the predictor's own, ``small_to_mtp_projection`` leads from the one to the other.
    """

    def __init__(self, config: Any, talker_size: int, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise CheckpointError("model", f"code_predictor_config.hidden_act is {config.hidden_act!r}, expected 'silu'")
        self.groups = config.num_code_groups
        self.model = PredictorDecoder(config, talker_size, quant_config, f"{prefix}.model")
        self.lm_head = nn.ModuleList(
            [
                ColumnParallelLinear(
                    config.hidden_size,
                    config.vocab_size,
                    bias=False,
                    gather_output=True,
                    quant_config=quant_config,
                    prefix=f"{prefix}.lm_head.{group}",
                    return_bias=False,
                )
                for group in range(self.groups - 1)
            ]
        )
        self._heads: list[Callable[[torch.Tensor], torch.Tensor]] | None = None
        self._known_places: dict[int, list[torch.Tensor]] = {}
        self.small_to_mtp_projection: nn.Module = nn.Identity()
        if config.hidden_size != talker_size:
            self.small_to_mtp_projection = ReplicatedLinear(
                talker_size,
                config.hidden_size,
                quant_config=quant_config,
                prefix=f"{prefix}.small_to_mtp_projection",
                return_bias=False,
            )

    def forward(self, hidden: torch.Tensor, first: torch.Tensor, pick: Pick) -> tuple[torch.Tensor, torch.Tensor]:
        """Complete frames from ``hidden [N, H]`` and the embeddings ``first [N, H]`` of their layer-0 codes.

        Returns the codes ``[N, Q - 1]`` of the other groups, and the sum ``[N, H]`` of all Q embeddings.
        """
        rows = len(hidden)
        attention: Any = self.model.layers[0].self_attn
        caches = hidden.new_empty(len(self.model.layers), 2, rows, attention.kv_heads, self.groups, attention.head_dim)
        codes: list[torch.Tensor] = []
        embeds = [first]
        x, position = torch.stack([hidden, first], dim=1), 0
        slices, project = caches.unbind(), self.small_to_mtp_projection.forward
        if self._heads is None:  # the weights are there, and stay
            self._heads = [linear_of(head) for head in self.lm_head]
        places = self._places(hidden)
        for group, (head, table) in enumerate(zip(self._heads, self.model.codec_embedding, strict=True), start=1):
            last = self.model.forward(project(x), places[group - 1], slices, position)
            position += x.shape[1]
            codes.append(pick(head(last), group))
            embeds.append(F.embedding(codes[-1], table.weight))
            x = embeds[-1][:, None]
        return torch.stack(codes, dim=1), torch.stack(embeds, dim=1).sum(1)

    def _places(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Positions of ``len(hidden)`` frames in each pass: two a frame in the first one, one in the others."""
        rows, known = len(hidden), self._known_places
        if rows not in known:
            places = torch.arange(self.groups, device=hidden.device)
            known[rows] = [places[:2].repeat(rows), *places[2:, None].expand(-1, rows).contiguous()]
        return known[rows]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load tensors under their published names."""
        mapper = WeightsMapper(orig_to_new_stacked=STACKED)
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights, mapper=mapper)
        return loaded


def rope_of(config: Any) -> dict[str, Any]:
    """The rotary parameters of a config, as vLLM wants them; configs of older libraries spell them as two fields."""
    parameters = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    parameters.setdefault("rope_theta", getattr(config, "rope_theta", None) or 10000.0)
    return parameters
