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
    from stagevox.config.effective import Effective, Setting

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
    explain.add_argument(
        "model", metavar="NAME|PATH", nargs="?", default="mini", help="a packaged model or a folder (default: mini)"
    )
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
    found = {**effective.settings, **merged_steps(blueprint, effective)}
    settings = {".".join(path): _entry(path[-1], one) for path, one in sorted(found.items(), key=_order(blueprint))}
    return {"model": blueprint.model.name, "platform": effective.platform, "settings": settings}


def merged_steps(blueprint: Blueprint, effective: Effective) -> dict[tuple[str, ...], Setting]:
    """How many decode steps each AR stage will merge, with who said so, or which gate refuses."""
    from stagevox.config.effective import Setting
    from stagevox.config.multi_step import ENVIRONMENT, FIELD, OPTION, resolve_multi_step_steps
    from stagevox.contract import StageExecutionType

    found: dict[tuple[str, ...], Setting] = {}
    for spec in blueprint.topology.stages:
        if spec.execution_type is not StageExecutionType.AR and FIELD not in spec.engine_extras:
            continue
        path = ("stages", spec.name, "engine_extras", FIELD)
        own, wanted = effective.settings.get(path), resolve_multi_step_steps(spec)
        sources = {"cli": OPTION, "environment": ENVIRONMENT}
        said = own if own is not None and wanted.source == "stage" else None
        setting = said or Setting(wanted.steps, sources.get(wanted.source, "default"), own)
        if wanted.steps and effective.platform is None:
            from stagevox.stage.vllm_config import make_merging_config
            from stagevox.stage.wire import StageSettings

            config, _, refusal = make_merging_config(spec, blueprint.overrides.get(spec.name, {}))
            made = StageSettings.of(config)
            assert made is not None
            if made.multi_step_decode_steps != wanted.steps:
                setting = Setting(0, f"the {refusal.value} gate" if refusal else "not meant for this model", setting)
        found[path] = setting
    return found


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
