"""A stage as the pipeline's drivers see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from stagevox.connectors.base import Chunk
from stagevox.stage.messages import Gauges
from stagevox.stage.payload import StageOutput, StageRequest, StepRow


class Stage(Protocol):
    """One engine, stepped by a driver."""

    name: str

    def add(self, request: StageRequest) -> None:
        """Register a request; it runs at once if it has a prompt, else it waits for its input."""
        ...

    def deliver(self, chunk: Chunk) -> None:
        """Hand over an upstream chunk. A chunk for a request this stage no longer knows is ignored."""
        ...

    def abort(self, req_ids: Sequence[str]) -> None:
        """Free the requests here, in whatever state they are; unknown ids are ignored."""
        ...

    def has_work(self) -> bool:
        """True if a step would do something; requests that only wait for upstream don't count."""
        ...

    def step(self) -> tuple[list[StageOutput], list[Chunk]]:
        """Run one scheduling round: client-facing outputs, and chunks for the next stage."""
        ...

    def trace(self) -> list[StepRow]:
        """The step log so far; empty unless recording was asked for."""
        ...

    def clear_trace(self) -> None:
        """Forget the step log so far, and count steps from 0 again."""
        ...

    def multi_step(self) -> dict[str, Any]:
        """What merged decode did so far; ``steps`` is the effective number of steps a round, 0 where it is off."""
        ...

    def gauges(self) -> Gauges:
        """How the stage stands now."""
        ...

    @property
    def num_requests(self) -> int:
        """Requests held here, waiting ones included; 0 when idle."""
        ...

    def close(self) -> None:
        """Stop the engine and free its memory."""
        ...
