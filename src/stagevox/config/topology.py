"""The stages of a model, as its family declares them in code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from stagevox.connectors.base import Chunk
from stagevox.contract import StageExecutionType
from stagevox.errors import BadParameterError
from stagevox.stage.payload import StageInput, StageRequest

from .env import FEW_KERNELS


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage of a model.

    Classes are named by ``module:attribute`` so that a stage can be built in another process.
    """

    name: str
    execution_type: StageExecutionType
    checkpoint: Path
    """Folder with ``config.json`` and weights, as vLLM loads it."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Defaults for vLLM's engine arguments; an operator's overrides are laid over them."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Default ``SamplingParams`` fields; the client's are laid over them."""
    constraints: Mapping[str, Any] = field(default_factory=dict)
    """``SamplingParams`` fields of the model that no client can undo, such as ``stop_token_ids``."""
    chunk_processor: str | None = None
    """``module:Class`` of the :class:`ChunkProcessor` that cuts this stage's output for the next one; made with the folder
    ``checkpoint`` and, as keywords, ``chunk_options``."""
    chunk_options: Mapping[str, Any] = field(default_factory=dict)
    """Plain values, such as the sizes of chunks."""
    input_adapter: str | None = None
    """``module:Class`` of the :class:`InputAdapter` that reads upstream chunks, made with the folder ``checkpoint`` and, as
    keywords, ``input_options``; None for the first stage."""
    input_options: Mapping[str, Any] = field(default_factory=dict)
    """Plain values, such as a left context."""
    engine_extras: Mapping[str, Any] = field(default_factory=dict)
    """stagevox's own settings of the stage's engine (:class:`stagevox.config.deploy.Extras`)."""
    multi_step_for_all: int | None = None
    """How many decode steps a round may merge in every stage that can, as the command line says; None: it doesn't say."""
    config_part: str | None = None
    """Several stages may share one checkpoint: the part of ``config.json`` that is this stage's, such as ``talker_config``."""
    architecture: str | None = None
    """The name of the stage's model class in the registry; None for the one in ``config.json``."""
    kernels: int = FEW_KERNELS
    """How many kernels oneDNN keeps in the stage's own process, one for each layer and shape (:mod:`.env`)."""
    extra_token: bool = False
    """A sampled token has exported rows only once it was fed. True lets the engine sample one token more than
    ``max_tokens`` and throw it away, so that every token that is returned has its rows."""


class InputAdapter(Protocol):
    """Turns upstream chunks into a stage's own input, on the consuming stage (RT-2). Made once a stage."""

    def accept(self, request: StageRequest, chunk: Chunk) -> StageInput:
        """Convert one chunk of ``request``; chunks come in order, each once."""
        ...

    def drop(self, req_id: str) -> None:
        """Forget a request."""
        ...


class FrontEnd(Protocol):
    """The border between a caller's words and the first stage's tokens."""

    voices: tuple[str, ...]
    sample_rate: int
    fields: tuple[str, ...]
    """The keys that a prompt may have."""

    def admit(self, req_id: str, prompt: Mapping[str, Any]) -> StageRequest:
        """Check a prompt, whose keys are among :attr:`fields`, and make the first stage's request.

        Raises :class:`stagevox.errors.BadRequestError`; ``field`` names the key.
        """
        ...

    def reply_text(self, token_ids: list[int], prompt: Mapping[str, Any]) -> str:
        """The text that is spoken: the first stage's tokens, or the prompt's own text if no stage writes one."""
        ...


def whole_text(field: str, text: Any) -> str:
    """``text`` if it is one that can be written as UTF-8; raises :class:`BadParameterError` for half a surrogate pair, or no text."""
    if not isinstance(text, str):
        raise BadParameterError(field, f"not a text but a {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadParameterError(field, f"no Unicode text: half a surrogate pair at {error.start}") from None
    return text


def text_of(prompt: Mapping[str, Any], voices: Sequence[str]) -> tuple[str, str | None]:
    """The ``text`` and ``voice`` of a prompt; raises :class:`BadParameterError` for values of another type.

    Which voices there are is for the front end to check: it may take aliases.
    """
    text, voice = prompt.get("text"), prompt.get("voice")
    text = whole_text("text", text)
    if not (voice is None or isinstance(voice, str)):
        raise BadParameterError("voice", f"not a name but a {type(voice).__name__}", voices)
    return text, voice


@dataclass(frozen=True, slots=True)
class Topology:
    """A model: its stages in order, each feeding the next."""

    name: str
    stages: tuple[StageSpec, ...]
    front_end: str
    """``module:Class`` of the :class:`FrontEnd`; made with the topology's ``checkpoint`` folder."""
    checkpoint: Path
    text_stage: str | None = None
    """The stage that writes the text of a reply; None for a model that speaks the prompt's own text."""
    warm_up: str | None = None
    """A text to speak once at load, so that no caller's request pays for the first use of every kernel."""
    examples: tuple[str, ...] = ()
    """Prompts to try the model with."""
