"""The border for an operator's engine arguments: names and types, before an engine starts."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from vllm.engine.arg_utils import EngineArgs

from stagevox.errors import ConfigError, UnknownOverrideError

_OURS = frozenset({"model", "worker_cls", "scheduler_cls", "additional_config", "distributed_executor_backend"})


def engine_arg_names() -> frozenset[str]:
    """The vLLM engine arguments that an operator may override for a stage."""
    return frozenset(field.name for field in dataclasses.fields(EngineArgs)) - _OURS


def check_engine_args(stage: str, arguments: Mapping[str, Any]) -> None:
    """Check the names and types of a stage's overrides. Whether the values fit together is vLLM's to say.

    Raises:
        UnknownOverrideError: not an engine argument; ``allowed`` has the nearest names.
        ConfigError: a value of another type.
    """
    names = sorted(engine_arg_names())
    fields = {field.name: field for field in dataclasses.fields(EngineArgs)}
    for key, value in arguments.items():
        name = f"{stage}.{key}"
        if key not in names:
            raise UnknownOverrideError(name, "not an engine argument", difflib.get_close_matches(str(key), names, cutoff=0.0))
        adapter = _adapter(fields[key].type)
        if adapter is None or value is fields[key].default:
            continue
        try:
            # JSON mode: lists pass for tuples and names for enums, but "4" is no integer and 1 no truth value.
            adapter.validate_json(json.dumps(value, allow_nan=False), strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ConfigError(name, f"{value!r}: {first['msg'][0].lower()}{first['msg'][1:]}") from None
        except ValueError:
            raise ConfigError(name, f"not a finite number: {value!r}") from None
        except TypeError:
            pass  # an object that JSON doesn't know, set in code: vLLM checks it


def _adapter(hint: Any) -> TypeAdapter[Any] | None:
    """A validator of a field's type; None where the type can't be looked up."""
    try:
        if isinstance(hint, str):
            hint = eval(hint, vars(sys.modules[EngineArgs.__module__]))
        return TypeAdapter(hint)
    except (NameError, TypeError, PydanticUserError):
        return None
