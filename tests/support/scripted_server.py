"""A server over a scripted pipeline in a process of its own: ``python scripted_server.py '{"start": 1.0, ...}'``.

``start``: seconds that loading takes; ``fail``: loading fails; ``drain``: seconds; ``pause``: seconds an output. SIGUSR1 kills a stage.
"""

import asyncio
import json
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stagevox.errors import ConfigError, StagevoxError
from stagevox.pipeline.client import StageHealth
from stagevox.server.app import create_app
from stagevox.server.run import bind, serve
from support.scripted_client import ScriptedClient, make_blueprint

options = json.loads(sys.argv[1])


class Slow(ScriptedClient):
    async def start(self):
        self.stages = dict.fromkeys(self.stages, StageHealth.STARTING)
        await asyncio.sleep(options.get("start", 0))
        if options.get("fail"):
            raise ConfigError("talker", "can't work")
        self.stages = dict.fromkeys(self.stages, StageHealth.READY)


async def main():
    client = Slow(pause=options.get("pause", 0.0))
    sock = bind("127.0.0.1", 0)
    print("port", sock.getsockname()[1], flush=True)
    app = create_app(client, make_blueprint())
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, client.kill, "talker")
    stay = options.get("stay", False)
    await serve(
        app,
        client,
        sock,
        drain_seconds=options.get("drain", 5),
        exit_on_death=not stay,
        on_ready=lambda: print("ready", flush=True),
    )


try:
    asyncio.run(main())
except StagevoxError as error:
    sys.exit(f"error: {error}")
print("torch" in sys.modules, "vllm" in sys.modules)
