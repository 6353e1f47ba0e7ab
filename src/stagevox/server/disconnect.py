"""Clients that leave: whatever was begun for them ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ClientGone, UnfinishedResponse

T = TypeVar("T")


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Wait for ``work``; if the client leaves first, cancel it and raise :class:`ClientGone`."""
    return await _race(work, request.receive)


async def _race(work: Awaitable[T], receive: Receive) -> T:
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for one in (task, gone):
            one.cancel()
        for one in (task, gone):
            with suppress(BaseException):
                await one


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class PiecesResponse(Response):
    """Sends ``pieces`` as they come. Always closes them, and the ``source`` they are made of: at their end, if the client
    leaves, or if it reads nothing for ``send_seconds``.

    Pieces that raise :class:`UnfinishedResponse` leave the response without its end, so that the connection breaks.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        source: AsyncGenerator[Any, None],
        media_type: str,
        headers: Mapping[str, str],
        send_seconds: float,
    ) -> None:
        self._pieces, self._source = pieces, source
        self._send_seconds = send_seconds
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers(headers)
        self.headers.setdefault("cache-control", "no-cache")
        self.headers.setdefault("x-accel-buffering", "no")  # proxies that collect would undo the streaming

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await _race(self._send_all(send), receive)
        finally:
            await self._pieces.aclose()
            await self._source.aclose()  # pieces that were never begun can't close it

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces:
            await self._send(send, piece, more=True)
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        try:
            async with asyncio.timeout(self._send_seconds):
                await send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            raise UnfinishedResponse(f"the client has read nothing for {self._send_seconds:g} s") from None
