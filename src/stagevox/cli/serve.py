"""``stagevox serve``: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Any

from stagevox.errors import ConfigError
from stagevox.observe.log import FORMATS

from . import numbers
from .deploy_options import add_deploy_options, blueprint_of

API_KEY_VARIABLE = "STAGEVOX_API_KEY"
DESCRIPTION = """\
Serve a model over HTTP with OpenAI's interfaces: /v1/chat/completions, /v1/audio/speech, /v1/models.

The port is bound before anything is loaded. SIGTERM finishes what is in flight (--drain-timeout), then ends; Ctrl-C ends at once.
Exit codes: 0 asked to end, 1 a stage died, 2 settings that can't work."""


def add_parser(commands: Any) -> None:
    """Add ``serve`` to the subcommands."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", default="mini", help="a packaged model or a folder (default: mini)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=numbers.integer(0, 65535), default=8000, help="0 takes a free one (default: %(default)s)")
    parser.add_argument(
        "--api-key", action="append", metavar="KEY", help=f"needed under /v1; may be given often (or {API_KEY_VARIABLE})"
    )
    parser.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="what requests may give as model (default: the model's)"
    )
    parser.add_argument(
        "--driver", default="process", help="process: one a stage; inline: all in this one (default: %(default)s)"
    )
    parser.add_argument(
        "--max-running", type=numbers.integer(1), default=32, metavar="N", help="requests at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--max-queue", type=numbers.integer(0), default=128, metavar="N", help="requests that wait (default: %(default)s)"
    )
    parser.add_argument(
        "--max-body-mib", type=numbers.integer(1), default=32, metavar="N", help="size of a request (default: %(default)s)"
    )
    parser.add_argument(
        "--deadline",
        type=numbers.seconds,
        metavar="S",
        help="wait for a stage's input (default: the deploy file's deadlines.input, or 30)",
    )
    parser.add_argument(
        "--drain-timeout", type=numbers.seconds, default=30.0, metavar="S", help="after SIGTERM (default: %(default)g)"
    )
    parser.add_argument(
        "--on-stage-death",
        choices=("exit", "restart", "stay"),
        default="exit",
        help="end, start the stage again, or answer 503 from then on (default: %(default)s)",
    )
    parser.add_argument(
        "--allowed-media-domains", nargs="+", metavar="HOST", help="hosts that media URLs may name (default: none)"
    )
    parser.add_argument("--allowed-local-media-path", metavar="FOLDER", help="folder that file: URLs may name (default: none)")
    parser.add_argument("--cors-origins", nargs="+", metavar="ORIGIN", help="pages that may call from a browser (default: none)")
    parser.add_argument("--trace", metavar="FILE", help="write a timeline of stages and requests that opens in Perfetto")
    parser.add_argument(
        "--trace-mib", type=numbers.integer(1), default=64, metavar="N", help="most of the trace to keep (default: %(default)s)"
    )
    parser.add_argument("--no-playground", action="store_true", help="no page at / to try the voice with")
    parser.add_argument("--access-log", action="store_true", help="a line for each request")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(default: %(default)s)"
    )
    parser.add_argument("--log-format", choices=FORMATS, default="human", help="json is one object a line (default: %(default)s)")
    add_deploy_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check, bind, load, serve."""
    started = time.monotonic()
    from stagevox.config.env import hush_libraries
    from stagevox.stage.version import check_vllm_version

    check_vllm_version()
    keys, folder = _keys(args.api_key), _folder(args.allowed_local_media_path)
    hush_libraries()
    from stagevox.observe.figures import RequestWatch
    from stagevox.observe.log import RequestLog, set_up
    from stagevox.observe.trace import Trace
    from stagevox.server.app import create_app
    from stagevox.server.drivers import DriverOptions, make_client
    from stagevox.server.run import bind, serve
    from stagevox.server.settings import MIB, ServerSettings

    set_up(args.log_format, args.log_level)
    sock = bind(args.host, args.port)  # before any model is loaded
    with sock:
        blueprint = blueprint_of(args.model, args)
        trace = None
        if args.trace is not None:
            trace = Trace(Path(args.trace), blueprint.stages, max_bytes=args.trace_mib * MIB, name=blueprint.topology.name)
        settings = ServerSettings(
            served_model_names=tuple(args.served_model_name or ()),
            api_keys=keys,
            cors_origins=tuple(args.cors_origins or ()),
            max_running=args.max_running,
            max_queue=args.max_queue,
            max_body_bytes=args.max_body_mib * MIB,
            allowed_media_domains=tuple(args.allowed_media_domains or ()),
            allowed_local_media_path=folder,
            observers=[RequestWatch([RequestLog(), *([] if trace is None else [trace])])],
            playground=not args.no_playground,
        )
        deadline = blueprint.effective.deadline if args.deadline is None else args.deadline
        client = make_client(args.driver, blueprint, DriverOptions(deadline, restart=args.on_stage_death == "restart"))
        if trace is not None:
            client.watch(trace.stepped)
        app = create_app(client, blueprint, settings)
        host, port = sock.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        name = app.state.server.names[0]

        def ready() -> None:
            print(f"stagevox: {name} is ready at {url} after {time.monotonic() - started:.1f} s", flush=True)

        logging.getLogger("stagevox.server").info("%s is loading at %s", name, url)
        asyncio.run(
            serve(
                app,
                client,
                sock,
                drain_seconds=args.drain_timeout,
                exit_on_death=args.on_stage_death != "stay",  # a stage that can't be started again is dead
                access_log=args.access_log,
                on_ready=ready,
            )
        )
    return 0


def _keys(given: list[str] | None) -> tuple[str, ...]:
    variable = os.environ.get(API_KEY_VARIABLE)
    keys = given if given is not None else [variable] if variable is not None else []
    if any(not key.strip() or not key.isascii() for key in keys):
        raise ConfigError("api_key", "blank, or not ASCII")
    return tuple(key.strip() for key in keys)


def _folder(given: str | None) -> Path | None:
    if given is None:
        return None
    folder = Path(given)
    if not folder.is_dir():
        raise ConfigError("allowed_local_media_path", f"no folder {given!r}")
    return folder.resolve()
