"""``stagevox config explain``: the settings that hold, and where each comes from."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .deploy_options import add_deploy_options, blueprint_of
from .say import check_folder, only_ours_on_stdout

if TYPE_CHECKING:
    from stagevox.config.blueprint import Blueprint
    from stagevox.config.effective import Setting

DESCRIPTION = """\
Check the settings of a model's stages and print those that hold, and where each comes from: default (stagevox's own),
model, FILE:LINE, --stage, stage_overrides. What isn't listed is as vLLM has it. Nothing is loaded."""

HIDDEN = "***"


def add_parser(commands: Any) -> None:
    """Add ``config`` to the subcommands."""
    parser = commands.add_parser("config", help="look at settings", description="Look at settings.", allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    explain = actions.add_parser(
        "explain",
        help="print the settings that hold, and where each comes from",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    explain.add_argument("model", metavar="NAME|PATH", help="a packaged model or a folder")
    explain.add_argument("--platform", help="as if it ran there: cpu, cuda, rocm, xpu or tpu (default: this machine)")
    explain.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else")
    add_deploy_options(explain)
    explain.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check and print."""
    from stagevox.config.env import hush_libraries, prepare_inline_process
    from stagevox.stage.version import check_vllm_version

    check_vllm_version()
    check_folder()
    prepare_inline_process()
    hush_libraries()
    _check_platform(args.platform)
    with only_ours_on_stdout() as stdout:
        blueprint = blueprint_of(args.model, args, args.platform)
        report = make_report(blueprint)
        if args.platform is None:
            from stagevox.omni import check_stages

            check_stages(blueprint)
        print(json.dumps(report) if args.json else "\n".join(as_text(report)), file=stdout, flush=True)
    return 0


def make_report(blueprint: Blueprint) -> dict[str, Any]:
    """What ``--json`` prints: ``settings`` maps a path to value, source and, as ``over``, what it was laid over.

    Raises :class:`ConfigError` for engine arguments that can't be.
    """
    effective = blueprint.explained()
    settings = {".".join(path): _entry(path[-1], one) for path, one in sorted(effective.settings.items(), key=_order(blueprint))}
    return {"model": blueprint.model.name, "platform": effective.platform, "settings": settings}


def as_text(report: dict[str, Any]) -> Iterator[str]:
    """The lines that are printed without ``--json``."""
    on = f" on {report['platform']}" if report["platform"] else ""
    yield f"{report['model']}{on}"
    rows = []
    for path, entry in report["settings"].items():
        was = entry["over"]
        over = f", over {json.dumps(was['value'])} ({was['source']})" if was else ""
        rows.append((path, json.dumps(entry["value"]), entry["source"] + over))
    wide, wider = (max(len(row[column]) for row in rows) for column in (0, 1))
    for path, value, source in rows:
        yield f"  {path:<{wide}}  {value:<{min(wider, 24)}}  {source}"


def _check_platform(platform: str | None) -> None:
    from stagevox.config.deploy import PLATFORMS
    from stagevox.config.nearest import nearest
    from stagevox.errors import ConfigError

    if platform is not None and platform not in PLATFORMS:
        raise ConfigError("platform", f"no such platform: {platform!r}", nearest(platform, PLATFORMS))


def _order(blueprint: Blueprint) -> Any:
    """Stages in their order, then what is common to them; blocks in the schema's order."""
    from stagevox.config.deploy import STAGE_KEYS

    def key(item: tuple[tuple[str, ...], Setting]) -> tuple[Any, ...]:
        path = item[0]
        if path[0] == "stages":
            return 0, blueprint.stages.index(path[1]), STAGE_KEYS.index(path[2]), path[3:]
        return 1, path

    return key


def _entry(key: str, setting: Setting) -> dict[str, Any]:
    from stagevox.config.effective import SECRET

    value = HIDDEN if key in SECRET and setting.value is not None else setting.value
    over = _entry(key, setting.over) if setting.over else None
    return {"value": _plain(value), "source": setting.source, "over": over}


def _plain(value: Any) -> Any:
    """As JSON can say it; what it can't, such as an object set in code, in Python's words."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return repr(value)
    return value
