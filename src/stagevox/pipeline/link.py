"""The server's end of one stage: its process, and the socket between them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

import msgspec
import zmq
import zmq.asyncio

from stagevox.stage.messages import Launch, Quit, ToServer, ToStage, decode_to_server, encode, encode_launch

LAST_WORDS = 2.0
"""Seconds in which what a process said before it ended must have been read."""


class StageLink:
    """Starts the process of a stage, talks to it, and knows when it ends."""

    def __init__(self, launch: Launch, context: zmq.asyncio.Context, stderr: IO[bytes] | None = None) -> None:
        """Listen at ``launch.control``, then start the process; ``stderr`` takes what it writes there.

        Raises:
            OSError: the process can't be started, or not be watched; nothing is left of it.
            zmq.ZMQError: the socket can't be opened.
        """
        self.name = launch.spec.name
        self._path = Path(launch.control.removeprefix("ipc://"))
        with ExitStack() as undo:
            self._socket = context.socket(zmq.PAIR)
            undo.callback(self._close_socket)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.SNDHWM, 0)
            self._socket.setsockopt(zmq.RCVHWM, 0)
            self._socket.bind(launch.control)
            self._path.chmod(0o600)
            self._child = subprocess.Popen(
                [sys.executable, "-m", "stagevox.stage.process"],
                stdin=subprocess.PIPE,
                stdout=stderr,
                stderr=stderr,
                start_new_session=True,  # a terminal's Ctrl-C is the server's to handle
            )
            undo.callback(self._kill_and_wait)
            assert self._child.stdin is not None
            with suppress(BrokenPipeError):  # it ended already: receive() will say so
                self._child.stdin.write(encode_launch(launch) + b"\n")
                self._child.stdin.flush()
            self._watch = os.pidfd_open(self._child.pid)
            undo.pop_all()
        self._ended = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._watch, self._on_end)

    @property
    def pid(self) -> int:
        """Process id of the stage."""
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        """False once the process has ended."""
        return not self._ended.done()

    def send(self, message: ToStage) -> None:
        """Tell the stage; to one that has ended, nothing is said. Never waits."""
        if self.is_alive:
            # PAIR without a high-water mark takes it at once; the future is done when it comes back.
            self._socket.send(encode(message))

    async def receive(self) -> ToServer | None:
        """What the stage says next; None once the process has ended and its last words were read."""
        waiting = asyncio.ensure_future(self._socket.recv())
        try:
            await asyncio.wait({waiting, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                await asyncio.wait({waiting}, timeout=LAST_WORDS if await self._has_more() else 0)
            if not waiting.done():
                return None
            data: bytes = waiting.result()
        finally:
            if not waiting.done():
                waiting.cancel()
        try:
            return decode_to_server(data)
        except msgspec.MsgspecError as error:
            raise RuntimeError(f"{self.name} said what nobody understands: {error}") from error

    def cause(self) -> str:
        """How the process ended."""
        status = self._child.poll()
        if status is not None and status < 0:
            with suppress(ValueError):
                return f"killed by {signal.Signals(-status).name}"
        return f"exit status {status}"

    def kill(self) -> None:
        """End the process at once."""
        with suppress(ProcessLookupError):
            self._child.kill()

    async def ended(self) -> None:
        """Wait until the process has ended."""
        await asyncio.shield(self._ended)

    async def stop(self, seconds: float) -> None:
        """Ask the process to end; kill it if it hasn't after ``seconds``."""
        self.send(Quit())
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._ended), seconds)
        if self.is_alive:
            self.kill()
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._ended), LAST_WORDS)
        self.close()

    def close(self) -> None:
        """Let go of socket and descriptors. The process must have ended, or ends now: its standard input does."""
        if self._watch >= 0:
            asyncio.get_running_loop().remove_reader(self._watch)
            os.close(self._watch)
            self._watch = -1
        self._close_stdin()
        self._close_socket()

    def _close_stdin(self) -> None:
        if self._child.stdin is not None:
            with suppress(OSError):
                self._child.stdin.close()

    def _close_socket(self) -> None:
        self._socket.close(linger=0)
        self._path.unlink(missing_ok=True)

    def _kill_and_wait(self) -> None:
        self.kill()
        self._child.wait()
        self._close_stdin()

    async def _has_more(self) -> bool:
        return bool(await self._socket.poll(0))

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._watch)
        self._child.wait()
        if not self._ended.done():
            self._ended.set_result(None)
