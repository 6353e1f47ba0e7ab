"""How much is taken: bytes of a body, requests at a time."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError


class BodyLimit:
    """Refuses bodies of more than ``max_bytes`` (413) and those that take longer than ``seconds`` to come (408)."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what comes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_bytes:
            await self._too_large().response()(scope, receive, send)
            return
        taken, whole = 0, False
        give_up = time.monotonic() + self._seconds

        async def counted() -> Message:
            nonlocal taken, whole
            if whole:
                return await receive()  # waits for the client to go
            try:
                message = await asyncio.wait_for(receive(), max(0.0, give_up - time.monotonic()))
            except TimeoutError:
                raise HTTPException(408, f"the body did not come within {self._seconds:g} s") from None
            taken += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if taken > self._max_bytes:
                error = self._too_large()
                raise HTTPException(error.status, error.message)  # which FastAPI passes on from where it reads
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._max_bytes} bytes", code="content_too_large")


class Gate:
    """Lets requests into the pipeline, ``max_running`` at a time; ``max_queue`` more wait, first come, first served."""

    def __init__(self, max_running: int, max_queue: int) -> None:
        self.max_running, self.max_queue = max_running, max_queue
        self.running = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._mean_seconds = 1.0

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @asynccontextmanager
    async def slots(self, count: int) -> AsyncIterator[Callable[[], None]]:
        """Hold ``count`` slots, waiting for them if need be; yields what gives them back before the end.

        Raises:
            ApiError: 429, the queue is full.
        """
        await self._enter(count)
        started = time.monotonic()
        held = True

        def give_back() -> None:
            nonlocal held
            if held:
                held = False
                self._mean_seconds += 0.1 * (time.monotonic() - started - self._mean_seconds)
                self._leave(count)

        try:
            yield give_back
        finally:
            give_back()

    def close(self) -> None:
        """Send away all who wait: the server is about to end."""
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(ApiError(503, "the server is shutting down", code="draining"))

    async def _enter(self, count: int) -> None:
        assert 0 < count <= self.max_running
        if not self._waiting and self.running + count <= self.max_running:
            self.running += count
            return
        if len(self._waiting) >= self.max_queue:
            raise ApiError(
                429,
                f"{self.running} requests run and {len(self._waiting)} wait: come again later",
                code="queue_full",
                headers={"Retry-After": str(self.retry_seconds())},
            )
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (count, granted)
        self._waiting.append(entry)
        try:
            await granted
        except asyncio.CancelledError:
            # A loop turn has gone by since it was cancelled: what ended in it may have taken the entry off the queue.
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._admit()  # a small one may have waited behind it
            elif not granted.cancelled() and granted.exception() is None:
                self._leave(count)  # let in and gone in one breath
            raise

    def _leave(self, count: int) -> None:
        self.running -= count
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.running + self._waiting[0][0] <= self.max_running:
            count, future = self._waiting.popleft()
            if not future.done():
                self.running += count
                future.set_result(None)

    def retry_seconds(self) -> int:
        """When one more would likely find a place in the queue: 1 to 60."""
        rounds = (len(self._waiting) + 1) / self.max_running
        return min(60, max(1, math.ceil(rounds * self._mean_seconds)))
