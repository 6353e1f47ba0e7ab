"""The options of a stage's chunk processor and input adapter, as their constructors declare them."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError

from .coerce import checker
from .objects import load_attribute
from .topology import StageSpec

BLOCKS = {"chunk_options": "chunk_processor", "input_options": "input_adapter"}
"""The keys of a stage with options, and the field of :class:`StageSpec` that names the class that takes them."""


@dataclass(frozen=True, slots=True)
class Option:
    """One keyword of a constructor."""

    check: Callable[[Any], Any]
    default: Any
    """``inspect.Parameter.empty`` if there is none."""


def options_of(spec: StageSpec, block: str) -> Mapping[str, Option]:
    """The options that a stage has under ``block``: keywords with plain values, the checkpoint left out."""
    target = getattr(spec, BLOCKS[block])
    return _options(target) if target else {}


def make(spec: StageSpec, block: str, options: Mapping[str, Any]) -> Any:
    """The chunk processor or input adapter with these options; raises what its constructor raises."""
    return load_attribute(getattr(spec, BLOCKS[block]))(Path(spec.checkpoint), **options)


@cache
def _options(target: str) -> Mapping[str, Option]:
    constructor = load_attribute(target).__init__
    hints = typing.get_type_hints(constructor)
    found = {}
    _, *parameters = inspect.signature(constructor).parameters.values()
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name == "checkpoint":
            continue
        adapter = _plain(hints.get(parameter.name, Any))
        if adapter is not None:
            found[parameter.name] = Option(checker(adapter), parameter.default)
    return found


def _plain(hint: Any) -> TypeAdapter[Any] | None:
    """A validator of a type that a YAML file can have values of, else None."""
    try:
        adapter = TypeAdapter(hint)
        adapter.json_schema()
    except (PydanticUserError, TypeError):  # functions, tensors
        return None
    return adapter
