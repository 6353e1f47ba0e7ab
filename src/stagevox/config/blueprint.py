"""A model with an operator's settings: all that can be checked before an engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stagevox.errors import BadParameterError, ConfigError, UnknownStageError
from stagevox.pipeline.request import OmniRequest

from .objects import load_attribute
from .sampling import check_sampling
from .topology import FrontEnd, Topology


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A resolved model. Making one imports neither vLLM nor weights."""

    topology: Topology
    front_end: FrontEnd
    overrides: Mapping[str, Mapping[str, Any]]
    """vLLM engine arguments per stage; their names and types are checked by :meth:`check_overrides`."""

    @classmethod
    def of(cls, model: str, overrides: Mapping[str, Any] | None = None) -> Blueprint:
        """Resolve a packaged model's name or a checkpoint folder.

        Raises:
            UnknownModelError: neither a packaged model nor a checkpoint folder.
            UnknownStageError: overrides for a stage that the model doesn't have.
            ConfigError: overrides that are not a mapping of mappings.
        """
        from stagevox.models.registry import resolve_topology

        topology = resolve_topology(model)
        names = [spec.name for spec in topology.stages]
        overrides = {} if overrides is None else overrides
        if not isinstance(overrides, Mapping):
            raise ConfigError("stage_overrides", f"not a mapping but a {type(overrides).__name__}")
        for stage, arguments in overrides.items():
            if stage not in names:
                raise UnknownStageError(f"stage_overrides.{stage}", "no such stage", names)
            if not isinstance(arguments, Mapping):
                raise ConfigError(f"stage_overrides.{stage}", f"not a mapping but a {type(arguments).__name__}")
        front_end: FrontEnd = load_attribute(topology.front_end)(topology.checkpoint)
        return cls(topology, front_end, {stage: dict(arguments) for stage, arguments in overrides.items()})

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages' names, in order."""
        return tuple(spec.name for spec in self.topology.stages)

    def check_overrides(self) -> None:
        """Check the overrides' names and types. Imports vLLM if there are any.

        Raises:
            UnknownOverrideError: not an engine argument; ``allowed`` has the nearest ones.
            ConfigError: a value of another type than the argument's.
        """
        if any(self.overrides.values()):
            from stagevox.stage.engine_args import check_engine_args

            for stage, arguments in self.overrides.items():
                check_engine_args(stage, arguments)

    def admit(self, req_id: str, prompt: str | Mapping[str, Any], sampling: Mapping[str, Any] | None) -> OmniRequest:
        """Make a request of a prompt: a text, or a mapping with the fields that the model's front end knows.

        Raises:
            BadRequestError: a prompt or parameter that can't be served; ``field`` names it.
        """
        fields: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {"text": prompt}
        for key in fields:
            if key not in self.front_end.fields:
                raise BadParameterError(f"prompt.{key}", "no such field", self.front_end.fields)
        checked = check_sampling(sampling, self.stages)
        return OmniRequest(self.front_end.admit(req_id, fields), sampling=checked)
