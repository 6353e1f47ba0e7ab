"""A server over a scripted pipeline: through ASGI, and on a real socket."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager

import httpx
import pytest
import uvicorn

from stagevox.server.app import create_app
from stagevox.server.door import Door
from stagevox.server.settings import ServerSettings
from support.scripted_client import ScriptedClient, make_blueprint


class Server:
    """An app and the client behind it."""

    def __init__(self, *, client=None, blueprint=None, **settings):
        self.client = client or ScriptedClient()
        self.blueprint = blueprint or make_blueprint()
        self.app = create_app(self.client, self.blueprint, ServerSettings(**settings))
        self.state = self.app.state.server

    def http(self, **options):
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://server", **options)

    def call(self, method, path, **options):
        async def one():
            async with self.http() as http:
                return await http.request(method, path, **options)

        return asyncio.run(one())

    def post(self, path, body, **options):
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        return self.call("POST", path, content=json.dumps(body), headers=headers, **options)

    def chat(self, text="hello there", **fields):
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def speech(self, text="hello there", **fields):
        return self.post("/v1/audio/speech", {"input": text, **fields})


@pytest.fixture
def serve():
    """Make a server that is called through ASGI."""
    return Server


@contextmanager
def listening(make):
    """Run ``make()``, a :class:`Server`, in a thread on a port of its own; yields it with ``url``, ``port`` and ``on_loop``."""
    started, box = threading.Event(), {}

    async def main():
        server = box["server"] = make()
        config = uvicorn.Config(server.app, http=Door, host="127.0.0.1", port=0, log_level="critical", lifespan="off")
        runner = box["runner"] = uvicorn.Server(config)
        box["loop"] = asyncio.get_running_loop()
        task = asyncio.ensure_future(runner.serve())
        while not runner.started:
            await asyncio.sleep(0.005)
        server.port = runner.servers[0].sockets[0].getsockname()[1]
        server.url = f"http://127.0.0.1:{server.port}"
        started.set()
        await task

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert started.wait(20)
    server = box["server"]

    def on_loop(call, *args):
        """Run a plain function in the server's loop."""

        async def run():
            return call(*args)

        return asyncio.run_coroutine_threadsafe(run(), box["loop"]).result(10)

    server.on_loop = on_loop
    try:
        yield server
    finally:
        box["runner"].should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def listen():
    """Run a server on a socket for the length of a ``with``: ``with listen(pause=0.01) as server``."""

    def start(**options):
        client = options.pop("client", None) or (lambda: ScriptedClient(options.pop("pause", 0.0)))
        return listening(lambda: Server(client=client(), **options))

    return start
