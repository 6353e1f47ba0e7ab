"""The options by which a command takes an operator's settings: one place for ``say``, ``config`` and ``serve``."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from stagevox.errors import ConfigError

if TYPE_CHECKING:
    from stagevox.config.blueprint import Blueprint


def add_deploy_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--deploy-config``, ``--stage`` and ``--stage-overrides``."""
    group = parser.add_argument_group("settings of the stages", "docs/configuration.md explains them.")
    group.add_argument("--deploy-config", metavar="FILE", help="settings of all stages, in YAML")
    group.add_argument(
        "--stage",
        metavar="NAME.key=value",
        action="append",
        default=[],
        help="one setting of a stage, such as talker.max_num_seqs=4 or talker.sampling.seed=1; may be given again",
    )
    group.add_argument("--stage-overrides", metavar="JSON", help='vLLM engine arguments, such as {"talker": {"max_num_seqs": 1}}')


def blueprint_of(model: str, args: argparse.Namespace, platform: str | None = None) -> Blueprint:
    """The model with the settings that were given.

    Raises:
        ConfigError: settings that can't work; what only vLLM can say is left to :meth:`Blueprint.check_overrides`.
    """
    from stagevox.config.blueprint import Blueprint

    return Blueprint.of(
        model,
        _overrides(args.stage_overrides),
        deploy_config=args.deploy_config,
        stage_settings=args.stage,
        platform=platform,
    )


def _overrides(given: str | None) -> Any:
    if given is None:
        return None
    try:
        return json.loads(given, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise ConfigError("stage_overrides", f"not JSON: {error}") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} stands there twice")
        found[key] = value
    return found
