"""Tokens that needn't be sampled: where a request's state decides its engine token (MS-9, MS-11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, MinTokensLogitsProcessor

from stagevox.contract import RowPhase
from stagevox.errors import HookCountError

from ..border import call_hook

TOKEN_DTYPE = torch.int32
"""What the sampler hands out, and what the runner's own buffers hold."""


class TokenDeriver:
    """Asks a model for the tokens of a window's steps."""

    def __init__(self, runner: Any) -> None:
        self._model = runner.model
        self._buffer = runner.model_intermediate_buffer
        self._device = runner.device
        processors = runner.input_batch.logitsprocs.non_argmax_invariant
        self._min_tokens = [each for each in processors if isinstance(each, MinTokensLogitsProcessor)]

    @classmethod
    def of(cls, runner: Any) -> TokenDeriver | None:
        """A deriver, if the model has the hook and nothing but the logits has a say: greedy rows, no bias, no foreign processor."""
        batch = runner.input_batch
        if not runner.derives_engine_token or not batch.sampling_metadata.all_greedy:
            return None
        for processor in batch.logitsprocs.non_argmax_invariant:
            if isinstance(processor, LogitBiasLogitsProcessor):
                if processor.biases:
                    return None
            elif not isinstance(processor, MinTokensLogitsProcessor):
                return None
        return cls(runner)

    def tokens(self, rows: Sequence[RowPhase]) -> torch.Tensor | None:
        """The step's tokens ``[n, 1]``, or None: then it is sampled. A request short of its ``min_tokens`` is always sampled."""
        if self._buffer.failed or any(processor.min_toks for processor in self._min_tokens):
            return None
        found = call_hook("derive_engine_tokens", self._model.derive_engine_tokens, req_infos=self._infos(rows))
        if len(found) != len(rows):
            raise HookCountError("derive_engine_tokens", "tokens", len(rows), len(found))
        if any(token is None for token in found):
            return None
        return torch.tensor(found, dtype=TOKEN_DTYPE, device=self._device).unsqueeze(1)

    def _infos(self, rows: Sequence[RowPhase]) -> list[dict[str, Any]]:
        return [{**self._buffer[row.req_id], **row.fields()} for row in rows]
