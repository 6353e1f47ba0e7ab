"""The schema of an operator's deploy file: every key, its type and what it is for.

A block that is empty (``talker:`` with nothing under it) says nothing. docs/configuration.md explains each key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from stagevox.errors import ConfigError

from .coerce import checker, coerce, shortened
from .multi_step import check_multi_step_steps


def _as(hint: Any) -> BeforeValidator:
    """Reads a value as YAML users write it before pydantic sees it."""
    check = checker(TypeAdapter(hint))
    return BeforeValidator(lambda value: coerce(check, value))


def _block(value: Any) -> Any:
    return {} if value is None else value


def _list(value: Any) -> Any:
    return value if isinstance(value, list) or value is None else [value]


def _address(value: str) -> str:
    found = re.fullmatch(r"tcp://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\*|[0-9]{1,5})", value)
    if found is None or (found[1] != "*" and not 1 <= int(found[1]) <= 65535):
        raise ValueError(f"{shortened(repr(value))}: not an address such as tcp://10.0.0.2:5555")
    return value


Seconds = Annotated[float, _as(Annotated[float, Field(gt=0, lt=1e9)])]
Window = Annotated[int, _as(Annotated[int, Field(ge=1, le=64)])]
"""As many as an edge may hold for all its requests (:class:`stagevox.connectors.outbox.RoadLimits`)."""
Devices = Annotated[
    list[int | str],
    _as(Annotated[list[Annotated[int, Field(ge=0, le=4096)] | Annotated[str, Field(min_length=1)]], Field(min_length=1)]),
    BeforeValidator(_list),  # runs first
]
Options = Annotated[dict[str, Any], BeforeValidator(_block)]
"""Keys that depend on the stage; they are checked once the model is known."""
ModelRunner = Literal["v1", "v2"]


class Block(BaseModel):
    """A mapping of known keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def _steps(value: int) -> int:
    try:
        return check_multi_step_steps("", value)
    except ConfigError as error:
        raise ValueError(str(error).removeprefix(": ")) from None


class Extras(Block):
    """stagevox's own settings of a stage's engine."""

    multi_step_decode_steps: Annotated[int, AfterValidator(_steps), _as(int)] | None = None
    """How many decode steps one scheduling round may merge: 0, which is off, or 2 to 16."""
    output_materialisation: Literal["inline", "background"] | None = None
    """Where the outputs of a step are made: within the step, or on a thread of their own while the next one runs."""


class Stage(Block):
    """What an operator may set of one stage."""

    devices: Devices | None = None
    """The accelerator that the stage runs on: an index or an id, or a list with one."""
    engine_args: Options = {}
    """vLLM's engine arguments, by vLLM's names."""
    sampling: Options = {}
    """Defaults of the sampling parameters; a client's are laid over them."""
    chunk_options: Options = {}
    """How the stage's output is cut for the next one: ``sizes``, and what else its chunk processor takes."""
    input_options: Options = {}
    """What the stage's input adapter takes, such as a left context."""
    model_runner: ModelRunner | None = None
    """vLLM's model runner for this stage, before the deployment's."""
    engine_extras: Annotated[Extras, BeforeValidator(_block)] = Extras()
    """stagevox's own settings of the stage's engine."""
    replicas: Annotated[int, _as(int)] | None = None
    """Reserved: 1."""


class Connectors(Block):
    """The road between the stages."""

    kind: Literal["auto", "local", "shm", "tcp"] | None = None
    """``local`` inside one process, ``shm`` between processes, ``tcp`` between hosts; ``auto`` is one of the first two."""
    window: Window | None = None
    """Chunks of one request that may be on their way to a stage before its producer waits."""
    addresses: Annotated[dict[str, Annotated[str, AfterValidator(_address)]], BeforeValidator(_block)] = {}
    """With ``tcp``: where a stage listens, ``tcp://HOST:PORT``; a stage without one listens on loopback."""


class Deadlines(Block):
    """How long to wait, in seconds, until a request fails."""

    input: Seconds | None = None
    """For a stage to hear of a request: its input, its next chunk, its next output."""


class Settings(Block):
    """What a deploy file may set, for every platform or for one."""

    stages: Annotated[dict[str, Annotated[Stage, BeforeValidator(_block)]], BeforeValidator(_block)] = {}
    """By the stage's name."""
    model_runner: ModelRunner | None = None
    """vLLM's model runner for stages that name none."""
    connectors: Annotated[Connectors, BeforeValidator(_block)] = Connectors()
    """The road between the stages."""
    deadlines: Annotated[Deadlines, BeforeValidator(_block)] = Deadlines()
    """How long to wait."""


_ForPlatform = Annotated[Settings, BeforeValidator(_block)]


class Platforms(Block):
    """Settings that are laid over the common ones where the platform is the running one."""

    cpu: _ForPlatform = Settings()
    """On vLLM's CPU build."""
    cuda: _ForPlatform = Settings()
    """On NVIDIA's GPUs."""
    rocm: _ForPlatform = Settings()
    """On AMD's GPUs."""
    xpu: _ForPlatform = Settings()
    """On Intel's GPUs."""
    tpu: _ForPlatform = Settings()
    """On Google's TPUs."""


class Deploy(Settings):
    """A deploy file."""

    platforms: Annotated[Platforms, BeforeValidator(_block)] = Platforms()
    """Settings for one platform."""


PLATFORMS = tuple(Platforms.model_fields)
STAGE_KEYS = tuple(Stage.model_fields)
STAGE_BLOCKS = ("engine_args", "sampling", "chunk_options", "input_options", "engine_extras")
"""The keys of a stage that hold keys themselves."""

DEFAULTS: Mapping[str, Any] = {
    "connectors.kind": "auto",
    "connectors.window": 8,
    "deadlines.input": 30.0,
    "model_runner": "v1",
    "replicas": 1,
}
"""What holds where neither operator nor model says anything."""

Path = tuple[str, ...]
"""The keys that lead to a setting, without ``platforms`` and the platform."""


def flatten(settings: Settings) -> dict[Path, Any]:
    """The settings that were written, by path. Values of stage blocks are whole, mappings too; null is a value there only."""
    found: dict[Path, Any] = {}
    written = settings.model_dump(exclude_unset=True, exclude={"platforms"})
    _collect(written, (), found)
    return found


def _collect(value: Any, path: Path, found: dict[Path, Any]) -> None:
    deep = 4 if path[:1] == ("stages",) else 3
    if isinstance(value, dict) and len(path) < deep:
        for key, one in value.items():
            _collect(one, (*path, key), found)
    elif value is not None or len(path) == 4:
        found[path] = value
