"""What crosses from one stage to the next, and the interface of the road it takes (SV-3)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stagevox.errors import RequestFailedError


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a request's stage output, on its way to the next stage.

    ``seq`` counts a request's chunks on one edge from 0; the chunk with ``end`` is the last one. N merged rows are N rows.
    ``data`` is what the stage's chunk processor and the next stage's input adapter agreed on; the road doesn't look inside.
    """

    req_id: str
    seq: int
    end: bool
    data: Mapping[str, Any]


class Connector(ABC):
    """Carries chunks to a named stage exactly once and, per request, in order."""

    @abstractmethod
    def open(self, req_id: str) -> None:
        """Make a request known; without this, or after :meth:`drop`, its chunks are ignored."""

    @abstractmethod
    def put(self, stage: str, chunk: Chunk) -> None:
        """Hand over a chunk for ``stage``; raises :class:`stagevox.errors.ChunkOrderError` on a gap or a repeat."""

    @abstractmethod
    def get(self, stage: str) -> list[Chunk]:
        """Take all chunks that wait for ``stage``; never blocks."""

    @abstractmethod
    def drop(self, req_id: str) -> None:
        """Forget a finished or aborted request, its waiting chunks included."""

    @abstractmethod
    def close(self) -> None:
        """Release what the connector holds."""

    @property
    @abstractmethod
    def num_open(self) -> int:
        """Requests that still hold state here; 0 when idle."""

    def is_full(self, req_id: str) -> bool:
        """True while many chunks of the request wait for their consumer: whoever makes them should pause it."""
        return False

    def failures(self) -> list[tuple[str, RequestFailedError]]:
        """Take the requests, and why, whose chunks were lost on the way or not taken in time; each is told once."""
        return []


class ChunkProcessor(ABC):
    """Decides, on the producing stage, when a request's output makes a whole chunk.

    One instance a stage, made with the stage's checkpoint folder and its ``chunk_options``.
    """

    requires_token_updates = False
    """True to be called with newly sampled ids on steps that carry no tensor payload (RT-5)."""

    @abstractmethod
    def push(self, req_id: str, token_ids: list[int], payload: Mapping[str, Any], finish_reason: str | None) -> list[Chunk]:
        """Take one step's output of a request and return the chunks that became whole.

        ``payload`` holds the step's inter-stage tensors, ``finish_reason`` is set on the request's last
        call, which must return a chunk with ``end`` unless the request failed or was aborted.
        """

    @abstractmethod
    def drop(self, req_id: str) -> None:
        """Forget a request."""

    @property
    @abstractmethod
    def num_open(self) -> int:
        """Requests that still hold state here; 0 when idle."""
