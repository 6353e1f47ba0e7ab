"""State a model keeps per request across steps (EX-3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stagevox.contract import Update, merge_update

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

    def open(self, req_id: str, payload: Mapping[str, Any]) -> None:
        """Start a request's state, or merge a later payload into it."""
        self[req_id] = merge_update(self.get(req_id, {}), payload)

    def apply(self, req_id: str, update: Update) -> None:
        """Merge what a hook returned for a request."""
        if update:
            self[req_id] = merge_update(self[req_id], update)

    def drop(self, req_id: str) -> None:
        """Forget a request; unknown ids are fine."""
        self.pop(req_id, None)
        self.logs.pop(req_id, None)
        self.post_seen.pop(req_id, None)
        self.failed.pop(req_id, None)
        self.outputs.drop(req_id)

    def gather(self, req_ids: Iterable[str]) -> list[dict[str, Any]]:
        """The states of ``req_ids``, in that order."""
        return [self[req_id] for req_id in req_ids]

    def log(self, req_id: str, prompt_len: int) -> FrameLog:
        """The request's frame log, made on first use."""
        log = self.logs.get(req_id)
        if log is None:
            log = self.logs[req_id] = FrameLog(prompt_len)
        return log
