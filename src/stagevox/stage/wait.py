"""Requests that a stage knows but can't run yet: registered is not ready (EX-2)."""

from __future__ import annotations

import enum


class WaitState(enum.Enum):
    """Why a request doesn't run. vLLM's status enum can't be extended, so this stands beside it."""

    WAITING_FOR_INPUT = "waiting_for_input"
    """Nothing came from upstream yet: the request isn't in vLLM's queues."""
    WAITING_FOR_CHUNK = "waiting_for_chunk"
    """All that came is computed; the request keeps its slot."""


class WaitRoom(dict[str, WaitState]):
    """``req_id`` to why it waits. No clock here: deadlines run where the clock is, in the pipeline."""

    def count(self, state: WaitState) -> int:
        """How many requests wait for this reason."""
        return sum(1 for waiting in self.values() if waiting is state)
