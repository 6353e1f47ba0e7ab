"""What a layer says of a model's stages, checked against the model: names, sampling parameters, options, engine arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stagevox.errors import BadParameterError, CapabilityError, ConfigError, UnknownOverrideError, UnknownStageError

from .coerce import coerce, shortened
from .deploy import Path
from .effective import OVERRIDES, Effective
from .homes import ModelKeys
from .layer import Layer
from .nearest import nearest
from .options import BLOCKS, make, options_of
from .sampling import FIELDS
from .topology import Topology


def model_keys(topology: Topology) -> ModelKeys:
    """The keys that a model brings."""

    def options() -> dict[tuple[str, str], tuple[str, ...]]:
        return {(spec.name, block): tuple(options_of(spec, block)) for spec in topology.stages for block in BLOCKS}

    return ModelKeys(tuple(spec.name for spec in topology.stages), options)


def checked(layer: Layer, topology: Topology, model: ModelKeys) -> Layer:
    """The layer with its values coerced; engine arguments are left to :func:`check_engine_settings`.

    Raises:
        UnknownStageError: a stage that the model doesn't have.
        UnknownOverrideError: a sampling parameter or option that isn't there, or not in this block.
        ConfigError: a value that it can't have.
    """
    for stage in layer.stages:
        if stage not in model.stages:
            raise layer.error(UnknownStageError, ("stages", stage), "no such stage", nearest(stage, model.stages))
    for path in layer.settings:
        if path[:2] == ("connectors", "addresses") and path[2] not in model.stages:
            raise layer.error(UnknownStageError, path, "no such stage", nearest(path[2], model.stages))
    settings = dict(layer.settings)
    for path, value in layer.block("sampling").items():
        settings[path] = _sampling(layer, path, value, model)
    for spec in topology.stages:
        for block in BLOCKS:
            for path, value in layer.block(block).items():
                if path[1] != spec.name:
                    continue
                options = options_of(spec, block)
                if path[3] not in options:
                    raise layer.unknown(path, options, model, "no such option")
                if value is not None:
                    settings[path] = _typed(layer, path, options[path[3]].check, value)
    return replace(layer, settings=settings)


def _sampling(layer: Layer, path: Path, value: Any, model: ModelKeys) -> Any:
    check = FIELDS.get(path[3])
    if check is None:
        raise layer.unknown(path, FIELDS, model, "no such sampling parameter")
    if value is None:
        return None
    try:
        return coerce(lambda one: check("", one), value)
    except BadParameterError as error:
        message = shortened(str(error).removeprefix(": "))
        raise layer.error(ConfigError, path, message) from None


def _typed(layer: Layer, path: Path, check: Any, value: Any) -> Any:
    try:
        return coerce(check, value)
    except ValueError as error:
        raise layer.error(ConfigError, path, str(error)) from None


def check_options(effective: Effective, topology: Topology) -> None:
    """Make what the operator has set options of, to see whether their values will do; raises :class:`ConfigError`."""
    for spec in topology.stages:
        for block in BLOCKS:
            given = effective.operators(spec.name, block)
            if not given:
                continue
            try:
                make(spec, block, getattr(effective.laid_over(spec), block))
            except Exception as error:
                path = ("stages", spec.name, block, next(iter(given)))
                raise effective.error(ConfigError, path, f"can't be: {error}") from error


def check_engine_settings(layers: Mapping[str, Layer], model: ModelKeys) -> dict[str, Layer]:
    """The layers with engine arguments coerced, but for those that were set in code. Imports vLLM if there are any.

    Raises:
        UnknownOverrideError: not an engine argument, or one that is set elsewhere; ``allowed`` has the nearest ones.
        ConfigError: a value of another type.
    """
    done = dict(layers)
    for name, layer in layers.items():
        if name == OVERRIDES:
            continue
        settings = dict(layer.settings)
        for path, value in layer.block("engine_args").items():
            settings[path] = _engine_arg(layer, path, value, model)
        done[name] = replace(layer, settings=settings)
    return done


def _engine_arg(layer: Layer, path: Path, value: Any, model: ModelKeys) -> Any:
    from .vllm_names import check_engine_arg, engine_arg_names

    key = path[3]
    if key == "device_ids":
        raise layer.error(UnknownOverrideError, path, f"not here: it is called devices, in stages.{path[1]}")
    try:
        return check_engine_arg("", key, value)
    except UnknownOverrideError:
        raise layer.unknown(path, engine_arg_names(), model, "not an engine argument") from None
    except ConfigError as error:
        raise layer.error(ConfigError, path, str(error).removeprefix(": ")) from None


def check_devices(effective: Effective, running: str) -> None:
    """Refuse devices on a machine that has none to choose from; raises :class:`CapabilityError`."""
    for path in effective.settings:
        if running == "cpu" and path[0] == "stages" and path[2] == "devices":
            message = "a CPU has no devices to choose from; platforms.cuda is the place for those of a GPU"
            raise effective.error(CapabilityError, path, message)
