"""A shorter way through vLLM's mixture-of-experts decoder for one CPU process.

vLLM's layers are made for all devices, schemes and parallelisms; where a step is a few small rows, what they cost on a CPU is the way
from module to module. Here a layer is a dozen calls of the same kernels with the same weights. Whatever is split, quantised, compiled
or of another type than float32 keeps vLLM's way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.kernels.linear.zentorch_utils import has_zentorch_op
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding
from vllm.model_executor.models.qwen3_moe import Qwen3MoeDecoderLayer, Qwen3MoeModel, Qwen3MoeSparseMoeBlock

from stagevox.models.mini.layers import add_rms_norm, rms_norm

Function = Callable[[torch.Tensor], torch.Tensor]
"""``[n, in]`` to ``[n, out]``."""


def shorten(model: Qwen3MoeModel, vllm_config: VllmConfig) -> bool:
    """Lead ``model`` the shorter way where all of it can go that way; True if it does.

    To be called once its weights are there and processed, at its first forward; they must not change afterwards.
    """
    parallel = vllm_config.parallel_config
    fits = (
        not vllm_config.quant_config
        and not vllm_config.lora_config
        and parallel.world_size_across_dp == 1
        and vllm_config.model_config.enforce_eager
        and not has_zentorch_op(["zentorch_fused_moe"])
        and all(_fits(layer) for layer in model.layers)
    )
    if fits:
        step = _Step(model.layers[0].self_attn.rotary_emb)
        for index, layer in enumerate(model.layers):
            layer.forward = _layer(layer, step, first=index == 0)
    return fits


def linear_of(layer: LinearBase) -> Function:
    """An unsplit, unquantised CPU layer without its bookkeeping, once its weights are processed; of others ``forward``."""
    if not (hasattr(layer, "cpu_linear") and isinstance(layer.quant_method, UnquantizedLinearMethod) and layer.tp_size == 1):
        return layer.forward
    apply, weight, bias = layer.cpu_linear, layer.weight, layer.bias

    def call(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = apply(x, weight, bias)
        return out

    return call


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``[n, 2 * H]`` to ``silu(x[:, :H]) * x[:, H:]``."""
    gate, up = x.chunk(2, dim=-1)
    return nn.functional.silu(gate).mul_(up)


def _fits(layer: Any) -> bool:
    if type(layer) is not Qwen3MoeDecoderLayer or type(layer.mlp) is not Qwen3MoeSparseMoeBlock:
        return False
    attention, kernel = layer.self_attn, layer.mlp.experts.routed_experts.quant_method.moe_kernel
    rope, weight = attention.rotary_emb, layer.input_layernorm.weight
    return (
        weight.is_cpu
        and weight.dtype is torch.float32
        and hasattr(torch.ops._C, "rotary_embedding")
        and type(rope) is MRotaryEmbedding
        and bool(rope.mrope_section)
        and rope.rotary_dim == rope.head_size
        and kernel is not None
        and isinstance(kernel.fused_experts, CPUUnquantizedExperts)
        and all(hasattr(linear, "cpu_linear") for linear in (attention.qkv_proj, attention.o_proj, layer.mlp.experts.gate))
    )


class _Step:
    """What the layers of a step share: the rotation of its positions."""

    def __init__(self, rope: MRotaryEmbedding) -> None:
        pairs = torch.arange(rope.rotary_dim // 2)
        _, height, width = rope.mrope_section
        if rope.mrope_interleaved:
            is_height, is_width = (pairs % 3 == 1) & (pairs < 3 * height), (pairs % 3 == 2) & (pairs < 3 * width)
        else:
            is_width = pairs >= len(pairs) - width
            is_height = (pairs >= len(pairs) - width - height) & ~is_width
        self._axes = (is_height + 2 * is_width.long()).repeat(2)  # of each column of the table
        self._table = rope.cos_sin_cache
        self._neox = rope.is_neox_style
        self._size = rope.head_size
        self._rows = torch.arange(0)
        self._turns = self._table[:0]

    def begin(self, positions: torch.Tensor) -> None:
        """``positions [3, n]``, or ``[n]`` where all axes are the same."""
        if positions.dim() == 1:
            self._turns = self._table[positions]
        else:
            self._turns = self._table.gather(0, positions[self._axes].T)
        if len(self._rows) != len(self._turns):
            self._rows = torch.arange(len(self._turns))

    def turn(self, heads: torch.Tensor) -> None:
        """Turn ``[n, heads * D]`` in place."""
        torch.ops._C.rotary_embedding(self._rows, heads, None, self._size, self._turns, self._neox)


def _layer(layer: Any, step: _Step, *, first: bool) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    attend, feed = _attention(layer.self_attn, step), _experts(layer.mlp)
    before, after = layer.input_layernorm, layer.post_attention_layernorm
    before_gain, after_gain, eps = before.weight.data, after.weight.data, before.variance_epsilon

    def forward(
        positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if first:
            step.begin(positions)
        if residual is None:
            residual = hidden_states.clone()
            hidden_states = rms_norm(hidden_states, before_gain, eps)
        else:
            hidden_states = add_rms_norm(hidden_states, residual, before_gain, eps)
        hidden_states = add_rms_norm(attend(hidden_states), residual, after_gain, eps)
        return feed(hidden_states), residual

    return forward


def _attention(attention: Any, step: _Step) -> Function:
    size, turned = attention.head_dim, attention.q_size + attention.kv_size
    split, heads, kv_heads = attention.q_size, attention.num_heads, attention.num_kv_heads
    gains = torch.cat([attention.q_norm.weight.data.expand(heads, -1), attention.k_norm.weight.data.expand(kv_heads, -1)])
    ones, eps = torch.ones(size), attention.q_norm.variance_epsilon
    project_in, project_out, attend = linear_of(attention.qkv_proj), linear_of(attention.o_proj), attention.attn.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        qkv = project_in(x)
        qk = rms_norm(qkv[:, :turned].reshape(-1, size), ones, eps).view(len(x), -1, size).mul_(gains).view(len(x), -1)
        step.turn(qk)
        return project_out(attend(qk[:, :split], qk[:, split:], qkv[:, turned:]))

    return forward


def _experts(block: Any) -> Function:
    experts, shared = block.experts, block.shared_expert
    routed = experts.routed_experts
    kernel, method = routed.quant_method.moe_kernel.fused_experts, torch.ops._C.cpu_fused_moe.default
    gate, top, renormalize = linear_of(experts.gate), experts.router.top_k, experts.router.renormalize
    act, isa = routed.activation.value, kernel.isa
    w13, w2 = routed.w13_weight.data, routed.w2_weight.data
    assert kernel.w1_bias is None and kernel.w2_bias is None

    def route(x: torch.Tensor) -> torch.Tensor:
        logits = gate(x)
        best, chosen = logits.topk(top, dim=-1, sorted=False)
        weights = best.softmax(-1) if renormalize else (best - logits.logsumexp(-1, keepdim=True)).exp_()
        out = torch.empty_like(x)
        method(out, x, w13, w2, None, None, weights, chosen.int(), False, act, isa)
        return out

    if shared is None:
        return route
    into, out_of, opening = linear_of(shared.gate_up_proj), linear_of(shared.down_proj), linear_of(shared.expert_gate)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return route(x).add_(out_of(silu_and_mul(into(x))).mul_(opening(x).sigmoid_()))

    return forward
