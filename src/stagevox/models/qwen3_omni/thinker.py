"""The Thinker: vLLM's own model, which also hands out what the Talker hears."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_omni_moe_thinker import Qwen3OmniMoeThinkerForConditionalGeneration

from stagevox.contract import HIDDEN, OmniOutput, OwnedBatchTensor
from stagevox.models.cpu_decoder import shorten

from .config import accepted_layer

ROWS = f"{HIDDEN}.rows"
"""Output: ``[n, H]``. A text position's row is its embedding, a media position's row the hidden state of the accepted layer."""

PLACES = f"{HIDDEN}.places"
"""Output: ``[n, 4]``, int64: a position's token id, and its rotary positions on the three axes."""


class Qwen3OmniThinker(Qwen3OmniMoeThinkerForConditionalGeneration):
    """Exports :data:`ROWS` and :data:`PLACES` from the one forward that also serves sampling."""

    omni_pooler_payload_include_hidden = False
    requires_raw_input_tokens = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.shortened: bool | None = None
        self.set_aux_hidden_state_layers((accepted_layer(Path(vllm_config.model_config.model)),))
        media = [self.config.audio_token_id, self.config.image_token_id, self.config.video_token_id]
        self.register_buffer("media_ids", torch.tensor(media), persistent=False)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """An :class:`OmniOutput` on the last pipeline rank; ``input_ids [n]`` come with the embeddings."""
        assert input_ids is not None
        if self.shortened is None:
            self.shortened = shorten(self.language_model.model, self.vllm_config)
        if inputs_embeds is None and intermediate_tensors is None:
            inputs_embeds = self.embed_input_ids(input_ids)
        # The layers add to their input in place.
        embeds = None if inputs_embeds is None else inputs_embeds.clone()
        made = super().forward(None, positions, intermediate_tensors, inputs_embeds, **kwargs)
        if not isinstance(made, tuple):
            return made
        hidden, (accepted,) = made
        is_media = torch.isin(input_ids, self.media_ids)
        rows = torch.where(is_media[:, None], accepted, embeds)
        axes = positions if positions.dim() == 2 else positions.expand(3, -1)
        places = torch.cat([input_ids[None].long(), axes.long()]).T.contiguous()
        return OmniOutput(hidden, {ROWS: OwnedBatchTensor(rows), PLACES: OwnedBatchTensor(places)})
