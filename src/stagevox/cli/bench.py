"""``stagevox bench``: measure a running server, and compare what was measured."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stagevox.errors import ConfigError

from . import numbers

API_KEY_VARIABLE = "STAGEVOX_API_KEY"
SERVE = """\
Send requests to a running server and report what its users would have noticed: time to first text and first audio, end to end,
real-time factor, speech per second, and the breaks that a player would hear which starts at the first chunk.

A request that fails in any way (an HTTP error, a stream that breaks off, no audio) counts as failed and in no other figure.
Exit codes: 0 done, 1 no request of a run succeeded or a warm-up failed, 2 bad input."""
COMPARE = """\
Compare two results that `bench serve --repeats` saved. A difference is named only if no repeat of one reaches into those of the other."""


def add_parser(commands: Any) -> None:
    """Add ``bench`` to the subcommands."""
    parser = commands.add_parser("bench", help="measure a running server", allow_abbrev=False)
    inner = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    _add_serve(inner)
    _add_compare(inner)


def _add_serve(inner: Any) -> None:
    parser = inner.add_parser(
        "serve",
        help="load on a running server",
        description=SERVE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    where = parser.add_argument_group("the server")
    where.add_argument("--base-url", metavar="URL", help="instead of --host and --port")
    where.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    where.add_argument("--port", type=numbers.integer(1, 65535), default=8000, help="(default: %(default)s)")
    where.add_argument("--api-key", metavar="KEY", help=f"(or {API_KEY_VARIABLE})")
    where.add_argument(
        "--ready-timeout", type=numbers.number(0), default=0.0, metavar="S", help="wait for /health (default: not)"
    )
    what = parser.add_argument_group("the requests")
    what.add_argument("--endpoint", choices=("speech", "chat"), default="speech", help="(default: %(default)s)")
    what.add_argument(
        "--modalities", nargs="+", choices=("text", "audio"), default=["text", "audio"], help="of chat (default: both)"
    )
    what.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt a line (default: sentences for the packaged voice)")
    what.add_argument(
        "--num-prompts", type=numbers.integer(1), default=16, metavar="N", help="requests of a run (default: %(default)s)"
    )
    what.add_argument("--model", metavar="NAME", help="the requests' model (default: the server's)")
    what.add_argument("--voice", metavar="NAME", help="(default: the model's)")
    what.add_argument("--audio-format", choices=("wav", "pcm"), default="wav", help="(default: %(default)s)")
    what.add_argument("--extra-body", type=_json_object, default={}, metavar="JSON", help="more fields of every request")
    how = parser.add_argument_group("the load")
    how.add_argument(
        "--request-rate",
        type=numbers.number(0, above=True),
        default=math.inf,
        metavar="R",
        help="requests a second (default: all at once)",
    )
    how.add_argument(
        "--burstiness",
        type=numbers.number(0, above=True),
        default=1.0,
        metavar="B",
        help="1 is a Poisson process, less is bursts",
    )
    how.add_argument(
        "--max-concurrency", type=numbers.integer(1), nargs="+", metavar="N", help="requests in flight; several: a run each"
    )
    how.add_argument(
        "--repeats", type=numbers.integer(1), default=1, metavar="N", help="runs of each, for their spread (default: 1)"
    )
    how.add_argument(
        "--num-warmups", type=numbers.integer(0), default=2, metavar="N", help="requests before, unmeasured (default: 2)"
    )
    how.add_argument("--seed", type=numbers.integer(0), default=0, metavar="N", help="of the times of arrival (default: 0)")
    how.add_argument(
        "--timeout", type=numbers.number(0, above=True), default=120.0, metavar="S", help="of a request (default: %(default)g)"
    )
    out = parser.add_argument_group("the report")
    out.add_argument(
        "--metric-percentiles", type=_percentiles, default=(50.0, 90.0, 99.0), metavar="P,P", help="(default: 50,90,99)"
    )
    out.add_argument("--save-result", type=Path, metavar="FILE", help="all figures as JSON")
    out.add_argument("--save-detailed", action="store_true", help="with the arrival of every chunk")
    out.add_argument("--save-wavs", type=Path, metavar="DIR", help="what was heard, a file a request")
    out.add_argument("--metadata", nargs="+", type=_pair, default=[], metavar="KEY=VALUE", help="kept with the result")
    out.add_argument("--no-progress", action="store_true", help="no progress bar")
    parser.set_defaults(run=_serve)


def _add_compare(inner: Any) -> None:
    parser = inner.add_parser("compare", help="two saved results", description=COMPARE, allow_abbrev=False)
    parser.add_argument("before", type=Path, metavar="BEFORE")
    parser.add_argument("after", type=Path, metavar="AFTER")
    parser.set_defaults(run=_compare)


def _serve(args: argparse.Namespace) -> int:
    from stagevox.audio.wav import check_writable
    from stagevox.bench.serve.options import Options
    from stagevox.bench.serve.prompts import read_prompts
    from stagevox.bench.serve.run import run

    if args.endpoint == "speech" and args.modalities != ["text", "audio"]:
        raise ConfigError("modalities", "of chat only")
    if args.save_result is not None:
        check_writable("save_result", args.save_result)
    if args.save_wavs is not None:
        _make_folder(args.save_wavs)
    options = Options(
        base_url=_base_url(args),
        endpoint=args.endpoint,
        modalities=tuple(dict.fromkeys(args.modalities)),
        prompts=read_prompts(args.prompts),
        prompts_from="built in" if args.prompts is None else args.prompts.name,
        num_prompts=args.num_prompts,
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        concurrency=tuple(dict.fromkeys(args.max_concurrency or [None])),
        repeats=args.repeats,
        warmups=args.num_warmups,
        audio_format=args.audio_format,
        voice=args.voice,
        model=args.model,
        seed=args.seed,
        extra_body=args.extra_body,
        api_key=args.api_key if args.api_key is not None else os.environ.get(API_KEY_VARIABLE),
        timeout=args.timeout,
        ready_timeout=args.ready_timeout,
        percentiles=args.metric_percentiles,
        save_wavs=args.save_wavs,
        result=args.save_result,
        save_detailed=args.save_detailed,
        metadata=dict(args.metadata),
        progress=not args.no_progress,
    )
    return run(options)


def _compare(args: argparse.Namespace) -> int:
    from stagevox.bench.serve.compare import compare, load

    print("\n".join(compare(load(args.before), load(args.after))))
    return 0


def _base_url(args: argparse.Namespace) -> str:
    if args.base_url is None:
        host = f"[{args.host}]" if ":" in args.host else args.host
        return f"http://{host}:{args.port}/"
    parts = urlsplit(args.base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError("base_url", f"{args.base_url!r} is no http:// or https:// address")
    url: str = args.base_url.rstrip("/").removesuffix("/v1") + "/"
    return url


def _make_folder(folder: Path) -> None:
    from stagevox.audio.wav import check_writable

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("save_wavs", f"can't make the folder {str(folder)!r}: {error.strerror or error}") from None
    check_writable("save_wavs", folder / "check.wav")


def _percentiles(given: str) -> tuple[float, ...]:
    values = tuple(float(part) for part in given.split(","))
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"not from 0 to 100: {given}")
    return tuple(sorted(set(values)))


def _pair(given: str) -> tuple[str, str]:
    key, equals, value = given.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"not KEY=VALUE: {given!r}")
    return key, value


def _json_object(given: str) -> Mapping[str, Any]:
    try:
        value = json.loads(given)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value
