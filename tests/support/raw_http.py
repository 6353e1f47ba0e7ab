"""An HTTP server that says, byte for byte and pause for pause, what a test tells it to."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager
from types import SimpleNamespace

ABORT = object()
"""A step: cut the connection off."""


def head(kind="audio/wav", status="200 OK", **headers):
    """The head of a chunked response."""
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", "Transfer-Encoding: chunked"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def chunk(data):
    """One chunk of a body; an empty one is its end."""
    return b"%x\r\n%s\r\n" % (len(data), data)


END = chunk(b"")


def events(*items):
    """A chunked stream of server-sent events."""
    datas = [item if isinstance(item, str) else json.dumps(item) for item in items]
    return [head("text/event-stream"), *(chunk(f"data: {data}\n\n".encode()) for data in datas), END]


def delta(reason=None, **fields):
    """A chat chunk."""
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


@contextmanager
def raw_server(script):
    """``script(path, body)`` gives the steps of an answer: bytes to send, seconds to wait, or ``ABORT``. Yields it with ``url``
    and ``asked``, the ``(path, body)`` of all POSTs so far. GETs are answered 404."""
    box = SimpleNamespace(asked=[], sent=[])
    started = threading.Event()

    async def serve(reader, writer):
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split()
                size = 0
                while (header := await reader.readline()).strip():
                    name, _, value = header.decode().partition(":")
                    size = int(value) if name.lower() == "content-length" else size
                if method == "GET":
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    continue
                body = json.loads(await reader.readexactly(size))
                box.asked.append((path, body))
                for step in script(path, body):
                    if step is ABORT:
                        writer.transport.abort()
                        return
                    if isinstance(step, bytes):
                        writer.write(step)
                        await writer.drain()
                    else:
                        await asyncio.sleep(step)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        box.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        box.loop, box.stop = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        await box.stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert started.wait(20)
    try:
        yield box
    finally:
        box.loop.call_soon_threadsafe(box.stop.set)
        thread.join(20)
        assert not thread.is_alive()
