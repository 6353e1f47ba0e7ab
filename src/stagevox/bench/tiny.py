"""A tiny language model with and without hooks, for measuring what the hooks cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import ModelRegistry
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from stagevox.contract import NUM_COMPUTED_TOKENS, BatchResult, RowResult, Update

ARCHITECTURE = "StagevoxTinyHooked"
PLAIN_ARCHITECTURE = "StagevoxTinyPlain"
ROWS = "rows"
"""State: K tensors ``[H]``, the conditioning; position p takes row ``p % K``."""


class TinyHooked(Qwen2ForCausalLM):
    """Stock layers; every position's embedding gets a row of the request's conditioning."""

    has_preprocess = True
    supports_multi_step_decode = True

    def preprocess(self, input_ids: torch.Tensor, input_embeds: torch.Tensor, **info: Any) -> RowResult:
        """Add the rows of the span's positions."""
        rows, first = info[ROWS], info[NUM_COMPUTED_TOKENS]
        span = [rows[position % len(rows)] for position in range(first, first + len(input_ids))]
        return input_ids, input_embeds + torch.stack(span), {}

    def preprocess_decode_batch(self, *, input_ids: torch.Tensor, req_infos: Sequence[Mapping[str, Any]]) -> BatchResult:
        """The same for single positions of several requests."""
        rows = torch.stack([info[ROWS][info[NUM_COMPUTED_TOKENS] % len(info[ROWS])] for info in req_infos])
        return input_ids, self.embed_input_ids(input_ids) + rows, [_NO_UPDATE] * len(req_infos)


class TinyPlain(Qwen2ForCausalLM):
    """Stock layers and no hooks, with steps that may be merged."""

    supports_multi_step_decode = True


_NO_UPDATE: Update = {}


def register_tiny() -> None:
    """Make both architectures known to vLLM in this process."""
    for name, model in ((ARCHITECTURE, "TinyHooked"), (PLAIN_ARCHITECTURE, "TinyPlain")):
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, f"stagevox.bench.tiny:{model}")


def write_checkpoint(folder: Path, architecture: str, *, layers: int = 2, hidden: int = 128) -> Path:
    """A random checkpoint in the Qwen2 layout, the same weights whatever the architecture's name."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    config = Qwen2Config(
        vocab_size=1000,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.config.architectures = [architecture]
    model.save_pretrained(folder)
    model.config.architectures = [architecture]
    model.config.save_pretrained(folder)
    return folder
