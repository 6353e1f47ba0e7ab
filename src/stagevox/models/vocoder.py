"""What every vocoder stage is to vLLM: a model without attention, embeddings or logits."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import nn


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
