"""The code predictor: groups 1..Q-1 of a frame from the Talker's hidden state and the codes before them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .config import MiniTalkerConfig
from .layers import Dense, add_rms_norm, linear, rms_norm, weight


class Block(nn.Module):
    """The parameters of one residual block: norm, up, SiLU, down."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.norm = weight(size)
        self.fc1 = Dense(size, inner)
        self.fc2 = Dense(inner, size)


class CodePredictor(nn.Module):
    """Greedy prediction of the residual codes, one group after the other.

    A running sum ``u`` holds the projected hidden state and the embeddings of the codes so far. For each group the
    residual blocks, a norm and the group's head turn ``u + group_bias`` into logits.
    """

    def __init__(self, config: MiniTalkerConfig) -> None:
        super().__init__()
        size, sizes = config.hidden_size, config.codebook_sizes
        groups = range(len(sizes) - 1)
        self.eps = config.rms_norm_eps
        self.proj = Dense(size, size)
        self.embedding = nn.ParameterList([weight(sizes[q] + (q == 0), size) for q in groups])
        self.group_bias = weight(len(groups), size)
        self.blocks = nn.ModuleList([Block(size, config.predictor_intermediate_size) for _ in range(config.predictor_layers)])
        self.norm = weight(size)
        self.head = nn.ModuleList([Dense(size, sizes[q + 1]) for q in groups])
        self._plan: tuple[Any, ...] | None = None

    def targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """Where each tensor of a checkpoint goes."""
        return {prefix + name.replace("proj.", "in."): tensor for name, tensor in self.named_parameters()}

    def _make_plan(self) -> tuple[Any, ...]:
        blocks: list[Any] = list(self.blocks)
        heads: list[Any] = list(self.head)
        gains = [block.norm.data for block in blocks] + [self.norm.data]
        mlps = [
            (linear(block.fc1.weight, block.fc1.bias), linear(block.fc2.weight, block.fc2.bias), gain)
            for block, gain in zip(blocks, gains[1:], strict=True)
        ]
        groups = [
            (table.data, bias, linear(head.weight, head.bias))
            for table, bias, head in zip(self.embedding, self.group_bias.data.unbind(), heads, strict=True)
        ]
        return linear(self.proj.weight, self.proj.bias), gains[0], mlps, groups

    def forward(self, hidden: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """``hidden [N, H]`` and layer-0 ``codes [N]`` give whole frames ``[N, Q]``, the layer-0 codes first."""
        plan = self._plan
        if plan is None:
            plan = self._plan = self._make_plan()
        project, first_gain, mlps, groups = plan
        eps, silu_ = self.eps, torch.ops.aten.silu_.default
        u = project(hidden)
        frame = [codes]
        for table, group_bias, head in groups:
            u = u + table.index_select(0, codes)
            z = u + group_bias
            y = rms_norm(z, first_gain, eps)
            for up, down, gain in mlps:
                y = add_rms_norm(down(silu_(up(y))), z, gain, eps)
            codes = head(y).argmax(-1)
            frame.append(codes)
        return torch.stack(frame, 1)
