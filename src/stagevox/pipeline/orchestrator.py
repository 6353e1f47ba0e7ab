"""Leads requests through the stages: events in, commands out. No I/O and no clock; a driver has both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from stagevox.errors import BadRequestError, DeadlineError, RequestFailedError, StageDiedError, StagevoxError

from .events import (
    AbortAtStage,
    AddToStage,
    ChunkProduced,
    ClockTicked,
    Command,
    EmitOutput,
    Event,
    FinishRequest,
    ForwardChunk,
    RequestAborted,
    RequestArrived,
    RequestFailed,
    StageDied,
    StageProduced,
    StageRevived,
)
from .request import Progress, Timing


class Orchestrator:
    """The pipeline of one model; ``stages`` are their names, each feeding the next.

    ``deadline`` is how long, in seconds, nothing may be heard of a request. One that has all its input at the stage it
    stands at may be queued there behind others: it counts as heard of while that stage has outputs for anyone.
    ``text_stage`` writes what the client reads: speech that ends before it doesn't cut it.
    """

    def __init__(self, stages: Sequence[str], deadline: float = 30.0, text_stage: str | None = None) -> None:
        if not stages or len(set(stages)) != len(stages):
            raise ValueError(f"stages must have names of their own, got {list(stages)}")
        if not deadline > 0:
            raise ValueError(f"the deadline must be above 0 seconds, got {deadline}")
        self.stages = tuple(stages)
        self.deadline = deadline
        self.text_stage = text_stage
        self._requests: dict[str, Progress] = {}
        self._heard_at = dict.fromkeys(self.stages, -math.inf)
        self._dead: dict[str, str] = {}
        self._check_at = -math.inf  # no request can expire before
        self._handlers: dict[type[Event], Callable[[Any], list[Command]]] = {
            RequestArrived: self._arrived,
            StageProduced: self._produced,
            ChunkProduced: self._chunk,
            RequestFailed: self._failed,
            RequestAborted: self._aborted,
            ClockTicked: self._ticked,
            StageDied: self._stage_died,
            StageRevived: self._stage_revived,
        }

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        return len(self._requests)

    @property
    def req_ids(self) -> list[str]:
        """Ids of the requests in flight, oldest first."""
        return list(self._requests)

    def knows(self, req_id: str) -> bool:
        """True while the request is in flight."""
        return req_id in self._requests

    def road(self, req_id: str) -> tuple[str, ...]:
        """The stages that a request in flight visits, in order."""
        return tuple(self._requests[req_id].stages)

    def next_deadline(self) -> float:
        """When the next request expires if nothing happens; infinity if none is in flight."""
        return min(map(self._expiry, self._requests.values()), default=math.inf)

    def assert_idle(self) -> None:
        """Check that no request has left anything behind."""
        assert not self._requests, f"requests in flight: {self.req_ids}"

    def handle(self, event: Event) -> list[Command]:
        """Take one event and return what to do about it, in order.

        Events of requests that aren't in flight, or of stages where they have ended, are late and ignored.

        Raises:
            BadRequestError: a request arrived under an id that is in flight.
        """
        return self._handlers[type(event)](event)

    def _arrived(self, event: RequestArrived) -> list[Command]:
        request, now = event.request, event.now
        if request.req_id in self._requests:
            raise BadRequestError("req_id", f"{request.req_id!r} is already in flight")
        road = self.stages
        if request.last_stage is not None:
            road = road[: road.index(request.last_stage) + 1]
        for name in road:
            if name in self._dead:
                return [FinishRequest(request.req_id, "error", self._death(name), Timing(now, None, now))]
        self._requests[request.req_id] = Progress(request, road, now)
        return [AddToStage(name, request.at(name, first=name == road[0])) for name in reversed(road)]

    def _produced(self, event: StageProduced) -> list[Command]:
        stage, output, now = event.stage, event.output, event.now
        self._heard_at[stage] = now
        progress = self._at(output.req_id, stage)
        if progress is None:
            return []
        progress.heard_at = now
        commands: list[Command] = []
        if output.new_token_ids or output.multimodal:
            commands.append(EmitOutput(stage, output))
            if stage == progress.last and progress.first_output_at is None:
                progress.first_output_at = now
        if output.error is None and output.finish_reason is None:
            return commands
        progress.stages[stage].finish_reason = output.finish_reason or "error"
        if output.error is not None or output.finish_reason == "error":
            error = RequestFailedError(f"{stage}: {output.error or 'failed without a message'}")
            return commands + self._end(progress, now, "error", error)
        if output.finish_reason == "abort":
            return commands + self._end(progress, now, "abort")
        return commands + self._settle(progress, now)

    def _chunk(self, event: ChunkProduced) -> list[Command]:
        progress = self._requests.get(event.chunk.req_id)
        target = progress.downstream(event.stage) if progress and event.stage in progress.stages else None
        if progress is None or target is None:
            return []
        progress.heard_at = event.now
        progress.stages[target].has_all_input |= event.chunk.end
        return [] if progress.stages[target].finish_reason else [ForwardChunk(target, event.chunk)]

    def _failed(self, event: RequestFailed) -> list[Command]:
        progress = self._requests.get(event.req_id)
        if progress is None:
            return []
        error = event.error
        if not isinstance(error, StagevoxError):
            error = RequestFailedError(f"{type(event.error).__name__}: {event.error}")
            error.__cause__ = event.error
        return self._end(progress, event.now, "error", error)

    def _aborted(self, event: RequestAborted) -> list[Command]:
        progress = self._requests.get(event.req_id)
        return [] if progress is None else self._end(progress, event.now, "abort")

    def _ticked(self, event: ClockTicked) -> list[Command]:
        if event.now < self._check_at:
            return []
        commands: list[Command] = []
        for progress in list(self._requests.values()):
            if event.now >= self._expiry(progress):
                commands += self._end(progress, event.now, "error", self._starved(progress))
        # Hearing of a request only moves its end back, and a new one ends later than this.
        self._check_at = min(self.next_deadline(), event.now + self.deadline)
        return commands

    def _stage_died(self, event: StageDied) -> list[Command]:
        self._dead[event.stage] = event.cause
        commands: list[Command] = []
        for progress in list(self._requests.values()):
            if event.stage in progress.open_stages():
                commands += self._end(progress, event.now, "error", self._death(event.stage))
        return commands

    def _stage_revived(self, event: StageRevived) -> list[Command]:
        self._dead.pop(event.stage, None)
        return []

    def _at(self, req_id: str, stage: str) -> Progress | None:
        """The request if it is open at ``stage``."""
        progress = self._requests.get(req_id)
        if progress is None:
            return None
        place = progress.stages.get(stage)
        return progress if place is not None and place.finish_reason is None else None

    def _settle(self, progress: Progress, now: float) -> list[Command]:
        """End the request if its last stage has ended; what still runs upstream is cut, unless it is the text."""
        if progress.stages[progress.last].finish_reason is None:
            return []
        open_stages = progress.open_stages()
        if open_stages and progress.has_sent_all(open_stages[-1]):
            return []  # Chunks and outputs travel apart: that stage has yet to say how it ended.
        if self.text_stage in open_stages:
            return []
        return self._end(progress, now, progress.finish_reason())

    def _end(self, progress: Progress, now: float, reason: str, error: StagevoxError | None = None) -> list[Command]:
        """Forget the request and free it wherever it is still held."""
        req_id = progress.request.req_id
        del self._requests[req_id]
        held = [name for name in progress.open_stages() if name not in self._dead]
        aborts: list[Command] = [AbortAtStage(name, (req_id,)) for name in held]
        return [*aborts, FinishRequest(req_id, reason, error, progress.timing(now))]

    def _expiry(self, progress: Progress) -> float:
        heard_at = progress.heard_at
        stage = progress.open_stages()[0]
        if progress.stages[stage].has_all_input:
            heard_at = max(heard_at, self._heard_at[stage])
        return heard_at + self.deadline

    def _starved(self, progress: Progress) -> DeadlineError:
        stage = progress.open_stages()[0]
        if progress.stages[stage].has_all_input:
            return DeadlineError(f"{stage}: no output in {self.deadline:g} s")
        upstream = self.stages[self.stages.index(stage) - 1]
        return DeadlineError(f"{stage}: no input from {upstream} in {self.deadline:g} s")

    def _death(self, stage: str) -> StageDiedError:
        return StageDiedError(f"{stage}: the engine died: {self._dead[stage]}")
