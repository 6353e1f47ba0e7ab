"""The talker of Qwen3-TTS: vLLM's dense Qwen3 decoder over layer-0 codes, conditioned on text and control codes by id."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.qwen3 import Qwen3Model
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from stagevox.errors import ContractError, MissingStateError
from stagevox.models.qwen3_talker.code_predictor import CodePredictor
from stagevox.models.qwen3_talker.hooks import Info, Qwen3TalkerHooks
from stagevox.models.qwen3_talker.sampling import suppressed
from stagevox.models.qwen3_talker.text_projection import TextProjection

TEXT_IDS = "text_ids"
"""State: L ints, the text token of each prompt position."""

CODEC_IDS = "codec_ids"
"""State: L ints, the control code of each prompt position, -1 where there is none."""

TRAILING_IDS = "trailing_ids"
"""State: K ints, the text tokens of the first K frames; those after them have the pad token."""

PAD_ID = "pad_id"
"""State: the pad token."""


class Qwen3TTSTalkerForConditionalGeneration(Qwen3TalkerHooks, nn.Module):
    """Text rows are ``text_projection(text_embedding(id))``; a prompt position adds the embedding of its control code.

    With it, position p of the prompt is a function of the ids at p, and position ``L + k`` one of frame k and trailing id k.
    """

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "talker.model.text_embedding.": "text_embedding.",
            "talker.model.codec_embedding.": "model.embed_tokens.",
            "talker.": "",
        }
    )

    never: torch.Tensor

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = self.config = vllm_config.model_config.hf_config
        quant = vllm_config.quant_config

        def named(part: str) -> str:
            return f"{prefix}.{part}" if prefix else part

        self.model = Qwen3Model(vllm_config=vllm_config, prefix=named("model"))
        text = config.text_hidden_size
        self.text_embedding = VocabParallelEmbedding(config.text_vocab_size, text, prefix=named("text_embedding"))
        self.text_projection = TextProjection(
            text, text, config.hidden_size, config.hidden_act, quant, prefix=named("text_projection")
        )
        self.code_predictor = CodePredictor(
            config.code_predictor_config, config.hidden_size, quant, prefix=named("code_predictor")
        )
        self.codec_head = ParallelLMHead(config.vocab_size, config.hidden_size, quant_config=quant, prefix=named("codec_head"))
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.register_buffer("never", suppressed(config.vocab_size, config.codec_eos_token_id), persistent=False)

    # what vLLM calls

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Layer-0 code embeddings ``[n, H]``; real inputs come from the hooks."""
        embeds: torch.Tensor = self.model.embed_input_ids(input_ids)
        return embeds

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Hidden states ``[n, H]`` after the last norm."""
        hidden: torch.Tensor = self.model(input_ids, positions, intermediate_tensors, inputs_embeds)
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits ``[n, vocabulary]``; -inf for what is never sampled, so that no client can undo it."""
        logits: torch.Tensor | None = self.logits_processor(self.codec_head, hidden_states)
        return None if logits is None else logits.masked_fill_(self.never, -math.inf)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load all tensors of a checkpoint."""
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
        return loaded

    # where conditioning comes from

    def prompt_length(self, hook: str, info: Info) -> int:
        """The number of prompt ids.

        Raises:
            MissingStateError: a part of the conditioning was never stored.
            ContractError: the parts don't fit together, or an id has no embedding.
        """
        for key in (TEXT_IDS, CODEC_IDS, TRAILING_IDS, PAD_ID):
            if key not in info:
                raise MissingStateError(hook, f"{key} was never stored")
        text, codec = info[TEXT_IDS], info[CODEC_IDS]
        if len(text) != len(codec):
            raise ContractError(hook, f"{len(text)} text ids, {len(codec)} control codes")
        return len(text)

    def prompt_rows(self, info: Info, first: int, end: int) -> torch.Tensor:
        """Rows ``[end - first, H]`` of the prompt."""
        rows = self._text(info[TEXT_IDS][first:end])
        codec = self._ids(CODEC_IDS, info[CODEC_IDS][first:end], -1, self.config.vocab_size)
        return rows + self.embed_input_ids(codec.clamp(min=0)) * (codec >= 0).to(rows.dtype)[:, None]

    def text_rows(self, infos: Sequence[Info], steps: Sequence[int]) -> torch.Tensor:
        """Text rows ``[N, H]`` of frames."""
        ids = []
        for info, step in zip(infos, steps, strict=True):
            trailing = info[TRAILING_IDS]
            ids.append(trailing[step] if step < len(trailing) else info[PAD_ID])
        return self._text(ids)

    def _text(self, ids: Sequence[int]) -> torch.Tensor:
        known = self._ids("text ids", ids, 0, self.config.text_vocab_size)
        rows: torch.Tensor = self.text_projection(self.text_embedding(known))
        return rows

    def _ids(self, what: str, ids: Sequence[int], low: int, end: int) -> torch.Tensor:
        """On the model's device, after a check that each has an embedding."""
        if min(ids) < low or max(ids) >= end:
            raise ContractError("preprocess", f"{what} {min(ids)} to {max(ids)} outside {low} to {end - 1}")
        return torch.tensor(ids, device=self.never.device)
