"""What can drive the stages behind a server, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stagevox.config.blueprint import Blueprint
from stagevox.errors import ConfigError
from stagevox.pipeline.client import OmniClient
from stagevox.pipeline.stage import Stage


def inline(blueprint: Blueprint, deadline: float) -> OmniClient:
    """All stages in a thread of this process."""
    from stagevox.config.env import prepare_inline_process
    from stagevox.omni import start_stage
    from stagevox.pipeline.threaded import ThreadedClient

    def load() -> Sequence[Stage]:
        stages: list[Stage] = []
        try:
            for spec in blueprint.topology.stages:
                stages.append(start_stage(spec, blueprint.overrides.get(spec.name, {}), record=False))
        except BaseException:
            for stage in stages:
                stage.close()
            raise
        return stages

    prepare_inline_process()
    text = blueprint.topology.warm_up
    warm_up = None if text is None else blueprint.admit("warm-up", text, None)
    return ThreadedClient(blueprint.stages, load, deadline=deadline, warm_up=warm_up)


DRIVERS: Mapping[str, Callable[[Blueprint, float], OmniClient]] = {"inline": inline}
DEFAULT = "inline"


def make_client(driver: str, blueprint: Blueprint, deadline: float) -> OmniClient:
    """A client that isn't started; ``deadline`` is how many seconds a stage may wait for its input.

    Raises:
        ConfigError: no such driver.
    """
    make = DRIVERS.get(driver)
    if make is None:
        raise ConfigError("driver", f"no driver {driver!r}", list(DRIVERS))
    return make(blueprint, deadline)
