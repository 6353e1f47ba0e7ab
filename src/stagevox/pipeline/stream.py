"""A request in flight at a pipeline of processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from .events import ClientEvent, FinishRequest


class Stream:
    """What comes of one request (:class:`stagevox.pipeline.client.RequestStream`); ``abort`` is called with its id if it is left early."""

    def __init__(self, req_id: str, abort: Callable[[str], None]) -> None:
        self._req_id = req_id
        self._abort = abort
        self._events: asyncio.Queue[ClientEvent] = asyncio.Queue()
        self._is_over = False

    def push(self, event: ClientEvent) -> None:
        """Add what comes next."""
        self._events.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[ClientEvent]:
        try:
            while not self._is_over:
                event = await self._events.get()
                self._is_over = isinstance(event, FinishRequest)
                yield event
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Abort the request unless it has ended."""
        if not self._is_over:
            self._is_over = True
            self._abort(self._req_id)
