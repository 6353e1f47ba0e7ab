"""The Thinker: vLLM's own model, which also hands out what the Talker is conditioned on."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerForConditionalGeneration

from stagevox.contract import OmniOutput

from .config import MEDIA_TOKENS

ROWS = "hidden.talker"
"""Exported: ``[n, E]``, the hidden state after the last norm plus the token's embedding; places of media have no embedding."""

TOKENS = "hidden.tokens"
"""Exported: ``[n, 4]`` integers, the token's id and its three M-RoPE positions."""


class Qwen2_5OmniThinker(Qwen2_5OmniThinkerForConditionalGeneration):
    """One forward gives hidden states for the logits and, position by position, the Talker's rows."""

    requires_raw_input_tokens = True
    """Where media are, vLLM passes embeddings alone; which of them stand for media only the ids tell."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.media_tokens = [getattr(self.config, name) for name in MEDIA_TOKENS.values()]

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> OmniOutput:
        """Hidden states ``[num_tokens, E]`` with :data:`ROWS` and :data:`TOKENS` beside them."""
        assert input_ids is not None
        if inputs_embeds is None:
            inputs_embeds = self.embed_input_ids(input_ids)
        hidden = super().forward(None, positions, intermediate_tensors, inputs_embeds, **kwargs)
        count = hidden.shape[0]
        ids = input_ids[:count]
        media = ids == self.media_tokens[0]
        for token in self.media_tokens[1:]:
            media = media | (ids == token)
        rows = hidden + inputs_embeds[:count].masked_fill(media.unsqueeze(-1), 0)
        tokens = torch.cat([ids.unsqueeze(0), positions[..., :count].expand(3, -1)]).T
        return OmniOutput(hidden, {ROWS: rows, TOKENS: tokens})
