"""The stages of a model, as its family declares them in code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from stagevox.connectors.base import Chunk
from stagevox.contract import StageExecutionType
from stagevox.stage.payload import StageInput, StageRequest


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
    """``module:Class`` of the :class:`ChunkProcessor` that cuts this stage's output for the next one."""
    input_adapter: str | None = None
    """``module:Class`` of the :class:`InputAdapter` that reads upstream chunks; None for the first stage."""


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

    def admit(self, req_id: str, text: str, voice: str | None) -> StageRequest:
        """Check a text and make the first stage's request; raises :class:`stagevox.errors.BadRequestError`."""
        ...

    def reply_text(self, token_ids: list[int]) -> str:
        """The first stage's tokens as the text that is spoken."""
        ...


@dataclass(frozen=True, slots=True)
class Topology:
    """A model: its stages in order, each feeding the next."""

    name: str
    stages: tuple[StageSpec, ...]
    front_end: str
    """``module:Class`` of the :class:`FrontEnd`; made with the topology's ``checkpoint`` folder."""
    checkpoint: Path
    warm_up: str | None = None
    """A text to speak once at load, so that no caller's request pays for the first use of every kernel."""
