"""A Talker that guesses its phase from the length of a span: what the phase contract exists to prevent. A negative control."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from vllm import ModelRegistry

from stagevox.contract import MTP_INPUTS, NUM_COMPUTED_TOKENS, MTPBatchResult, RowResult
from stagevox.models.mini.pieces import WEIGHTS
from stagevox.models.mini.talker import LAST_HIDDEN, TEXT_ROWS, MiniTalkerForCausalLM
from stagevox.stage.frame_log import FrameLog
from support.checkpoints import copy_checkpoint, edit_config

ARCHITECTURE = "SpanGuessingTalkerForCausalLM"
NEXT_ROW = "next_row"
"""State: the first text row that no decode step has taken yet."""


class SpanGuessingTalkerForCausalLM(MiniTalkerForCausalLM):
    """Reads neither progress nor prompt length. Weights and all the rest are the packaged Talker's.

    - Several positions in a span: "this is the prompt". They get the rows of positions 0, 1, 2, ..., wherever the span stands, and
      the text that follows the prompt is queued anew, from its start.
    - One position: "this is a decode step". It takes the next text row off the queue, be it the last token of a chunked
      prompt or a position that is replayed.

    While a prompt comes in one span and nothing is preempted, both guesses are right. Under load, a chunk at an offset starts
    over at row 0; a one-token tail takes, and uses up, a row of the reply; a replay puts the prompt's rows under frames, and
    the speech goes back to the start of its text.
    """

    def preprocess(self, input_ids: torch.Tensor, input_embeds: torch.Tensor, **info: Any) -> RowResult:
        """Guess: one row is a decode step, several are a prompt."""
        span = len(input_ids)
        if span > 1:
            ids, embeds, _ = super().preprocess(input_ids, input_embeds, **{**info, NUM_COMPUTED_TOKENS: 0})
            return ids, embeds, {NEXT_ROW: max(span, self.prompt_len) - 1}
        row = self._next_row(info)
        text = self._embed_row(info, row)
        update: dict[str, Any] = {NEXT_ROW: row + 1}
        if LAST_HIDDEN in info:
            update[MTP_INPUTS] = (info[LAST_HIDDEN], text)
        return input_ids, text, update

    def preprocess_decode_batch(self, *, input_ids: torch.Tensor, req_infos: Sequence[Mapping[str, Any]]) -> MTPBatchResult:
        """Take one row off each request's queue."""
        rows = [self._next_row(info) for info in req_infos]
        text = torch.cat([self._embed_row(info, row) for info, row in zip(req_infos, rows, strict=True)])
        hidden = torch.cat([info[LAST_HIDDEN] for info in req_infos])
        return input_ids, text, hidden, text, [{NEXT_ROW: row + 1} for row in rows]

    def _next_row(self, info: Mapping[str, Any]) -> int:
        row: int = info.get(NEXT_ROW, self.prompt_len - 1)
        return row

    def _embed_row(self, info: Mapping[str, Any], row: int) -> torch.Tensor:
        return F.embedding(self._row_ids(info[TEXT_ROWS], row, 1), self.talker.text_embedding)


def make_checkpoint(folder: Path) -> Path:
    """A copy of the packaged checkpoint whose Talker is the guessing one, which is made known to vLLM in this process."""
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, SpanGuessingTalkerForCausalLM)
    copy_checkpoint(folder)
    edit_config(folder, "talker", architectures=[ARCHITECTURE])
    return folder


@contextmanager
def log_of_frames_only() -> Iterator[None]:
    """Let the model's own text row stand at replayed positions; only the frame is taken from the runner's log.

    As it is, the log holds both in one sum, and covers up what a model would make of a replay. For a model that is right this is
    the same.
    """
    weights = load_file(WEIGHTS / "talker" / "model.safetensors")
    tables = [weights[f"talker.codec_embedding.{group}"].float() for group in range(4)]

    def fill(log: Any, out: torch.Tensor, first: int) -> None:
        for position in range(max(first, log.prompt_len), min(first + len(out), log.end)):
            _, codes, index = log._entries[position - log.prompt_len]
            out[position - first] += sum(table[code] for table, code in zip(tables, codes[index], strict=True))

    whole = FrameLog.fill
    FrameLog.fill = fill  # type: ignore[method-assign]
    try:
        yield
    finally:
        FrameLog.fill = whole  # type: ignore[method-assign]
