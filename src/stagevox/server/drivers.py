"""What can drive the stages behind a server, by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stagevox.config.blueprint import Blueprint
from stagevox.errors import ConfigError
from stagevox.pipeline.client import OmniClient
from stagevox.pipeline.stage import Stage

logger = logging.getLogger("stagevox.server")

ROADS = ("auto", "shm", "tcp")
"""Values of ``connectors.kind`` for stages with a process each, all started on this host."""


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """What a driver is told besides the model."""

    deadline: float = 30.0
    """Seconds that a stage may wait for its input."""
    restart: bool = False
    """Start a stage that has died again."""


def process(blueprint: Blueprint, options: DriverOptions) -> OmniClient:
    """A process a stage. Settings that only vLLM can judge are judged there: this process doesn't load it."""
    from stagevox.connectors.roadmap import LOOPBACK
    from stagevox.pipeline.fleet import OnDeath
    from stagevox.pipeline.process import ProcessClient

    def address(stage: str) -> str:
        """Where a stage listens for chunks over TCP."""
        return effective.value("connectors", "addresses", stage) or LOOPBACK

    effective = blueprint.effective
    kind = effective.value("connectors", "kind")
    if kind not in ROADS:
        raise ConfigError("connectors.kind", f"not {kind!r} for stages with a process each", ROADS)
    return ProcessClient(
        blueprint,
        deadline=options.deadline,
        on_death=OnDeath.RESTART if options.restart else OnDeath.EXIT,
        told_of_death=lambda stage, cause: logger.error("%s: the engine died: %s", stage, cause),
        road={"per_request": effective.value("connectors", "window")},
        addresses={name: address(name) for name in blueprint.stages} if kind == "tcp" else None,
    )


def inline(blueprint: Blueprint, options: DriverOptions) -> OmniClient:
    """All stages in a thread of this process."""
    from stagevox.config.env import prepare_inline_process
    from stagevox.omni import check_stages, start_stage
    from stagevox.pipeline.threaded import ThreadedClient

    def load() -> Sequence[Stage]:
        blueprint.check_overrides()
        check_stages(blueprint)
        stages: list[Stage] = []
        try:
            for spec in blueprint.topology.stages:
                stages.append(start_stage(spec, blueprint.overrides.get(spec.name, {}), record=False))
        except BaseException:
            for stage in stages:
                stage.close()
            raise
        return stages

    if options.restart:
        raise ConfigError("on_stage_death", "a stage can be started again only in a process of its own", ["exit", "stay"])
    blueprint.effective.check_one_process()
    prepare_inline_process()
    topology = blueprint.topology
    warm_up = None if topology.warm_up is None else blueprint.admit("warm-up", topology.warm_up, None)
    return ThreadedClient(blueprint.stages, load, deadline=options.deadline, warm_up=warm_up, text_stage=topology.text_stage)


DRIVERS: Mapping[str, Callable[[Blueprint, DriverOptions], OmniClient]] = {"process": process, "inline": inline}
"""The first is the default."""


def make_client(driver: str, blueprint: Blueprint, options: DriverOptions) -> OmniClient:
    """A client that isn't started.

    Raises:
        ConfigError: no such driver, or settings that it can't work with.
    """
    make = DRIVERS.get(driver)
    if make is None:
        raise ConfigError("driver", f"no driver {driver!r}", list(DRIVERS))
    return make(blueprint, options)
