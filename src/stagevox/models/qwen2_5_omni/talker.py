"""The Talker: a causal LM over codec tokens, conditioned on one row a position."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from stagevox.contract import NUM_COMPUTED_TOKENS, PROMPT_LEN, BatchResult, RowResult, Update
from stagevox.errors import ContractError, MissingStateError

from .config import read_ids
from .layers import TalkerDecoder

PROMPT_ROWS = "talker_prompt"
"""State: ``[L + 2, E]``, the prompt's rows without their codec embeddings."""

REPLY_ROWS = "thinker_reply"
"""State: ``[n, E]``, the rows of the reply from its second token on; once the reply is whole, EOS and PAD end them."""

REPLY_WHOLE = "thinker_reply_whole"
"""State: True once nothing more will come: from then on the reply's last row goes on for ever."""

CODED = 2
"""The last positions of a prompt, PAD and BOS: the only ones of it with a codec embedding."""


def rows_at(hook: str, info: Mapping[str, Any], count: int) -> torch.Tensor:
    """The conditioning ``[count, E]`` of a span: a function of the request and of absolute positions, nothing else.

    Position ``p`` of the prompt takes its row ``p``; generated position ``k`` takes row ``k`` of the reply, or the last one past
    its end. Nothing is consumed, and a span may hold both kinds.

    Raises:
        MissingStateError: the runner's fields, the prompt's rows or the reply's are not there.
        ContractError: the prompt's rows are not as many as the scheduled prompt has positions.
    """
    for key in (NUM_COMPUTED_TOKENS, PROMPT_LEN, PROMPT_ROWS, REPLY_ROWS):
        if info.get(key) is None:
            raise MissingStateError(hook, f"{key} was never stored")
    prompt, reply = info[PROMPT_ROWS], info[REPLY_ROWS]
    first, length = info[NUM_COMPUTED_TOKENS], len(prompt)
    if info[PROMPT_LEN] != length:
        raise ContractError(hook, f"the scheduled prompt has {info[PROMPT_LEN]} positions, the Talker's has {length}")
    if first + count <= length:
        return prompt[first : first + count]
    begin = max(first, length) - length
    end = first + count - length
    if not len(reply) or (end > len(reply) and not info.get(REPLY_WHOLE)):
        raise MissingStateError(hook, f"{REPLY_ROWS} has {len(reply)} rows so far, generated position {end - 1} needs one more")
    index = torch.arange(begin, end, device=reply.device).clamp_(max=len(reply) - 1)
    generated = reply[index]
    return torch.cat([prompt[first:], generated]) if first < length else generated


class Qwen2_5OmniTalker(nn.Module):
    """The Talker under the phase contract. One code a frame, so there is nothing to predict beside it."""

    has_preprocess = True
    omni_pooler_payload_include_hidden = False

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"talker.": "", "thinker.": None, "token2wav.": None},
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        },
    )

    never: torch.Tensor

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = self.config = vllm_config.model_config.hf_config
        at = f"{prefix}." if prefix else ""
        self.model = TalkerDecoder(config, vllm_config, f"{at}model")
        self.thinker_to_talker_proj = ReplicatedLinear(
            config.embedding_size, config.hidden_size, bias=True, prefix=f"{at}thinker_to_talker_proj"
        )
        self.codec_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=f"{at}codec_head")
        self.logits_processor = LogitsProcessor(config.vocab_size)
        ids = read_ids(Path(vllm_config.model_config.model))
        never = torch.zeros(config.vocab_size, dtype=torch.bool)
        never[ids.num_codes :] = True  # the vocoder has no row for them
        never[list(ids.codec_end)] = False
        never[ids.codec_bos] = True
        self.register_buffer("never", never, persistent=False)

    # what vLLM calls

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``[n, H]`` of codes without conditioning; real inputs come from the hooks."""
        return self.thinker_to_talker_proj(self.model.embed_tokens(input_ids))[0]

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Hidden states ``[num_tokens, H]`` after the last norm; ``positions [3, num_tokens]``."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)
        return self.model(positions, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits ``[n, codes]``; -inf for ids that neither end the codes nor have a row in the vocoder, whatever a client asks for."""
        logits: torch.Tensor | None = self.logits_processor(self.codec_head, hidden_states)
        return logits if logits is None else logits.masked_fill_(self.never, -math.inf)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the Talker's part of the checkpoint."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)

    # the phase contract

    def preprocess(self, input_ids: torch.Tensor, input_embeds: torch.Tensor, **info: Any) -> RowResult:
        """Condition one span, wherever it lies."""
        rows = self._on_device(rows_at("preprocess", info, len(input_ids)))
        plain = max(0, info[PROMPT_LEN] - CODED - info[NUM_COMPUTED_TOKENS])  # positions of the span that have no code
        if plain < len(input_ids):
            rows = rows.clone()
            rows[plain:] += self.model.embed_tokens(input_ids[plain:])
        return input_ids, self.thinker_to_talker_proj(rows)[0], {}

    def preprocess_decode_batch(self, *, input_ids: torch.Tensor, req_infos: Sequence[Mapping[str, Any]]) -> BatchResult:
        """Condition the decode rows of a step."""
        rows = self._on_device(torch.cat([rows_at("preprocess_decode_batch", info, 1) for info in req_infos]))
        embeds = self.thinker_to_talker_proj(rows + self.model.embed_tokens(input_ids))[0]
        return input_ids, embeds, [_NO_UPDATE] * len(req_infos)

    def _on_device(self, rows: torch.Tensor) -> torch.Tensor:
        weight = self.thinker_to_talker_proj.weight
        return rows.to(weight.device, weight.dtype)


_NO_UPDATE: Update = {}
