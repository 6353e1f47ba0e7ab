"""A request in flight, as an event loop reads it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from .events import ClientEvent, FinishRequest


class Stream:
    """What comes of one request (:class:`.client.RequestStream`); ``abort`` is called with its id if it is left early.

    All of it belongs to the event loop that reads it.
    """

    def __init__(self, req_id: str, abort: Callable[[str], None]) -> None:
        self._req_id = req_id
        self._abort = abort
        self._events: deque[ClientEvent] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._closed = False

    def push(self, event: ClientEvent) -> None:
        """Add what comes next; one that was closed takes no more."""
        if self._closed:
            return
        self._events.append(event)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def __aiter__(self) -> AsyncIterator[ClientEvent]:
        try:
            while not self._closed:
                while self._events:
                    event = self._events.popleft()
                    if isinstance(event, FinishRequest):
                        self._closed = True
                    yield event
                    if self._closed:
                        return
                self._waiting = asyncio.get_running_loop().create_future()
                await self._waiting
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Abort the request unless it has ended; who waits for its next event is told that it is over."""
        if not self._closed:
            self._closed = True
            self._events.clear()
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(None)
            self._abort(self._req_id)
