"""The talkers' hooks under the phase contract: which row conditions which position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stagevox.contract import MTP_INPUTS, NUM_COMPUTED_TOKENS, PROMPT_LEN, MTPBatchResult, RowResult, Update
from stagevox.errors import ContractError, MissingStateError

from .code_predictor import CodePredictor
from .sampling import ResidualSampling

LAST_HIDDEN = "last_hidden"
"""State: ``[1, H]``, the hidden state after the last norm that the newest layer-0 code was sampled from."""

Info = Mapping[str, Any]
"""A request's state, and over it the phase fields."""


class Qwen3TalkerHooks:
    """Hooks of a talker whose frames are completed by a :class:`CodePredictor`.

    A request has L prompt positions, each with a row of its own. Position ``L + k`` carries frame ``k``: the sum of its Q code
    embeddings and text row ``k``; past the text, the pad row. Both rows are functions of the request's state and the position
    alone, which the family gives as :meth:`prompt_length`, :meth:`prompt_rows` and :meth:`text_rows`.
    """

    has_preprocess = True
    has_postprocess = True
    mtp_request_info = True
    omni_pooler_payload_include_hidden = False

    code_predictor: CodePredictor

    # what a family gives

    def prompt_length(self, hook: str, info: Info) -> int:
        """L; raises :class:`MissingStateError` under the name of ``hook`` if the conditioning isn't there."""
        raise NotImplementedError

    def prompt_rows(self, info: Info, first: int, end: int) -> torch.Tensor:
        """Rows ``[end - first, H]`` of the prompt positions ``first .. end - 1``."""
        raise NotImplementedError

    def text_rows(self, infos: Sequence[Info], steps: Sequence[int]) -> torch.Tensor:
        """Text rows ``[N, H]``: of request ``infos[i]`` that of frame ``steps[i]``, past the text the pad row."""
        raise NotImplementedError

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Layer-0 code embeddings ``[n, H]``."""
        raise NotImplementedError

    # the phase contract

    def preprocess(self, input_ids: torch.Tensor, input_embeds: torch.Tensor, **info: Any) -> RowResult:
        """Condition one span. Rows of generated positions lack their frame: MTP or the runner's log adds it."""
        length = self._check("preprocess", info)
        start = info[NUM_COMPUTED_TOKENS]
        end = start + len(input_ids)
        steps = range(max(start, length) - length, end - length)
        parts = []
        if start < length:
            parts.append(self.prompt_rows(info, start, min(end, length)))
        if steps:
            parts.append(self.text_rows([info] * len(steps), steps))
        rows = torch.cat(parts)
        update: Update = {}
        if start >= length and LAST_HIDDEN in info:
            update = {MTP_INPUTS: (info[LAST_HIDDEN], rows[-1:])}
        return input_ids, rows, update

    def preprocess_decode_batch(self, *, input_ids: torch.Tensor, req_infos: Sequence[Info]) -> MTPBatchResult:
        """Condition fresh decode rows; :meth:`talker_mtp` adds the frames."""
        hook = "preprocess_decode_batch"
        steps, hidden = [], []
        for info in req_infos:
            steps.append(info[NUM_COMPUTED_TOKENS] - self._check(hook, info))
            if LAST_HIDDEN not in info:
                raise MissingStateError(hook, f"{LAST_HIDDEN} was never stored")
            hidden.append(info[LAST_HIDDEN])
        rows = self.text_rows(req_infos, steps)
        return input_ids, rows, torch.cat(hidden), rows, [_NO_UPDATE] * len(steps)

    def talker_mtp(
        self,
        input_ids: torch.Tensor,
        input_embeds: torch.Tensor,
        last_hidden: torch.Tensor,
        text_step: torch.Tensor,
        req_infos: Sequence[Info] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Complete the frames that start with the layer-0 codes ``input_ids [N]``: ``(embeds [N, H], codes [N, Q])``."""
        sampling = ResidualSampling.of(req_infos, input_ids.device) if req_infos else None
        pick = sampling.pick if sampling else _likeliest
        codes, frames = self.code_predictor(last_hidden, self.embed_input_ids(input_ids), pick)
        return frames + text_step, torch.cat([input_ids[:, None].to(codes), codes], dim=1)

    def postprocess(self, hidden: torch.Tensor, **info: Any) -> Update:
        """Keep the hidden state that the next layer-0 code is sampled from."""
        return {LAST_HIDDEN: hidden[-1:].clone()}

    def _check(self, hook: str, info: Info) -> int:
        length = self.prompt_length(hook, info)
        if info[PROMPT_LEN] != length:
            raise ContractError(hook, f"the scheduled prompt has {info[PROMPT_LEN]} positions, its conditioning {length}")
        return length


def _likeliest(logits: torch.Tensor, group: int) -> torch.Tensor:
    return logits.argmax(-1)


_NO_UPDATE: Update = {}
