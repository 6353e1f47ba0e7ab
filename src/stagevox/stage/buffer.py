"""State a model keeps per request across steps (EX-3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from stagevox.contract import RowsAt, Update, merge_update
from stagevox.errors import MissingStateError

from .frame_log import FrameLog
from .outputs import OutputMemory


class IntermediateBuffer(dict[str, dict[str, Any]]):
    """``req_id`` to the request's state; survives preemption, dropped when the request ends.

    Beside the model's state it keeps what the runner alone owns: the frame log, how far ``postprocess`` has
    come, what failed, and which rows went out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, FrameLog] = {}
        self.post_seen: dict[str, int] = {}
        self.failed: dict[str, BaseException] = {}
        self.outputs = OutputMemory()
        self._growing: dict[tuple[str, str], torch.Tensor] = {}

    def open(self, req_id: str, payload: Mapping[str, Any]) -> None:
        """Start a request's state, or merge a later payload into it."""
        state = merge_update(self.get(req_id, {}), payload)
        for key, value in payload.items():
            if isinstance(value, RowsAt):
                state[key] = self._extended(req_id, key, value)
        self[req_id] = state

    def _extended(self, req_id: str, key: str, piece: RowsAt) -> torch.Tensor:
        """All rows so far with a piece at their end. Storage grows by doubling, so a piece costs what it holds."""
        storage, first, end = self._growing.get((req_id, key)), piece.first, piece.first + len(piece.rows)
        filled = 0 if storage is None else len(self[req_id][key])
        if first != filled:
            self.failed[req_id] = MissingStateError("payload", f"{key}: rows from {first} on after {filled} rows")
            return piece.rows
        if storage is None or end > len(storage):
            grown = piece.rows.new_empty((max(end, 2 * filled), *piece.rows.shape[1:]))
            if storage is not None:
                grown[:filled] = storage[:filled]
            storage = self._growing[req_id, key] = grown
        storage[first:end] = piece.rows
        return storage[:end]

    def apply(self, req_id: str, update: Update) -> None:
        """Merge what a hook returned for a request."""
        if update:
            self[req_id] = merge_update(self[req_id], update)

    def drop(self, req_id: str) -> None:
        """Forget a request; unknown ids are fine."""
        for key, value in self.pop(req_id, {}).items():
            if isinstance(value, torch.Tensor):
                self._growing.pop((req_id, key), None)
        self.logs.pop(req_id, None)
        self.post_seen.pop(req_id, None)
        self.failed.pop(req_id, None)
        self.outputs.drop(req_id)

    def sizes(self) -> dict[str, int]:
        """How many requests hold something here, by kind; all zero when idle."""
        return {"states": len(self), "logs": len(self.logs), "post_seen": len(self.post_seen), "failed": len(self.failed)}

    def gather(self, req_ids: Iterable[str]) -> list[dict[str, Any]]:
        """The states of ``req_ids``, in that order."""
        return [self[req_id] for req_id in req_ids]

    def log(self, req_id: str, prompt_len: int) -> FrameLog:
        """The request's frame log, made on first use."""
        log = self.logs.get(req_id)
        if log is None:
            log = self.logs[req_id] = FrameLog(prompt_len)
        return log
