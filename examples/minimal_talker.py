"""The smallest talker under the phase contract, hooks only. ``H`` is the hidden size, ``Q`` = 2 code groups a frame.

The prompt conditions position ``p`` with text row ``p``; a generated position adds the embedding of the frame before it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stagevox.contract import MTP_INPUTS, NUM_COMPUTED_TOKENS, MTPBatchResult, RowResult, Update
from stagevox.errors import MissingStateError


class MinimalTalker(nn.Module):
    """State of a request: ``text`` LongTensor ``[K]`` (payload), ``last_hidden`` ``[1, H]`` (kept by ``postprocess``)."""

    has_preprocess = True
    has_postprocess = True

    def __init__(self, hidden_size: int, codes: int = 1024, texts: int = 64) -> None:
        super().__init__()
        self.code = nn.Embedding(codes, hidden_size)
        self.rest = nn.Embedding(8, hidden_size)
        self.text = nn.Embedding(texts, hidden_size)
        self.requires_grad_(False)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.code(input_ids)

    def preprocess(self, input_ids: torch.Tensor, input_embeds: torch.Tensor, **info: Any) -> RowResult:
        """Any span: prompt chunks, replays, and decode rows where there is no batch to join."""
        if "text" not in info:
            raise MissingStateError("preprocess", "text was never stored")
        first = info[NUM_COMPUTED_TOKENS]
        rows = torch.cat([self._text_row(info, position) for position in range(first, first + len(input_ids))])
        update = {MTP_INPUTS: (info["last_hidden"], rows[-1:])} if "last_hidden" in info else {}
        return input_ids, rows, update  # the runner reads mtp_inputs on fresh decode rows only

    def preprocess_decode_batch(self, *, input_ids: torch.Tensor, req_infos: Sequence[Mapping[str, Any]]) -> MTPBatchResult:
        """The decode rows of a step."""
        rows = torch.cat([self._text_row(info, info[NUM_COMPUTED_TOKENS]) for info in req_infos])
        hidden = torch.cat([info["last_hidden"] for info in req_infos])
        return input_ids, rows, hidden, rows, [{}] * len(req_infos)

    def talker_mtp(
        self, input_ids: torch.Tensor, input_embeds: torch.Tensor, last_hidden: torch.Tensor, text_step: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``input_ids [N]`` were sampled from ``last_hidden [N, H]``: finish those frames."""
        second = (last_hidden @ self.rest.weight.T).argmax(-1)
        return text_step + self.code(input_ids) + self.rest(second), torch.stack([input_ids, second], 1)

    def postprocess(self, hidden: torch.Tensor, **info: Any) -> Update:
        """Keep what the next step's frame is predicted from."""
        return {"last_hidden": hidden[-1:].clone()}

    def _text_row(self, info: Mapping[str, Any], position: int) -> torch.Tensor:
        """``[1, H]``: a function of the request and the position. Past the text, the last row goes on for ever."""
        return self.text(info["text"][min(position, len(info["text"]) - 1)])[None]
