"""A model with an operator's settings: all that can be checked before an engine starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

from stagevox.errors import BadParameterError, ConfigError, UnknownStageError
from stagevox.pipeline.request import OmniRequest

from .deploy import PLATFORMS, Path
from .effective import OVERRIDES, Effective, merge
from .layer import COMMAND_LINE, Layer, command_line_layer, file_layers
from .multi_step import resolve_multi_step_steps
from .sampling import check_sampling
from .stage_settings import check_devices, check_engine_settings, check_options, checked, model_keys
from .topology import FrontEnd, Topology
from .yaml_text import read_document


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A resolved model. Making one imports neither vLLM, unless a deploy file has a part for a platform, nor weights."""

    topology: Topology
    """With the operator's settings laid over the stages, but for engine arguments."""
    front_end: FrontEnd
    overrides: Mapping[str, Mapping[str, Any]]
    """The operator's vLLM engine arguments per stage; their names and types are checked by :meth:`check_overrides`."""
    effective: Effective
    """All settings."""
    model: Topology = field(repr=False)
    """Without the operator's settings."""
    layers: Mapping[str, Layer] = field(repr=False)
    """The operator's settings by source, those for platforms that don't run here included."""
    strict: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    """Engine arguments that were set in code: their values have to be of the argument's type as they are."""

    @classmethod
    def of(
        cls,
        model: str | FilePath,
        overrides: Mapping[str, Any] | None = None,
        *,
        deploy_config: str | os.PathLike[str] | None = None,
        stage_settings: Sequence[str] = (),
        platform: str | None = None,
        multi_step: Any = None,
    ) -> Blueprint:
        """Resolve a packaged model's name or a checkpoint folder.

        ``overrides`` maps stages to engine arguments, ``deploy_config`` is an operator's YAML file, ``stage_settings`` are
        ``NAME.key=value`` texts of the command line. ``platform`` chooses the file's part for a platform; None asks vLLM, if
        there is any to choose. ``multi_step`` is how many decode steps a round may merge in every stage that can.

        Raises:
            UnknownModelError: neither a packaged model nor a checkpoint folder.
            UnknownStageError: settings for a stage that the model doesn't have.
            UnknownOverrideError: a key that isn't there, or not in this block.
            ConfigError: settings that can't work.
        """
        from stagevox.models.registry import front_end_of, resolve_topology

        topology = resolve_topology(model)
        strict = _check_names(overrides, [spec.name for spec in topology.stages])
        keys = model_keys(topology)
        layers: dict[str, Layer] = {}
        if deploy_config is not None:
            if not isinstance(deploy_config, str | os.PathLike):
                raise ConfigError("deploy_config", f"not a path but a {type(deploy_config).__name__}")
            layers = file_layers(read_document(FilePath(deploy_config), "deploy_config"), keys)
        layers[OVERRIDES] = _code_layer(strict)
        layers[COMMAND_LINE] = command_line_layer(stage_settings, keys)
        layers = {name: checked(layer, topology, keys) for name, layer in layers.items()}
        _check_apart(layers[OVERRIDES], layers[COMMAND_LINE])
        platform = _platform(layers, platform)
        effective = merge(topology, _in_force(layers, platform), platform)
        check_options(effective, topology)
        stages = [replace(effective.laid_over(spec), multi_step_for_all=multi_step) for spec in topology.stages]
        for spec in stages:
            resolve_multi_step_steps(spec)
        laid_over = replace(topology, stages=tuple(stages))
        arguments = {spec.name: effective.overrides(spec.name) for spec in topology.stages}
        return cls(
            laid_over,
            front_end_of(topology),
            {stage: values for stage, values in arguments.items() if values},
            effective,
            topology,
            layers,
            strict,
        )

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages' names, in order."""
        return tuple(spec.name for spec in self.topology.stages)

    def check_overrides(self) -> None:
        """Check the engine arguments' names and types. Imports vLLM if there are any.

        Raises:
            UnknownOverrideError: not an engine argument; ``allowed`` has the nearest ones.
            ConfigError: a value of another type.
        """
        self._checked_layers()

    def explained(self) -> Effective:
        """All settings as they will be, with the defaults of options and with engine arguments checked and coerced.

        Raises what :meth:`check_overrides` raises.
        """
        layers = self._checked_layers()
        platform = self.effective.platform
        return merge(self.model, _in_force(layers, platform), platform, complete=True)

    def _checked_layers(self) -> dict[str, Layer]:
        if any(self.strict.values()):
            from .vllm_names import check_engine_args

            for stage, arguments in self.strict.items():
                check_engine_args(stage, arguments)
        layers = check_engine_settings(self.layers, model_keys(self.model))
        if any(path[-1] == "devices" for path in self.effective.settings):
            from .vllm_names import running_platform

            check_devices(self.effective, self.effective.platform or running_platform())
        return layers

    def admit(self, req_id: str, prompt: str | Mapping[str, Any], sampling: Mapping[str, Any] | None) -> OmniRequest:
        """Make a request of a prompt: a text, or a mapping with the fields that the model's front end knows.

        Sampling parameters are laid over the operator's. (The model's own are the stage's matter.)

        Raises:
            BadRequestError: a prompt or parameter that can't be served; ``field`` names it.
        """
        fields: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {"text": prompt}
        for key in fields:
            if key not in self.front_end.fields:
                raise BadParameterError(f"prompt.{key}", "no such field", self.front_end.fields)
        layered = check_sampling(sampling, self.stages)
        for stage in self.stages:
            defaults = self.effective.operators(stage, "sampling")
            if defaults:
                set_here = {key: value for key, value in defaults.items() if value is not None}
                layered[stage] = {**set_here, **layered.get(stage, {})}
        return OmniRequest(self.front_end.admit(req_id, fields), sampling=layered)


def _check_names(overrides: Mapping[str, Any] | None, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    overrides = {} if overrides is None else overrides
    if not isinstance(overrides, Mapping):
        raise ConfigError("stage_overrides", f"not a mapping but a {type(overrides).__name__}")
    for stage, arguments in overrides.items():
        if stage not in names:
            raise UnknownStageError(f"stage_overrides.{stage}", "no such stage", names)
        if not isinstance(arguments, Mapping):
            raise ConfigError(f"stage_overrides.{stage}", f"not a mapping but a {type(arguments).__name__}")
    return {stage: dict(arguments) for stage, arguments in overrides.items()}


def _code_layer(arguments: Mapping[str, Mapping[str, Any]]) -> Layer:
    """The layer of engine arguments that were set in code."""
    settings: dict[Path, Any] = {}
    for stage, values in arguments.items():
        settings |= {("stages", stage, "engine_args", key): value for key, value in values.items()}
    return Layer(settings, {path: OVERRIDES for path in settings})


def _check_apart(code: Layer, command_line: Layer) -> None:
    for path in command_line.settings:
        if path in code.settings:
            raise command_line.error(ConfigError, path, f"stands in {OVERRIDES} as well")


def _platform(layers: Mapping[str, Layer], platform: str | None) -> str | None:
    if platform is not None or not any(layers[name].settings for name in PLATFORMS if name in layers):
        return platform
    from .vllm_names import running_platform

    return running_platform()


def _in_force(layers: Mapping[str, Layer], platform: str | None) -> list[Layer]:
    """The layers that hold on a platform, the lowest first."""
    order = ("", platform, OVERRIDES, COMMAND_LINE)
    return [layers[name] for name in order if name is not None and name in layers]
