"""The flow-matching transformer over its own parameters: windows of any length at once, and few, large operations.

A frame looks at its own block of frames, and in some layers at the blocks beside it. So the windows lie one after the other in whole
blocks, and attention is over blocks: the cost grows with the frames, whatever the lengths, and no window sees another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..mini.layers import linear

GUIDANCE = 0.5
"""How far the flow is led away from that of no speaker, no reference and code 0."""

VOICES = 32
"""References that are remembered."""

GELU = math.sqrt(8 / math.pi)

Linear = Callable[[torch.Tensor], torch.Tensor]


class Condition(NamedTuple):
    """What one window is spoken from; ``T`` frames of codes, ``repeats`` frames of mel spectrogram each."""

    codes: torch.Tensor
    """``[T]``"""
    noise: torch.Tensor
    """``[T * repeats, mel]``"""
    cond: torch.Tensor
    """``[1, d]``, the speaker."""
    ref_mel: torch.Tensor
    """``[1, frames, mel]``, the reference."""


class Blocks:
    """Where the rows of some windows lie: each begins a block of ``size`` rows, ``count`` blocks in all."""

    def __init__(self, lengths: Sequence[int], size: int, device: torch.device) -> None:
        self.lengths, self.size = lengths, size
        self.spans: list[tuple[int, int]] = []
        blocks, window = 0, []
        for index, length in enumerate(lengths):
            self.spans.append((blocks * size, blocks * size + length))
            window += [index] * -(-length // size)
            blocks = len(window)
        self.count, self.rows = blocks, blocks * size
        self._window = torch.tensor(window, device=device)
        self.places = torch.cat([torch.arange(-(-length // size) * size, device=device) for length in lengths])
        """``[rows]``: each row's place in its window."""
        ends = torch.tensor(lengths, device=device)[self._window].repeat_interleave(size)
        self._real = (self.places < ends).view(blocks, size)

    def neighbours(self, offset: int) -> torch.Tensor:
        """``[2 * count]``: the block so many further on, of both halves of the rows; any one where there is none."""
        index = (torch.arange(self.count, device=self.places.device) + offset).clamp(0, self.count - 1)
        return torch.cat([index, index + self.count])

    def mask(self, back: int, ahead: int, heads: int) -> torch.Tensor | None:
        """0 for rows that a block may look at, -inf elsewhere: ``[2 * count * heads, 1, rows in reach]``; None if it may at all."""
        seen = []
        for offset in range(-back, ahead + 1):
            there = self.neighbours(offset)[: self.count]
            inside = torch.arange(self.count, device=there.device) + offset == there
            seen.append(self._real[there] & (inside & (self._window[there] == self._window)).unsqueeze(1))
        sight = torch.cat(seen, dim=1)
        if bool(sight.all()):
            return None
        mask = torch.zeros(sight.shape, device=sight.device).masked_fill_(~sight, -math.inf)
        return mask.repeat(2, 1).repeat_interleave(heads, 0).unsqueeze(1)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """The tanh form of GELU, **in place**: ``tanh(z) = 2 sigmoid(2 z) - 1``, and torch's sigmoid is 9 times as fast as its tanh."""
    gate = torch.addcmul(x.new_tensor(GELU), x, x, value=GELU * 0.044715)
    return x.mul_(gate.mul_(x).sigmoid_())


class _Layer:
    """One block of the transformer."""

    def __init__(self, block: nn.Module) -> None:
        attention: Any = block.attn
        self.heads = attention.heads
        inner = attention.to_q.weight.shape[0]
        self.head = head = inner // self.heads
        # Only the first head is rotated. Its pairs lie side by side in the checkpoint; here halves belong together, and what the
        # rotation adds is a product of its own.
        order = torch.cat([torch.arange(0, head, 2), torch.arange(1, head, 2), torch.arange(head, inner)])
        parts, turned = [], []
        for projection, scale in ((attention.to_q, head**-0.5), (attention.to_k, 1.0), (attention.to_v, None)):
            whole = torch.cat([projection.weight, projection.bias.unsqueeze(1)], dim=1)
            if scale is not None:
                whole = whole[order.to(whole.device)] * scale
                turned.append(torch.cat([-whole[head // 2 : head], whole[: head // 2]]))
            parts.append(whole)
        whole = torch.cat([*parts, *turned])
        self.inner = inner
        self.project = linear(whole[:, :-1].contiguous(), whole[:, -1].contiguous())
        self.out = linear(attention.to_out[0].weight, attention.to_out[0].bias)
        feed: Any = block.ff
        self.wide, self.narrow = (linear(layer.weight, layer.bias) for layer in (feed.ff[0], feed.ff[3]))
        self.back, self.ahead = int(block.look_backward_block), int(block.look_ahead_block)

    def attend(self, x: torch.Tensor, size: int, rope: tuple[torch.Tensor, torch.Tensor], reach: Any) -> torch.Tensor:
        """``[rows, d]`` to ``[rows, d]``; ``rope`` cos and sin ``[blocks, size, head]``, ``reach`` the neighbours and the mask."""
        neighbours, mask = reach
        made = self.project(x)
        parts = made[:, : 3 * self.inner].view(-1, size, 3, self.heads, self.head).permute(2, 0, 3, 1, 4).contiguous()
        turned = made[:, 3 * self.inner :].view(-1, size, 2, self.head).permute(2, 0, 1, 3)
        parts[:2, :, 0].mul_(rope[0]).addcmul_(turned, rope[1])
        seen = parts[1:]
        if self.back or self.ahead:
            seen = torch.cat([seen if index is None else seen.index_select(1, index) for index in neighbours], dim=3)
        query, (key, value) = parts[0].view(-1, size, self.head), seen.flatten(1, 2)
        scores = torch.bmm(query, key.transpose(1, 2)) if mask is None else torch.baddbmm(mask, query, key.transpose(1, 2))
        found = torch.bmm(scores.softmax(-1), value)
        return self.out(found.view(-1, self.heads, size, self.head).transpose(1, 2).reshape(len(x), self.inner))


class Flow:
    """The transformer ``dit``, ready to be evaluated; its weights must not change afterwards."""

    def __init__(self, dit: Any, size: int) -> None:
        self.dit, self.size = dit, size
        self.layers = [_Layer(block) for block in dit.transformer_blocks]
        weight, bias = dit.input_embed.proj.weight, dit.input_embed.proj.bias
        mel, text = dit.mel_dim, dit.text_embed.codec_embed.weight.shape[1]
        timbre = dit.input_embed.spk_encoder.fc.weight.shape[0]
        self._enter = linear(weight[:, :mel].contiguous())
        self._of_timbre, self._of_text, self._of_speaker = weight[:, mel:].split(
            [timbre, text, weight.shape[1] - mel - timbre - text], dim=1
        )
        self._bias = bias
        self._leave = linear(dit.proj_out.weight, dit.proj_out.bias)
        self._known: dict[float, Any] = {}
        self._timbres: dict[bytes, torch.Tensor] = {}

    def of(self, windows: Sequence[Condition], blocks: Blocks) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """The flow of some windows: ``(time, x [rows, mel])`` to what x changes by.

        What the reference computes anew in each of its 36 evaluations, but is the same in all, is computed here; and what depends
        on the time alone, once and for all.
        """
        count, hidden = len(self._bias), self._bias
        fixed = hidden.new_zeros(2, blocks.rows, count)
        for window, (start, end) in zip(windows, blocks.spans, strict=True):
            fixed[0, start:end], fixed[1, start:end] = self._fixed(window)
        like = fixed[0]
        cos, sin = (
            part.view(-1, self.size, part.shape[-1]).repeat(2, 1, 1)
            for part in self.dit.rotary_embed(like, blocks.places.unsqueeze(0))
        )
        reaches: dict[tuple[int, int], Any] = {}
        for layer in self.layers:
            if (layer.back, layer.ahead) not in reaches:
                offsets = range(-layer.back, layer.ahead + 1)
                neighbours = [blocks.neighbours(offset) if offset else None for offset in offsets]
                reaches[layer.back, layer.ahead] = neighbours, blocks.mask(layer.back, layer.ahead, layer.heads)
        rows, shape = 2 * blocks.rows, (count,)

        def flow(time: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            scales, (scale, shift) = self._scales(time)
            x = (fixed + self._enter(x)).view(rows, count)
            for layer, (shift_in, scale_in, gate_in, shift_mlp, scale_mlp, gate_mlp) in zip(self.layers, scales, strict=True):
                norm = F.layer_norm(x, shape, scale_in, shift_in, 1e-6)
                x.addcmul_(layer.attend(norm, self.size, (cos, sin), reaches[layer.back, layer.ahead]), gate_in)
                norm = F.layer_norm(x, shape, scale_mlp, shift_mlp, 1e-6)
                x.addcmul_(layer.narrow(gelu(layer.wide(norm))), gate_mlp)
            guided, free = self._leave(F.layer_norm(x, shape, scale, shift, 1e-6)).chunk(2)
            return torch.lerp(free, guided, 1 + GUIDANCE)

        return flow

    def _fixed(self, window: Condition) -> tuple[torch.Tensor, torch.Tensor]:
        """What the input's projection adds beside x, guided ``[T * repeats, d]`` and free ``[1, d]``."""
        guided, free = self._timbre(window.ref_mel).split(1)
        table = self.dit.text_embed.codec_embed.weight
        text = F.linear(table[window.codes], self._of_text).repeat_interleave(self.dit.repeats, 0)
        return text + (guided + F.linear(window.cond, self._of_speaker)), free + F.linear(table[:1], self._of_text)

    def _timbre(self, ref_mel: torch.Tensor) -> torch.Tensor:
        """What a reference adds, and what none does: ``[2, d]``. There are few voices; the last ones are remembered by their values."""
        key = ref_mel.cpu().numpy().tobytes()
        known = self._timbres.pop(key, None)
        if known is None:
            made = self.dit.input_embed.spk_encoder(torch.cat([ref_mel, torch.zeros_like(ref_mel)]))
            known = F.linear(made, self._of_timbre, self._bias)
        self._timbres[key] = known
        if len(self._timbres) > VOICES:
            del self._timbres[next(iter(self._timbres))]
        return known

    def _scales(self, time: torch.Tensor) -> tuple[list[Any], tuple[torch.Tensor, torch.Tensor]]:
        """What a point in time scales, shifts and gates by: six of each layer, two of the last norm; there are 28 such points."""
        key = float(time)
        known = self._known.get(key)
        if known is None:
            embedded = F.silu(self.dit.time_embed(time.to(self._bias).reshape(1)))
            scales = []
            for block in self.dit.transformer_blocks:
                parts = block.attn_norm.linear(embedded)[0].chunk(6)
                scales.append((parts[0], 1 + parts[1], parts[2], parts[3], 1 + parts[4], parts[5]))
            scale, shift = self.dit.norm_out.linear(embedded)[0].chunk(2)
            known = self._known[key] = scales, (1 + scale, shift)
        return known
