"""A server's life: the port first, then the model, then requests, until a signal ends it.

HTTP is answered while the model loads: ``/health`` says ``starting``. SIGTERM lets what is in flight finish, SIGINT or a second
signal doesn't wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from fastapi import FastAPI

from stagevox.errors import ConfigError, StageDiedError
from stagevox.pipeline.client import OmniClient, StageHealth

from .door import Door
from .state import ServerState

logger = logging.getLogger("stagevox.server")

WATCH_SECONDS = 0.25
LAST_SECONDS = 3
"""For responses to reach their clients once the pipeline has ended them."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, before anything heavy is loaded. Port 0 is a free one.

    Raises:
        ConfigError: the port is taken, or the host is no address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError("host", f"{host!r} is no address here: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)  # at once: two that are only bound would share the port
    except OSError as error:
        sock.close()
        raise ConfigError("port", f"can't listen on {host}:{port}: {error.strerror or error}") from None
    sock.setblocking(False)
    return sock


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: ours drain first."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


class _Signals:
    """Counts what asks the server to end."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._take, number)

    def _take(self, number: signal.Signals) -> None:
        if self.asked.is_set() or number == signal.SIGINT:
            self.hurry.set()
        self.asked.set()

    def remove(self) -> None:
        """Stop listening."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)


async def serve(
    app: FastAPI,
    client: OmniClient,
    sock: socket.socket,
    *,
    drain_seconds: float = 30.0,
    exit_on_death: bool = True,
    access_log: bool = False,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Start ``client``, answer on ``sock`` until a signal asks to end, and close both.

    Raises:
        ConfigError: settings that can't work, found while the stages load.
        StageDiedError: a stage ended while it loaded, or later if ``exit_on_death``.
    """
    state: ServerState = app.state.server
    signals = _Signals()
    config = uvicorn.Config(
        app,
        http=Door,
        log_config=None,
        access_log=access_log,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=LAST_SECONDS,
    )
    server = _Server(config)
    answering = asyncio.ensure_future(server.serve([sock]))
    asked = asyncio.ensure_future(signals.asked.wait())
    starting = asyncio.ensure_future(client.start())
    try:
        await asyncio.wait({starting, asked, answering}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            on_ready()
            await _until_asked(asked, answering, client, exit_on_death)
            await _drain(state, client, signals, drain_seconds)
    finally:
        state.draining = True
        asked.cancel()
        try:
            await _end(state, client, starting)
        finally:
            server.should_exit = True
            try:
                with suppress(asyncio.CancelledError):
                    await answering
            finally:
                try:
                    await client.close()
                finally:
                    signals.remove()


async def _end(state: ServerState, client: OmniClient, starting: asyncio.Future[Any]) -> None:
    """Whatever is loading, waits or runs."""
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)  # it ends what it has begun
    state.gate.close()
    await client.drain(0)


async def _until_asked(
    asked: asyncio.Future[Any], answering: asyncio.Future[Any], client: OmniClient, exit_on_death: bool
) -> None:
    while not (asked.done() or answering.done()):
        await asyncio.wait([asked, answering], timeout=WATCH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        dead = [name for name, health in client.health().items() if health is StageHealth.DEAD]
        if dead and exit_on_death:
            await asyncio.sleep(WATCH_SECONDS)  # for those in flight to be told
            raise StageDiedError(f"{', '.join(dead)}: the engine died; the server ends")


async def _drain(state: ServerState, client: OmniClient, signals: _Signals, seconds: float) -> None:
    """Take nothing new, and let what was taken finish."""
    state.draining = True
    end = time.monotonic() + seconds
    count = client.num_requests + state.gate.waiting
    if count and not signals.hurry.is_set():
        logger.info("draining: %d requests, at most %g s", count, seconds)
    while client.num_requests + state.gate.waiting and time.monotonic() < end and not signals.hurry.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(signals.hurry.wait(), 0.05)
