"""The road between stages of one process: a queue a stage."""

from __future__ import annotations

from stagevox.errors import ChunkOrderError

from .base import Chunk, Connector


class LocalConnector(Connector):
    """In-process queues. Tensors are handed over by reference, not copied."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Chunk]] = {}
        self._next: dict[str, dict[str, int]] = {}  # open request -> stage -> next seq; -1 after the end

    def open(self, req_id: str) -> None:
        """Make a request known."""
        self._next.setdefault(req_id, {})

    def put(self, stage: str, chunk: Chunk) -> None:
        """Queue a chunk; raises :class:`ChunkOrderError` on a gap, a repeat, or a chunk after the end."""
        edges = self._next.get(chunk.req_id)
        if edges is None:
            return
        expected = edges.get(stage, 0)
        if chunk.seq != expected:
            wanted = "no more chunks" if expected < 0 else f"chunk {expected}"
            raise ChunkOrderError(f"{stage}: expected {wanted} of {chunk.req_id}, got chunk {chunk.seq}")
        edges[stage] = -1 if chunk.end else expected + 1
        self._waiting.setdefault(stage, []).append(chunk)

    def get(self, stage: str) -> list[Chunk]:
        """Take all chunks that wait for ``stage``."""
        return self._waiting.pop(stage, [])

    def drop(self, req_id: str) -> None:
        """Forget a request and its waiting chunks."""
        edges = self._next.pop(req_id, None)
        for stage in edges or ():
            kept = [chunk for chunk in self._waiting.pop(stage, ()) if chunk.req_id != req_id]
            if kept:
                self._waiting[stage] = kept

    def close(self) -> None:
        """Forget everything."""
        self._waiting.clear()
        self._next.clear()

    @property
    def num_open(self) -> int:
        """Requests that are known here."""
        return len(self._next)
