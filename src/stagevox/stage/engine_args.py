"""The border for an operator's engine arguments: names and types, before an engine starts."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from vllm.engine.arg_utils import EngineArgs

from stagevox.config.coerce import byte_size, checker, coerce, count
from stagevox.config.nearest import nearest
from stagevox.errors import ConfigError, UnknownOverrideError

_OURS = frozenset({"model", "worker_cls", "scheduler_cls", "additional_config", "distributed_executor_backend"})

_COUNTS = frozenset({"max_model_len", "max_num_batched_tokens", "max_num_scheduled_tokens"})
"""Numbers that vLLM's own command line takes with a letter, such as ``4k``."""


def engine_arg_names() -> frozenset[str]:
    """The vLLM engine arguments that an operator may override for a stage."""
    return frozenset(field.name for field in dataclasses.fields(EngineArgs)) - _OURS


def check_engine_args(stage: str, arguments: Mapping[str, Any]) -> None:
    """Check the names and types of a stage's overrides, set in code. Whether the values fit together is vLLM's to say.

    Raises:
        UnknownOverrideError: not an engine argument; ``allowed`` has the nearest names.
        ConfigError: a value of another type.
    """
    for key, value in arguments.items():
        _checked(f"{stage}.{key}", key, value, lambda check, one: check(one))


def coerce_engine_args(stage: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The same for values that come from YAML: they are made what the argument's type asks for, as far as they stand for it."""
    return {key: coerce_engine_arg(f"{stage}.{key}", key, value) for key, value in arguments.items()}


def coerce_engine_arg(name: str, key: str, value: Any) -> Any:
    """One argument of :func:`coerce_engine_args`; ``name`` is what errors call it."""
    if key.endswith("_bytes"):
        value = byte_size(value)
    elif key in _COUNTS:
        value = count(value)
    return _checked(name, key, value, coerce)


def _checked(name: str, key: str, value: Any, read: Callable[[Callable[[Any], Any], Any], Any]) -> Any:
    names = engine_arg_names()
    if key not in names:
        raise UnknownOverrideError(name, "not an engine argument", nearest(key, names))
    field, check = _field(key)
    if check is None or value is field.default:
        return value
    try:
        return read(check, value)
    except ValueError as error:
        raise ConfigError(name, str(error)) from None
    except TypeError:
        return value  # an object that JSON doesn't know, set in code: vLLM checks it


@cache
def _field(key: str) -> tuple[dataclasses.Field[Any], Callable[[Any], Any] | None]:
    """An argument, and the check of its values; None where the type can't be looked up."""
    field = next(field for field in dataclasses.fields(EngineArgs) if field.name == key)
    hint: Any = field.type
    try:
        if isinstance(hint, str):
            hint = eval(hint, vars(sys.modules[EngineArgs.__module__]))
        return field, checker(TypeAdapter(hint))
    except (NameError, TypeError, PydanticUserError):
        return field, None
