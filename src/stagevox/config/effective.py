"""What holds in the end: the operator's settings laid over the model's, and where each value comes from.

From the lowest to the highest: stagevox's defaults, the model, the deploy file, its part for the running platform, the
command line. A value takes the place of a lower one whole; blocks are merged key by key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stagevox.errors import CapabilityError, ConfigError

from .deploy import DEFAULTS, STAGE_BLOCKS, Path
from .layer import Layer
from .options import BLOCKS, options_of
from .topology import StageSpec, Topology

DEFAULT, MODEL, OVERRIDES = "default", "model", "stage_overrides"
"""Sources that are no place in a file: stagevox itself, the model's topology, ``Omni(stage_overrides=...)``."""

SECRET = frozenset({"hf_token"})
"""Keys whose values aren't shown."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value, the place it was written at, and what it was laid over."""

    value: Any
    source: str
    over: Setting | None = None


@dataclass(frozen=True, slots=True)
class Effective:
    """The settings of a deployment, by path. What is under ``engine_args`` is checked by :mod:`.engine_settings`."""

    settings: Mapping[Path, Setting]
    platform: str | None = None
    """The running platform; None if nothing depends on it."""

    def value(self, *path: str) -> Any:
        """The value at a path; None if there is none."""
        setting = self.settings.get(path)
        return setting.value if setting else None

    def error(self, kind: type[ConfigError], path: Path, message: str, allowed: Sequence[str] = ()) -> ConfigError:
        """An error about a setting, to be raised."""
        return kind(".".join(path), f"{self.settings[path].source}: {message}", allowed)

    def block(self, stage: str, block: str) -> dict[str, Any]:
        """The values under a key of a stage."""
        return {path[3]: one.value for path, one in self.settings.items() if path[:3] == ("stages", stage, block)}

    def operators(self, stage: str, block: str) -> dict[str, Any]:
        """Those of them that the operator has set."""
        places = {path[3]: one for path, one in self.settings.items() if path[:3] == ("stages", stage, block)}
        return {key: one.value for key, one in places.items() if one.source not in (DEFAULT, MODEL)}

    def laid_over(self, spec: StageSpec) -> StageSpec:
        """A stage's spec with the operator's settings; engine arguments stay apart, as overrides."""
        return replace(
            spec,
            sampling=_set(self.block(spec.name, "sampling")),
            chunk_options=self._options(spec, "chunk_options"),
            input_options=self._options(spec, "input_options"),
            engine_extras=_set(self.block(spec.name, "engine_extras")),
        )

    def _options(self, spec: StageSpec, block: str) -> dict[str, Any]:
        """What the model and the operator have set; defaults of a constructor stay with it."""
        kept = {**getattr(spec, block), **self.operators(spec.name, block)}
        return _set(kept)

    def overrides(self, stage: str) -> dict[str, Any]:
        """The vLLM engine arguments that the operator has set for a stage."""
        devices = self.value("stages", stage, "devices")
        chosen = {} if devices is None else {"device_ids": devices}
        return {**self.operators(stage, "engine_args"), **chosen}

    @property
    def deadline(self) -> float:
        """``deadlines.input``, in seconds."""
        return float(self.value("deadlines", "input"))

    def check_one_process(self) -> None:
        """Refuse what needs a process for each stage; raises :class:`CapabilityError`."""
        for path, setting in self.settings.items():
            if path[0] == "connectors" and setting.source != DEFAULT and setting.value not in ("auto", "local"):
                raise self.error(CapabilityError, path, "has no use where all stages share one process", ["local"])


def merge(topology: Topology, layers: Sequence[Layer], platform: str | None = None, *, complete: bool = False) -> Effective:
    """Lay checked layers, the lowest first, over the topology and the defaults.

    ``complete`` adds the defaults of options, for which the classes that take them are imported, and torch with them.

    Raises:
        CapabilityError: what isn't there yet.
        ConfigError: settings that don't fit together.
    """
    settings = {path: Setting(value, source) for path, value, source in _below(topology, complete)}
    for layer in layers:
        where = f" ({'.'.join(layer.prefix)})" if layer.prefix else ""
        for path, value in layer.settings.items():
            settings[path] = Setting(value, layer.source(path) + where, settings.get(path))
    for spec in topology.stages:
        path = ("stages", spec.name, "model_runner")
        settings[path] = resolve_stage_model_runner(settings.get(path), settings[("model_runner",)])
    del settings[("model_runner",)]
    effective = Effective(settings, platform)
    _check_whole(effective, topology)
    return effective


def resolve_stage_model_runner(stage: Setting | None, deployment: Setting) -> Setting:
    """The stage's own ``model_runner`` first, else the deployment's (EX-11)."""
    if stage is None:
        return deployment
    lowest = stage
    chain = [stage]
    while lowest.over is not None:
        lowest = lowest.over
        chain.append(lowest)
    below: Setting = deployment
    for one in reversed(chain):
        below = Setting(one.value, one.source, below)
    return below


def _below(topology: Topology, complete: bool) -> list[tuple[Path, Any, str]]:
    """What holds without an operator."""
    found: list[tuple[Path, Any, str]] = [
        (("model_runner",), DEFAULTS["model_runner"], DEFAULT),
        (("connectors", "kind"), DEFAULTS["connectors.kind"], DEFAULT),
        (("connectors", "window"), DEFAULTS["connectors.window"], DEFAULT),
        (("deadlines", "input"), DEFAULTS["deadlines.input"], DEFAULT),
    ]
    for spec in topology.stages:
        stage = ("stages", spec.name)
        found.append(((*stage, "replicas"), DEFAULTS["replicas"], DEFAULT))
        for block in STAGE_BLOCKS:
            values = dict(getattr(spec, block))
            if complete and block in BLOCKS:
                options = options_of(spec, block)
                values = {name: option.default for name, option in options.items() if name not in values} | values
            found += [((*stage, block, key), value, MODEL) for key, value in values.items()]
    return found


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values without those that null has taken back."""
    return {key: value for key, value in values.items() if value is not None}


def _check_whole(effective: Effective, topology: Topology) -> None:
    """What can only be said of all layers together."""
    for spec in topology.stages:
        stage = ("stages", spec.name)
        if effective.value(*stage, "replicas") != 1:
            raise effective.error(CapabilityError, (*stage, "replicas"), "reserved: a stage has one replica", ["1"])
        if effective.value(*stage, "model_runner") != "v1":
            raise effective.error(CapabilityError, (*stage, "model_runner"), "not there yet", ["v1"])
        devices = effective.value(*stage, "devices")
        if devices is not None and len(devices) != 1:
            raise effective.error(CapabilityError, (*stage, "devices"), "a stage runs on one device", [f"[{devices[0]}]"])
        sampling = _set(effective.block(spec.name, "sampling"))
        low, high = sampling.get("min_tokens", 0), sampling.get("max_tokens")
        if high is not None and low > high:
            raise effective.error(ConfigError, (*stage, "sampling", "min_tokens"), f"more than max_tokens: {low} > {high}")
    _check_road(effective)


def _check_road(effective: Effective) -> None:
    kind = effective.value("connectors", "kind")
    taken: dict[str, Path] = {}
    for path, setting in effective.settings.items():
        if path[0] != "connectors" or path[1] == "kind" or setting.source == DEFAULT:
            continue
        if kind == "local":
            raise effective.error(ConfigError, path, "the local road has none; it belongs to shm and tcp")
        if path[1] != "addresses":
            continue
        if kind != "tcp":
            raise effective.error(ConfigError, path, f"only with connectors.kind tcp, it is {kind}")
        if setting.value in taken and not setting.value.endswith(":*"):
            raise effective.error(ConfigError, path, f"the same as that of {taken[setting.value][2]}")
        taken[setting.value] = path
