"""The pipeline as a server sees it: requests in, events out, from one asyncio loop."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from stagevox.stage.messages import Gauges

from .events import ClientEvent
from .request import OmniRequest, StageStats
from .spans import Watcher


class StageHealth(enum.Enum):
    """How a stage is."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DEAD = "dead"


class RequestStream(Protocol):
    """One request in flight: iterate over what clients see of it; the last event is a ``FinishRequest``.

    Leaving the iteration early, or :meth:`aclose`, aborts the request at every stage.
    """

    def __aiter__(self) -> AsyncIterator[ClientEvent]: ...

    async def aclose(self) -> None:
        """Abort the request unless it has ended; closing again does nothing."""
        ...


class OmniClient(Protocol):
    """A running pipeline, whatever drives it. All methods belong to the event loop that :meth:`start` was awaited in."""

    async def start(self) -> None:
        """Load the stages; returns when all are ready.

        Raises:
            ConfigError: settings that can't work.
            StageDiedError: a stage ended while it loaded.
        """
        ...

    def submit(self, request: OmniRequest) -> RequestStream:
        """Start a request.

        Raises:
            BadRequestError: its id is in flight.
            StageDiedError: a stage on its road is gone.
        """
        ...

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        ...

    def health(self) -> Mapping[str, StageHealth]:
        """Each stage by name, in order."""
        ...

    def stats(self) -> list[StageStats]:
        """What was measured so far, a stage each."""
        ...

    def gauges(self) -> Mapping[str, Gauges]:
        """How each stage stands, by name; one that is gone holds nothing."""
        ...

    def watch(self, watcher: Watcher) -> None:
        """Call ``watcher`` after every step of every stage from now on; warm-up isn't told."""
        ...

    async def drain(self, seconds: float) -> None:
        """Wait for the requests in flight, at most so long; then abort what is left."""
        ...

    async def close(self) -> None:
        """Stop all stages and free what they held; closing again does nothing. Never waits longer than a few seconds."""
        ...
