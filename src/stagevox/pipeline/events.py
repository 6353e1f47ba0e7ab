"""What the orchestrator is told, and what it tells its driver to do.

Every event carries ``now``, seconds on the driver's clock: the orchestrator has none of its own. Those of every step are named
tuples, which are made fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from stagevox.connectors.base import Chunk
from stagevox.errors import StagevoxError
from stagevox.stage.payload import StageOutput, StageRequest

from .request import OmniRequest, Timing


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A client sent a request."""

    now: float
    request: OmniRequest


class StageProduced(NamedTuple):
    """A stage has an output for the client's side."""

    now: float
    stage: str
    output: StageOutput


class ChunkProduced(NamedTuple):
    """A stage has a chunk for the next stage."""

    now: float
    stage: str
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request, or a chunk of it, could not be handed to a stage."""

    now: float
    req_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class RequestAborted:
    """The client has gone."""

    now: float
    req_id: str


class ClockTicked(NamedTuple):
    """Time has passed."""

    now: float


@dataclass(frozen=True, slots=True)
class StageDied:
    """The engine of a stage is gone."""

    now: float
    stage: str
    cause: str


@dataclass(frozen=True, slots=True)
class StageRevived:
    """The engine of a stage is there, perhaps again."""

    now: float
    stage: str


Event = RequestArrived | StageProduced | ChunkProduced | RequestFailed | RequestAborted | ClockTicked | StageDied | StageRevived


@dataclass(frozen=True, slots=True)
class AddToStage:
    """Register a request with a stage."""

    stage: str
    request: StageRequest


class ForwardChunk(NamedTuple):
    """Carry a chunk to ``stage``."""

    stage: str
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class AbortAtStage:
    """Free requests at ``stage``."""

    stage: str
    req_ids: tuple[str, ...]


class EmitOutput(NamedTuple):
    """Give the client an output of ``stage``."""

    stage: str
    output: StageOutput


@dataclass(frozen=True, slots=True)
class FinishRequest:
    """The last thing about a request: free what the driver holds for it and tell the client."""

    req_id: str
    finish_reason: str
    """``stop``: all was spoken; ``length``: a cap cut it; ``abort``; or ``error``, then ``error`` is set."""
    error: StagevoxError | None
    timing: Timing


ClientEvent = EmitOutput | FinishRequest
Command = AddToStage | ForwardChunk | AbortAtStage | ClientEvent
