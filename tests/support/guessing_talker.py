"""A Talker that guesses its phase from the length of a span: what the phase contract exists to prevent. A negative control."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from vllm import ModelRegistry

from stagevox.contract import MTP_INPUTS, MTPBatchResult, RowResult
from stagevox.models.mini.talker import LAST_HIDDEN, TEXT_ROWS, MiniTalkerForCausalLM
from stagevox.stage.frame_log import FrameLog
from support.checkpoints import copy_checkpoint, edit_config

ARCHITECTURE = "SpanGuessingTalkerForCausalLM"
NEXT_ROW = "next_row"
"""State: the first text row that no decode step has taken yet."""


class SpanGuessingTalkerForCausalLM(MiniTalkerForCausalLM):
    """Reads neither progress nor prompt length. Weights and all the rest are the packaged Talker's.

    - Several positions in a span: "this is the prompt". They get the prompt's rows from row 0 on, wherever the span stands. Positions
      that this leaves over keep vLLM's own embedding of their token. The text that follows the prompt is queued anew, from its start.
    - One position: "this is a decode step". It takes the next text row off the queue, be it the last token of a chunked
      prompt or a position that is replayed.

    While a prompt comes in one span and nothing is preempted, both guesses are right. Under load, a chunk at an offset starts
    over at row 0; a one-token tail takes, and uses up, a row of the reply; a replay puts the prompt's rows where frames were, and
    the speech goes back to the start of its text.
    """

    def preprocess(self, input_ids: torch.Tensor, input_embeds: torch.Tensor, **info: Any) -> RowResult:
        """Guess: one row is a decode step, several are a prompt."""
        span = len(input_ids)
        if span == 1:
            row = self._next_row(info)
            text = self._embed_rows(info, row, 1)
            update: dict[str, Any] = {NEXT_ROW: row + 1}
            if LAST_HIDDEN in info:
                update[MTP_INPUTS] = (info[LAST_HIDDEN], text)
            return input_ids, input_embeds + text, update
        prompt = self.prompt_codes[:span]
        embeds = input_embeds.clone()
        embeds[: len(prompt)] = self._embed_rows(info, -1, len(prompt)) + F.embedding(prompt, self.talker.codec_embedding)
        embeds[0] = self.talker.speaker
        return input_ids, embeds, {NEXT_ROW: self.prompt_len - 1}

    def preprocess_decode_batch(self, *, input_ids: torch.Tensor, req_infos: Sequence[Mapping[str, Any]]) -> MTPBatchResult:
        """Take one row off each request's queue."""
        rows = [self._next_row(info) for info in req_infos]
        text = torch.cat([self._embed_rows(info, row, 1) for info, row in zip(req_infos, rows, strict=True)])
        hidden = torch.cat([info[LAST_HIDDEN] for info in req_infos])
        return input_ids, text, hidden, text, [{NEXT_ROW: row + 1} for row in rows]

    def _next_row(self, info: Mapping[str, Any]) -> int:
        row: int = info.get(NEXT_ROW, self.prompt_len - 1)
        return row

    def _embed_rows(self, info: Mapping[str, Any], first: int, count: int) -> torch.Tensor:
        return F.embedding(self._row_ids(info[TEXT_ROWS], first, count), self.talker.text_embedding)


def make_checkpoint(folder: Path) -> Path:
    """A copy of the packaged checkpoint whose Talker is the guessing one, which is made known to vLLM in this process."""
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, SpanGuessingTalkerForCausalLM)
    copy_checkpoint(folder)
    edit_config(folder, "talker", architectures=[ARCHITECTURE])
    return folder


@contextmanager
def without_frame_log() -> Iterator[None]:
    """Let replayed positions be whatever the model makes of them, as in a runtime that keeps no log of frames."""
    fill = FrameLog.fill
    FrameLog.fill = lambda self, out, first: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        FrameLog.fill = fill  # type: ignore[method-assign]
