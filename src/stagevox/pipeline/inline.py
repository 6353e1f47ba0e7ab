"""The driver that steps all stages in one process and one thread: tests, laptops, the offline front door.

A round steps every stage that has work once, so no stage starves another. Upstream goes first: a chunk is taken up in the
round that made it. Downstream first gave the same throughput and a later first sound (22 against 24 ms alone).

Stages don't step in threads side by side: vLLM keeps the forward context of a step in a module global.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from stagevox.connectors.base import Connector
from stagevox.stage.messages import Gauges
from stagevox.stage.payload import StageOutput

from .events import (
    AbortAtStage,
    AddToStage,
    ChunkProduced,
    ClientEvent,
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
)
from .orchestrator import Orchestrator
from .request import OmniRequest, StageStats
from .spans import StepSpan, Watcher
from .stage import Stage

IDLE_SLICE = 0.05
"""Longest sleep, in seconds, while requests wait and no stage has work."""

LAST_ROUNDS = 4
"""Most rounds after the last request has ended, in which engines drop what they held for it."""


class InlineDriver:
    """Runs requests through ``stages``, in the order of the orchestrator's. Not thread-safe."""

    def __init__(
        self,
        stages: Sequence[Stage],
        orchestrator: Orchestrator,
        connector: Connector,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        names = tuple(stage.name for stage in stages)
        if names != orchestrator.stages:
            raise ValueError(f"the driver's stages {list(names)} are not the orchestrator's {list(orchestrator.stages)}")
        self._stages = {stage.name: stage for stage in stages}
        self._alive = dict(self._stages)
        self._orchestrator = orchestrator
        self._connector = connector
        self._clock = clock
        self._sleep = sleep
        self._events: list[ClientEvent] = []
        self._worked = False
        self._stats = {name: StageStats(name) for name in names}
        self._bytes = dict.fromkeys(names, 0)
        self.on_step: Watcher | None = None
        """Called after every step."""

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        return self._orchestrator.num_requests

    @property
    def alive(self) -> tuple[str, ...]:
        """The stages whose engines haven't died, in order."""
        return tuple(self._alive)

    def stats(self) -> list[StageStats]:
        """A copy of what was measured so far, a stage each."""
        return [replace(stats) for stats in self._stats.values()]

    def gauges(self) -> dict[str, Gauges]:
        """How each stage stands; one that has died holds nothing."""
        found = {name: Gauges() for name in self._stages}
        for name, stage in self._alive.items():
            found[name] = stage.gauges()
            found[name].payload_bytes = self._bytes[name]
        return found

    def clear_stats(self) -> None:
        """Measure anew, as after a warm-up."""
        self._stats = {name: StageStats(name) for name in self._stages}

    def submit(self, request: OmniRequest) -> None:
        """Start a request; raises :class:`stagevox.errors.BadRequestError` if its id is in flight."""
        commands = self._orchestrator.handle(RequestArrived(self._clock(), request))
        self._connector.open(request.req_id)
        self._carry_out(commands)

    def abort(self, req_id: str) -> None:
        """End a request and free it everywhere; an unknown id is ignored."""
        self._tell(RequestAborted(self._clock(), req_id))

    def fail(self, req_id: str, error: Exception) -> None:
        """End a request with an error that was found outside the stages; an unknown id is ignored."""
        self._tell(RequestFailed(self._clock(), req_id, error))

    def abort_all(self) -> None:
        """End every request in flight."""
        for req_id in self._orchestrator.req_ids:
            self.abort(req_id)

    def assert_idle(self) -> None:
        """Check that ended requests left nothing behind, here or at any stage that is alive."""
        self._orchestrator.assert_idle()
        assert not self._connector.num_open, f"{self._connector.num_open} requests open on the road"
        for stage in self._alive.values():
            assert not stage.num_requests, f"{stage.num_requests} requests held by {stage.name}"

    def events(self, each_round: Callable[[], None] | None = None) -> Iterator[ClientEvent]:
        """Run until no request is left, yielding what clients see as it comes; requests may be submitted meanwhile.

        Sleeps while requests wait and no stage has work. Calls ``each_round`` between rounds, where every engine is at rest. If
        the iteration is interrupted or given up, all requests are aborted.
        """
        with self.cleared_on_error():
            while self.num_requests or self._events:
                if each_round is not None:
                    each_round()
                yield from self.step()
                self._idle()
            for _ in range(LAST_ROUNDS):
                self.step()
                if not self._worked:
                    break

    @contextmanager
    def cleared_on_error(self) -> Iterator[None]:
        """Abort every request and forget what was not yet told if the block raises."""
        try:
            yield
        except BaseException:
            self.abort_all()
            self._events.clear()
            raise

    def step(self) -> list[ClientEvent]:
        """Run one round and return what clients see of it; never blocks."""
        self._worked = False
        for stage in list(self._alive.values()):
            self._step_stage(stage)
        self._tell(ClockTicked(self._clock()))
        events, self._events = self._events, []
        return events

    def _step_stage(self, stage: Stage) -> None:
        """Hand a stage its chunks, step it if it has work, and pass on what it made."""
        for chunk in self._connector.get(stage.name):
            self._hand_over(chunk.req_id, stage.deliver, chunk)
        started = self._clock()
        try:
            if not stage.has_work():
                return
            outputs, chunks = stage.step()
        except Exception as error:
            self._died(stage.name, error)
            return
        now = self._clock()
        self._worked = True
        tokens = self._count(stage.name, outputs, now - started)
        for chunk in chunks:
            self._bytes[stage.name] += sum(getattr(value, "nbytes", 0) for value in chunk.data.values())
        if self.on_step is not None:
            self.on_step(StepSpan(stage.name, started, now, (), len(outputs), tokens, stage.gauges()))
        for output in outputs:
            self._tell(StageProduced(now, stage.name, output))
        for chunk in chunks:
            self._tell(ChunkProduced(now, stage.name, chunk))

    def _count(self, name: str, outputs: list[StageOutput], seconds: float) -> int:
        stats, tokens = self._stats[name], sum(len(output.new_token_ids) + output.positions for output in outputs)
        stats.steps += 1
        stats.tokens += tokens
        stats.seconds += seconds
        return tokens

    def _idle(self) -> None:
        """Sleep a little if requests wait and no stage had work in the last round."""
        if self._worked or self._events:
            return
        left = self._orchestrator.next_deadline() - self._clock()
        if 0 < left < math.inf:
            self._sleep(min(left, IDLE_SLICE))

    def _tell(self, event: Event) -> None:
        self._carry_out(self._orchestrator.handle(event))

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case EmitOutput():  # first: there is one for every output of every step
                    self._events.append(command)
                case AddToStage(name, request):
                    self._hand_over(request.req_id, self._stages[name].add, request)
                case ForwardChunk(name, chunk):
                    self._hand_over(chunk.req_id, self._connector.put, name, chunk)
                case AbortAtStage(name, req_ids):
                    self._abort(name, req_ids)
                case FinishRequest(req_id):
                    self._connector.drop(req_id)
                    self._events.append(command)

    def _hand_over(self, req_id: str, call: Callable[..., None], *args: object) -> None:
        """Call on behalf of a request, unless it has ended meanwhile; if that raises, only this request fails."""
        if not self._orchestrator.knows(req_id):
            return
        try:
            call(*args)
        except Exception as error:
            self._tell(RequestFailed(self._clock(), req_id, error))

    def _abort(self, name: str, req_ids: tuple[str, ...]) -> None:
        stage = self._alive.get(name)
        try:
            if stage is not None:
                stage.abort(req_ids)
        except Exception as error:
            self._died(name, error)

    def _died(self, name: str, error: Exception) -> None:
        """A stage that raised while it stepped is not used again: what its engine holds is not known."""
        if self._alive.pop(name, None) is not None:
            self._tell(StageDied(self._clock(), name, f"{type(error).__name__}: {error}"))
