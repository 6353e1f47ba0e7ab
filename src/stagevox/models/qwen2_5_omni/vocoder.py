"""Codes to samples: the flow-matching transformer and BigVGAN of ``transformers``, run from noise that the caller hands in."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniToken2WavBigVGANModel,
    Qwen2_5OmniToken2WavDiTModel,
)

STEPS = 10
"""Points in time, both ends included."""

GUIDANCE = 0.5
"""How far the flow is led away from that of no speaker, no reference and code 0."""


def times() -> torch.Tensor:
    """``1 - cos(pi t / 2)`` of ten even points from 0 to 1, as the reference adds it up."""
    even = torch.linspace(0, 1, STEPS)
    return even - (torch.cos(torch.pi / 2 * even) - 1 + even)


def integrate(flow: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Follow ``flow(t, x)`` through the points ``at``: Runge and Kutta's fourth order by the 3/8 rule."""
    third, two_thirds = 1 / 3, 2 / 3
    for start, end in pairwise(at):
        step = end - start
        k1 = flow(start, x)
        k2 = flow(start + step * third, x + step * k1 * third)
        k3 = flow(start + step * two_thirds, x + step * (k2 - k1 * third))
        k4 = flow(end, x + step * (k1 - k2 + k3))
        x = x + (k1 + 3 * (k2 + k3) + k4) * step / 8
    return x


class Token2Wav(nn.Module):
    """Both nets; parameter names are those of the checkpoint. Always float32, as the reference demands."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.code2wav_dit_model = Qwen2_5OmniToken2WavDiTModel._from_config(config.dit_config, attn_implementation="sdpa")
        self.code2wav_bigvgan_model = Qwen2_5OmniToken2WavBigVGANModel._from_config(config.bigvgan_config)
        self.repeats: int = config.dit_config.repeats
        self.mel_dim: int = config.dit_config.mel_dim
        self.num_codes: int = config.dit_config.num_embeds + 1
        self.block: int = config.dit_config.block_size
        self.samples_per_code: int = self.repeats * math.prod(config.bigvgan_config.upsample_rates)
        self._known: dict[Any, Any] = {}
        self.float().eval().requires_grad_(False)

    def forward(self, codes: torch.Tensor, noise: torch.Tensor, cond: torch.Tensor, ref_mel: torch.Tensor) -> torch.Tensor:
        """``codes [T]``, ``noise [T * repeats, mel]``, ``cond [1, d]``, ``ref_mel [1, frames, mel]`` to ``[T * 480]`` samples."""
        mel = self.mel(codes.unsqueeze(0), noise.unsqueeze(0), cond, ref_mel)
        wave: torch.Tensor = self.code2wav_bigvgan_model(mel.permute(0, 2, 1))
        return wave.reshape(-1)

    def mel(self, codes: torch.Tensor, noise: torch.Tensor, cond: torch.Tensor, ref_mel: torch.Tensor) -> torch.Tensor:
        """``[1, T]`` codes to the mel spectrogram ``[1, T * repeats, mel]``.

        What the reference computes anew in each of its 36 evaluations, but is the same in all, is computed once; and what depends on
        the time alone, once and for all.
        """
        dit = self.code2wav_dit_model
        length = codes.shape[1] * self.repeats
        speaker = torch.cat([cond.unsqueeze(1).expand(-1, length, -1), cond.new_zeros(1, length, cond.shape[-1])])
        timbre = dit.input_embed.spk_encoder(torch.cat([ref_mel, torch.zeros_like(ref_mel)]))
        timbre = timbre.unsqueeze(1).expand(-1, length, -1)
        text = torch.cat([dit.text_embed(codes), dit.text_embed(codes, drop_code=True)])
        rope = dit.rotary_embed(text, torch.arange(length, device=codes.device).expand(2, -1))
        masks = self._masks(length, noise)

        def flow(time: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            scales, (scale, shift) = self._scales(time, noise)
            x = dit.input_embed.proj(torch.cat((torch.cat([x, x]), timbre, text, speaker), dim=-1))
            for block, (shift_in, scale_in, gate_in, shift_mlp, scale_mlp, gate_mlp) in zip(
                dit.transformer_blocks, scales, strict=True
            ):
                mask = masks[block.look_backward_block, block.look_ahead_block]
                norm = block.attn_norm.norm(x) * scale_in + shift_in
                x = x + gate_in * block.attn(hidden_states=norm, position_embeddings=rope, attention_mask=mask)
                x = x + gate_mlp * block.ff(block.ff_norm(x) * scale_mlp + shift_mlp)
            guided, free = dit.proj_out(dit.norm_out.norm(x) * scale + shift).chunk(2)
            return guided + (guided - free) * GUIDANCE

        return integrate(flow, noise, times())

    def _masks(self, length: int, like: torch.Tensor) -> dict[tuple[int, int], torch.Tensor]:
        """For each reach in blocks, back and ahead: 0 where a frame may look, -inf elsewhere; ``[1, 1, length, length]``."""
        blocks = torch.arange(length, device=like.device) // self.block
        apart = (blocks - blocks.unsqueeze(1)).view(1, 1, length, length)
        reaches = {(block.look_backward_block, block.look_ahead_block) for block in self.code2wav_dit_model.transformer_blocks}
        nothing = like.new_zeros(())
        return {(back, ahead): torch.where((apart >= -back) & (apart <= ahead), nothing, -math.inf) for back, ahead in reaches}

    def _scales(self, time: torch.Tensor, like: torch.Tensor) -> tuple[list[Any], tuple[torch.Tensor, torch.Tensor]]:
        """What a point in time scales, shifts and gates by: six of each block, two of the last norm; there are 28 such points."""
        key = (float(time), like.device)
        known = self._known.get(key)
        if known is None:
            dit = self.code2wav_dit_model
            embedded = F.silu(dit.time_embed(time.to(like).reshape(1)))
            scales = []
            for block in dit.transformer_blocks:
                parts = block.attn_norm.linear(embedded).unsqueeze(1).chunk(6, dim=-1)
                scales.append((parts[0], 1 + parts[1], parts[2], parts[3], 1 + parts[4], parts[5]))
            scale, shift = dit.norm_out.linear(embedded).unsqueeze(1).chunk(2, dim=-1)
            known = self._known[key] = scales, (1 + scale, shift)
        return known
