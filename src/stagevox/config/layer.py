"""One source of an operator's settings, checked against the schema: a deploy file's common part, a platform's, the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from stagevox.errors import ConfigError

from .coerce import shortened
from .deploy import PLATFORMS, STAGE_BLOCKS, STAGE_KEYS, Deploy, Path, Settings, flatten
from .homes import ModelKeys, dotted, keys_at, unknown_key
from .nearest import nearest
from .sampling import FIELDS
from .yaml_text import Document, parse_value

COMMAND_LINE = "--stage"

Source = Callable[[Sequence[Any]], str]
"""Says where the setting at a path was written."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Settings of one source, by path. ``sources`` says of each where it stands, such as ``deploy.yaml:4``."""

    settings: Mapping[Path, Any] = field(default_factory=dict)
    sources: Mapping[Path, str] = field(default_factory=dict)
    prefix: Path = ()
    """What stands before a path where it was written: ``platforms`` and the platform's name, or nothing."""

    def source(self, path: Path) -> str:
        """Where the setting at ``path`` was written, or the nearest thing around it."""
        while path and path not in self.sources:
            path = path[:-1]
        return self.sources.get(path, "")

    def error(self, kind: type[ConfigError], path: Path, message: str, allowed: Iterable[str] = ()) -> ConfigError:
        """An error about the setting at ``path``, to be raised."""
        return kind(dotted((*self.prefix, *path)), f"{self.source(path)}: {message}", tuple(allowed))

    def unknown(self, path: Path, keys: Iterable[str], model: ModelKeys, what: str) -> ConfigError:
        """The error that the last key of ``path`` is none of ``keys``, to be raised."""
        return unknown_key((*self.prefix, *path), self.source(path), keys, model, what)

    def block(self, name: str) -> dict[Path, Any]:
        """The settings of all stages under the key ``name``."""
        return {path: value for path, value in self.settings.items() if path[0] == "stages" and path[2] == name}

    @property
    def stages(self) -> list[str]:
        """The stages that it names, with settings or without."""
        return sorted({path[1] for path in self.sources if path[0] == "stages"})


def file_layers(document: Document, model: ModelKeys) -> dict[str, Layer]:
    """The layers of a deploy file: ``""`` is the common one, the others are named by platform.

    Raises:
        UnknownOverrideError: a key that isn't there, or not in this block.
        ConfigError: an empty file, one that is no mapping, or a value of another type.
    """
    if document.value is None:
        raise ConfigError("deploy_config", f"{document.name} is empty; {{}} says that nothing is set")
    if not isinstance(document.value, dict):
        raise ConfigError("deploy_config", f"{document.name} holds not a mapping but a {type(document.value).__name__}")

    def source(where: Sequence[Any]) -> str:
        return f"{document.name}:{document.line(tuple(where))}"

    deploy = _validated(Deploy, document.value, source, model)
    layers = {"": _layer(deploy, (), source)}
    for platform in PLATFORMS:
        layers[platform] = _layer(getattr(deploy.platforms, platform), ("platforms", platform), source)
    return layers


def command_line_layer(settings: Sequence[str], model: ModelKeys) -> Layer:
    """The layer of ``NAME.key=value`` settings, as ``--stage`` takes them.

    ``key`` is a key of a stage, with its own after another dot (``talker.sampling.seed=1``), or an engine argument
    (``talker.max_num_seqs=4``). Values are YAML.

    Raises:
        UnknownOverrideError: a key that isn't there, or not in this block.
        ConfigError: not of that form, no value, the same key twice, or a value of another type.
    """
    tree: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        parts = name.strip().split(".")
        if not equals or len(parts) < 2 or not all(parts):
            raise ConfigError(COMMAND_LINE, f"not of the form NAME.key=value: {shortened(repr(setting))}")
        path = _path(parts, model)
        if not text.strip():
            raise ConfigError(dotted(path), f"{COMMAND_LINE}: no value; null takes back what the model sets")
        _plant(tree, path, parse_value(text, f"{COMMAND_LINE} {'.'.join(parts)}"))
    return _layer(_validated(Settings, tree, _on_command_line, model), (), _on_command_line)


def _on_command_line(where: Sequence[Any]) -> str:
    return COMMAND_LINE


def _path(parts: Sequence[str], model: ModelKeys) -> Path:
    stage, *keys = parts
    if keys[0] not in STAGE_KEYS:
        if keys[0] in FIELDS:  # seed is one of the engine's arguments, too: which one is meant?
            raise unknown_key(("stages", *parts), COMMAND_LINE, STAGE_KEYS, model, "no such key")
        keys = ["engine_args", *keys]
    path = ("stages", stage, *keys)
    if len(path) > (4 if keys[0] in STAGE_BLOCKS else 3):
        whole = ".".join(parts[:-1])
        raise ConfigError(dotted(path), f"{COMMAND_LINE}: no key inside of a value; give all of it: {whole}={{...}}")
    return path


def _plant(tree: dict[str, Any], path: Path, value: Any) -> None:
    """Put a value into a tree of mappings; a stage's block is put there key by key."""
    if isinstance(value, dict) and len(path) == 3 and path[2] in STAGE_BLOCKS:
        for key, one in value.items():
            _plant(tree, (*path, key), one)
        return
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(dotted(path), f"{COMMAND_LINE}: given twice")
    if path[-1] in tree:
        raise ConfigError(dotted(path), f"{COMMAND_LINE}: given twice: {tree[path[-1]]!r} and {value!r}")
    tree[path[-1]] = value


def _layer(settings: Settings, prefix: Path, source: Source) -> Layer:
    flat = flatten(settings)
    sources = {path: source((*prefix, *path)) for path in flat}
    for stage in settings.stages:
        sources[("stages", stage)] = source((*prefix, "stages", stage))
    return Layer(flat, sources, prefix)


def _validated(schema: type[Any], tree: dict[str, Any], source: Source, model: ModelKeys) -> Any:
    """Raises :class:`ConfigError` for the first thing that is wrong."""
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        # A key that isn't there may be the reason for what else is wrong.
        first = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    where, given = first["loc"], first["input"]
    allowed: list[str] = []
    match first["type"]:
        case "extra_forbidden":
            raise unknown_key(where, source(where), keys_at(where[:-1]), model, "no such key")
        case "model_type" | "dict_type":
            message = f"not a mapping but a {type(given).__name__}"
        case "literal_error":
            message = f"no such choice: {shortened(repr(given))}"
            allowed = nearest(given, first["ctx"]["expected"].split("'")[1::2])
        case "string_type":
            message = f"not a text: {shortened(repr(given))}"
        case _:
            message = first["msg"].removeprefix("Value error, ")
    raise ConfigError(dotted(where), f"{source(where)}: {message}", allowed)
