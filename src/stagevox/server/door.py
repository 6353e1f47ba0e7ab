"""What a connection may cost before it has said what it wants.

Uvicorn neither bounds the head of a request nor waits for one with a clock: one endless header would take all memory, and clients
that say nothing keep their sockets for ever. Bodies have limits of their own (:mod:`stagevox.server.limits`).
"""

from __future__ import annotations

import asyncio
import http
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 64 * 1024
"""Bytes of request line and headers, and of what follows a body in chunks; one read more may be held."""
HEAD_SECONDS = 20.0
"""Longest wait for a whole head, from the connection or, on one that is kept, from the first byte on."""


class Door(HttpToolsProtocol):
    """Uvicorn's protocol, whose heads are bounded in size (431) and time (408)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._head_bytes = 0
        self._in_tail = False
        self._tail_bytes = 0
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come, and has yet to speak."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has left."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head; uvicorn's own clock stops at the first byte, so ours starts."""
        was_in_tail = self._in_tail
        super().data_received(data)
        if was_in_tail and self._in_tail:  # in the read that brought its beginning, the rest may have been body
            self._tail_bytes += len(data)
            if self._tail_bytes > MAX_HEAD:
                self._refuse(431, f"what follows the body has more than {MAX_HEAD} bytes")
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD:
                self._refuse(431, f"the head has more than {MAX_HEAD} bytes")
        if self._patience is None and self._is_idle():
            self._wait()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is told so in the shape of all errors."""
        self._refuse(400, msg)

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """It is known what is wanted."""
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep what belongs to the head. Trailers are dropped: uvicorn would add them to the headers of the running request."""
        if self._in_head:
            super().on_header(name, value)

    def on_chunk_header(self) -> None:
        """A chunk of a body begins. The last is empty, and trailers may follow: on_header sees each only when it is whole."""
        self._in_tail, self._tail_bytes = True, 0

    def on_body(self, body: bytes) -> None:
        """It was not the last chunk."""
        self._in_tail = False
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All is said."""
        self._in_tail = False
        super().on_message_complete()

    def _is_idle(self) -> bool:
        """True if nothing that was asked for is unanswered; a body that goes on after its answer is no reason to stay."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def _wait(self) -> None:
        self._patience = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        if self._in_head:
            self._refuse(408, f"the head did not come within {HEAD_SECONDS:g} s")
        elif self._is_idle():
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answer and hang up; in the midst of another answer, hang up without one."""
        if self.transport.is_closing():
            return
        if self._is_idle() or not self.cycle.response_started:
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
            body = json.dumps({"error": error}).encode()
            head = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()
