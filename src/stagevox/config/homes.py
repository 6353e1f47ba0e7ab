"""Where a key belongs: what to tell an operator who misspelt it or wrote it into another block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagevox.errors import UnknownOverrideError

from .coerce import shortened
from .deploy import PLATFORMS, STAGE_KEYS, Connectors, Deadlines, Deploy, Extras, Settings
from .nearest import CLOSE, likeness, nearest
from .sampling import FIELDS

STAGE = "NAME"
"""Stands for a stage's name where none was given."""

TOP = "the top of the file"


@dataclass(frozen=True, slots=True)
class ModelKeys:
    """The keys that a model brings: its stages, and what options the blocks of each may have."""

    stages: tuple[str, ...] = ()
    options: Callable[[], Mapping[tuple[str, str], Sequence[str]]] = dict
    """``(stage, "chunk_options" or "input_options")`` to names; asked only if a key is not known otherwise."""


def dotted(path: Sequence[Any]) -> str:
    """A path as errors write it."""
    text = shortened(".".join(str(part) for part in path))
    return text if text.isprintable() else repr(text)


def keys_at(where: Sequence[Any]) -> list[str]:
    """The keys of the block at a path of a deploy file, as far as the schema says."""
    if list(where) == ["platforms"]:
        return list(PLATFORMS)
    prefix, path = _split(where)
    match path:
        case []:
            return list((Settings if prefix else Deploy).model_fields)
        case ["stages", _]:
            return list(STAGE_KEYS)
        case ["stages", _, _]:
            return list(Extras.model_fields)
        case ["connectors"]:
            return list(Connectors.model_fields)
        case _:
            return list(Deadlines.model_fields)


def unknown_key(where: Sequence[Any], source: str, keys: Iterable[str], model: ModelKeys, what: str) -> UnknownOverrideError:
    """The error about the last key of the path ``where``: the block that it belongs to or, if none, the nearest keys.

    ``keys`` are those of its own block.
    """
    *inside, last = where
    key = str(last)
    places = _places(inside, model)
    homes = [place for place, names in places if key in names]
    if homes:
        return UnknownOverrideError(dotted(where), f"{source}: not here: {shortened(key)} belongs in {' or '.join(homes)}")
    here = nearest(key, keys)
    elsewhere = nearest(key, {name for _, names in places for name in names}, 1)[:1]
    for name in elsewhere:
        close = likeness(key, name)
        if close >= CLOSE and not any(likeness(key, other) >= close for other in here):
            homes = [place for place, names in places if name in names]
            return UnknownOverrideError(dotted(where), f"{source}: {what}; {name} belongs in {' or '.join(homes)}", [name])
    return UnknownOverrideError(dotted(where), f"{source}: {what}" + ("" if here else ", there are none here"), here)


def _places(inside: Sequence[Any], model: ModelKeys) -> list[tuple[str, Iterable[str]]]:
    """The blocks other than ``inside``, with their keys; of the stage that ``inside`` is about, or of any."""
    prefix, path = _split(inside)
    stage = str(path[1]) if path[:1] == ["stages"] and len(path) > 1 else STAGE
    blocks: list[tuple[list[Any], Iterable[str]]] = [
        ([], Settings.model_fields),
        (["connectors"], Connectors.model_fields),
        (["deadlines"], Deadlines.model_fields),
        (["stages"], model.stages),
        (["stages", stage], STAGE_KEYS),
        (["stages", stage, "sampling"], FIELDS),
        (["stages", stage, "engine_extras"], Extras.model_fields),
    ]
    for (owner, block), names in model.options().items():
        if stage in (owner, STAGE):
            blocks.append((["stages", owner, block], names))
    arguments = ["stages", stage, "engine_args"]
    if path != arguments:
        blocks.append((arguments, _engine_arg_names()))
    places = [(dotted([*prefix, *block]) or TOP, names) for block, names in blocks if block != path]
    places.append((TOP, ["platforms"] if prefix or path else []))
    places.append(("platforms", PLATFORMS if list(inside) != ["platforms"] else []))
    return places


def _split(where: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """``platforms`` and the platform, if a path starts with them; and the rest."""
    path = list(where)
    return (path[:2], path[2:]) if path[:1] == ["platforms"] else ([], path)


def _engine_arg_names() -> frozenset[str]:
    """vLLM's, which has to be imported for them."""
    from .vllm_names import engine_arg_names

    return engine_arg_names()
