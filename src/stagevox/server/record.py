"""What the server knows of one HTTP request's work, and who wants to be told of it: metrics, traces, benchmarks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stagevox.pipeline.events import ClientEvent


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds of ``time.monotonic``; None: not yet, or never."""

    req_id: str
    """The id in the response; the pipeline's requests are called ``<req_id>-<choice>``."""
    endpoint: str
    """``chat`` or ``speech``."""
    stream: bool
    arrived_at: float = field(default_factory=time.monotonic)
    admitted_at: float | None = None
    """When it left the queue."""
    first_text_at: float | None = None
    first_audio_at: float | None = None
    finished_at: float | None = None
    prompt_tokens: int = 0
    text_tokens: int = 0
    audio_tokens: int = 0
    audio_seconds: float = 0.0
    finish_reason: str | None = None
    """``stop``, ``length``, ``abort`` (the client has gone) or ``error``."""
    error: str | None = None
    """Name of the error."""


class Observer(Protocol):
    """Told in the event loop, so it must be quick; what it raises is not caught."""

    def started(self, record: RequestRecord) -> None:
        """A request was read and is well-formed; it may have to wait."""
        ...

    def happened(self, record: RequestRecord, event: ClientEvent) -> None:
        """A stage had an output for it, or one of its choices ended."""
        ...

    def finished(self, record: RequestRecord) -> None:
        """It is over, whatever way; called once after each ``started``."""
        ...


class Observers:
    """Tells several."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def started(self, record: RequestRecord) -> None:
        """See :class:`Observer`."""
        for observer in self._observers:
            observer.started(record)

    def happened(self, record: RequestRecord, event: ClientEvent) -> None:
        """See :class:`Observer`."""
        for observer in self._observers:
            observer.happened(record, event)

    def finished(self, record: RequestRecord) -> None:
        """See :class:`Observer`."""
        for observer in self._observers:
            observer.finished(record)
