"""The code predictor: groups 1..Q-1 of a frame from the Talker's hidden state and the codes before them."""

from __future__ import annotations

import torch
from torch import nn

from .config import MiniTalkerConfig
from .layers import add_rms_norm, rms_norm, weight


class Dense(nn.Module):
    """The parameters of ``x @ weight + bias``, the weight stored ``[in, out]``: the faster layout for few rows."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.weight = weight(size_in, size_out)
        self.bias = weight(size_out)


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
        self._plan: tuple | None = None

    def targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """Where each tensor of a checkpoint goes."""
        targets: dict[str, torch.Tensor] = {}
        for name, tensor in self.named_parameters():
            name = name.replace("proj.", "in.")
            is_dense = name.endswith(".weight")
            targets[prefix + name] = tensor.t() if is_dense else tensor
        return targets

    def _make_plan(self) -> tuple:
        """The tensors in the order of use: looking them up by attribute would cost as much as the maths."""
        blocks = list(self.blocks)
        gains = [block.norm.data for block in blocks] + [self.norm.data]
        mlps = [
            (b.fc1.weight.data, b.fc1.bias.data, b.fc2.weight.data, b.fc2.bias.data, gain)
            for b, gain in zip(blocks, gains[1:], strict=True)
        ]
        groups = [
            (table.data, bias, head.weight.data, head.bias.data)
            for table, bias, head in zip(self.embedding, self.group_bias.data.unbind(), self.head, strict=True)
        ]
        return self.proj.weight.data, self.proj.bias.data, gains[0], mlps, groups

    def forward(self, hidden: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """``hidden [N, H]`` and layer-0 ``codes [N]`` give whole frames ``[N, Q]``, the layer-0 codes first."""
        plan = self._plan
        if plan is None:
            plan = self._plan = self._make_plan()
        weight_in, bias_in, first_gain, mlps, groups = plan
        eps, addmm, silu_ = self.eps, torch.addmm, torch.ops.aten.silu_.default
        u = addmm(bias_in, hidden, weight_in)
        frame = [codes]
        for table, group_bias, head, head_bias in groups:
            u = u + table.index_select(0, codes)
            z = u + group_bias
            y = rms_norm(z, first_gain, eps)
            for w1, b1, w2, b2, gain in mlps:
                y = add_rms_norm(addmm(b2, silu_(addmm(b1, y, w1)), w2), z, gain, eps)
            codes = addmm(head_bias, y, head).argmax(-1)
            frame.append(codes)
        return torch.stack(frame, 1)
