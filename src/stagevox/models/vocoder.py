"""What every vocoder stage is to vLLM: a model without attention, embeddings or logits."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import nn


def rounded(frames: int) -> int:
    """``frames`` or a few more, at most a quarter from 4 on: 2, 4, ... 16, 20, ... 32, 40, ... 64, 80, ...

    oneDNN compiles a convolution for every length that it meets, which takes as long as many frames do. So what is of any length, such
    as the last chunk of a speech, is filled up on the right, where a causal net doesn't look, and few lengths are met.
    """
    step = max(2, 1 << max(0, (frames - 1).bit_length() - 3))
    return -(-frames // step) * step


class Vocoder(nn.Module):
    """A generation model whose ids only hold places: what it turns into samples is in the request's state.

    ``width`` is the hidden size that vLLM's input buffer has.
    """

    is_attention_free: ClassVar[Literal[True]] = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Zeros ``[n, width]``."""
        return torch.zeros(len(input_ids), self.width, device=input_ids.device)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """There are none; vLLM's profiling asks for their shape, ``[n, 1]``."""
        return hidden_states.new_zeros(len(hidden_states), 1)
