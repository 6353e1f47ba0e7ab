"""From the width of text embeddings to the talker's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear


class TextProjection(nn.Module):
    """``fc2(act(fc1(x)))`` with biases; tensors ``linear_fc1`` and ``linear_fc2``, split across ranks between the two."""

    def __init__(self, size_in: int, inner: int, size_out: int, act: str, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        names = (f"{prefix}.linear_fc1", f"{prefix}.linear_fc2")
        self.linear_fc1 = ColumnParallelLinear(size_in, inner, quant_config=quant_config, prefix=names[0], return_bias=False)
        self.act = get_act_fn(act)
        self.linear_fc2 = RowParallelLinear(inner, size_out, quant_config=quant_config, prefix=names[1], return_bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[n, size_in]`` to ``[n, size_out]``."""
        out: torch.Tensor = self.linear_fc2(self.act(self.linear_fc1(x)))
        return out
