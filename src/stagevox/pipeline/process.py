"""The driver with a process a stage: what ``stagevox serve`` runs.

The orchestrator is the one of the inline driver. What differs is the road: chunks go from one stage's process straight to the next
(:mod:`stagevox.connectors.shm`), and the orchestrator is told that they did.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any

from stagevox.connectors.base import Chunk
from stagevox.errors import ClosedError, StageDiedError, StagevoxError
from stagevox.stage.messages import Add, Drop, Gauges, Refused, Standing, Stepped, ToServer
from stagevox.stage.payload import StepRow

from .client import StageHealth
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
from .fleet import Fleet, OnDeath, log_failure
from .orchestrator import Orchestrator
from .request import OmniRequest, StageStats, Timing
from .spans import StepSpan, Watcher
from .stream import Stream

if TYPE_CHECKING:
    from stagevox.config.blueprint import Blueprint

TICK = 0.05
"""Longest time, in seconds, between two looks at the deadlines while requests are in flight."""


class ProcessClient:
    """A pipeline of processes (:class:`stagevox.pipeline.client.OmniClient`)."""

    def __init__(
        self,
        blueprint: Blueprint,
        *,
        deadline: float = 30.0,
        start_deadline: float = 600.0,
        on_death: OnDeath = OnDeath.EXIT,
        told_of_death: Callable[[str, str], None] | None = None,
        record_trace: bool = False,
        road: Mapping[str, Any] | None = None,
        addresses: Mapping[str, str] | None = None,
        stderr: IO[bytes] | None = None,
        engine: str | None = None,
    ) -> None:
        """``deadline`` is how long a request may wait for a stage, ``start_deadline`` how long a stage may load, in seconds.

        ``told_of_death`` is called with a stage's name and the cause. ``road`` has fields of
        :class:`stagevox.connectors.outbox.RoadLimits`; ``addresses`` has the stages that listen on TCP for their chunks, such as
        ``tcp://127.0.0.1:*``; ``stderr`` takes what the stages' processes write; ``engine`` names another
        class of engine, such as a test's.
        """
        self.blueprint = blueprint
        self._orchestrator = Orchestrator(blueprint.stages, deadline, blueprint.topology.text_stage)
        self._upstream = dict(zip(blueprint.stages, (None, *blueprint.stages), strict=False))
        self._fleet = Fleet(
            blueprint,
            self,
            start_deadline=start_deadline,
            on_death=on_death,
            told_of_death=told_of_death,
            addresses=dict(addresses or {}),
            stderr=stderr,
            record=record_trace,
            road={"deadline": deadline, **(road or {})},
            **({} if engine is None else {"engine": engine}),
        )
        self._streams: dict[str, Stream] = {}
        self._stats = {name: StageStats(name) for name in blueprint.stages}
        self._gauges = {name: Gauges() for name in blueprint.stages}
        self._clock_task: asyncio.Task[None] | None = None
        self._closing = False
        self._watchers: list[Watcher] = []
        self._serving = False

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all stages side by side; returns when all are ready and have spoken the warm-up text.

        Raises:
            ConfigError: settings that a stage refuses, or an address where none can listen.
            StageDiedError: a stage ended, or was not ready in time.
        """
        try:
            await self._fleet.start()
            self._clock_task = asyncio.create_task(self._tick(), name="deadlines")
            self._clock_task.add_done_callback(self._clock_ended)
            await self._warm_up()
            self._serving = True
        except BaseException:
            await self.close()
            raise

    async def _warm_up(self) -> None:
        """Speak a text nobody hears: the first use of every kernel takes longest."""
        text = self.blueprint.topology.warm_up
        if text is None:
            return
        async for event in self.submit(self.blueprint.admit("warm-up", text, None)):
            if isinstance(event, FinishRequest) and event.error is not None:
                raise event.error
        await asyncio.gather(*(self._fleet.ask(name, "clear_trace") for name in self.blueprint.stages))
        self._stats = {name: StageStats(name) for name in self.blueprint.stages}

    def watch(self, watcher: Watcher) -> None:
        """Call ``watcher`` after every step of every stage from now on; warm-up isn't told."""
        self._watchers.append(watcher)

    async def drain(self, seconds: float) -> None:
        """Wait for the requests in flight, at most so long; then abort what is left."""
        until = time.monotonic() + seconds
        while self.num_requests and time.monotonic() < until:
            await asyncio.sleep(min(TICK, seconds))
        for req_id in self._orchestrator.req_ids:
            self.abort(req_id)

    async def close(self) -> None:
        """End all processes and remove what they shared; closing again does nothing."""
        if self._closing:
            return
        self._closing = True
        for req_id in self._orchestrator.req_ids:
            self.abort(req_id)
        if self._clock_task is not None:
            self._clock_task.cancel()
        await self._fleet.close()
        if self._clock_task is not None:
            await asyncio.gather(self._clock_task, return_exceptions=True)

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: OmniRequest) -> Stream:
        """Start a request; raises :class:`BadRequestError` for an id in flight, :class:`StageDiedError` if a stage is gone."""
        if self._closing:
            raise ClosedError("the pipeline is closed")
        commands = self._orchestrator.handle(RequestArrived(time.monotonic(), request))
        match commands:
            case [FinishRequest(error=StagevoxError() as error)]:
                raise error
        stream = self._streams[request.req_id] = Stream(request.req_id, self.abort)
        self._carry_out(commands)
        return stream

    def abort(self, req_id: str) -> None:
        """End a request and free it everywhere; an unknown id is ignored."""
        self._tell(RequestAborted(time.monotonic(), req_id))

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        return self._orchestrator.num_requests

    def health(self) -> Mapping[str, StageHealth]:
        """Each stage by name, in order."""
        return dict(self._fleet.health)

    def stats(self) -> list[StageStats]:
        """A copy of what was measured so far, a stage each."""
        return [replace(stats) for stats in self._stats.values()]

    def gauges(self) -> Mapping[str, Gauges]:
        """How each stage stands; one that is gone holds nothing."""
        return dict(self._gauges)

    def pids(self) -> Mapping[str, int]:
        """The process of each stage."""
        return {name: link.pid for name, link in self._fleet.links.items()}

    async def trace(self) -> dict[str, list[StepRow]]:
        """The step log of each stage since it was loaded; empty lists without ``record_trace``."""
        answers = await asyncio.gather(*(self._fleet.ask(name, "trace") for name in self.blueprint.stages))
        return {name: answer.rows for name, answer in zip(self.blueprint.stages, answers, strict=True)}

    async def held(self) -> dict[str, dict[str, int]]:
        """What each stage holds for requests, by kind; all zero when idle."""
        answers = await asyncio.gather(*(self._fleet.ask(name, "held") for name in self.blueprint.stages))
        return {name: answer.held for name, answer in zip(self.blueprint.stages, answers, strict=True)}

    # -- what stages say ----------------------------------------------------------------------------------------------

    def heard(self, name: str, message: ToServer) -> None:
        """A stage said something that is of requests (:class:`.fleet.Listener`)."""
        now = time.monotonic()
        match message:
            case Stepped(outputs, chunks, taken, seconds, gauges, began, rests):
                upstream = self._upstream[name]
                for req_id, seq, end in taken:
                    assert upstream is not None
                    self._tell(ChunkProduced(now, upstream, Chunk(req_id, seq, end, {})))
                stats = self._stats[name]
                stats.steps += 1
                stats.seconds += seconds
                tokens = sum(len(output.new_token_ids) + output.positions for output in outputs)
                stats.tokens += tokens
                self._gauges[name] = gauges
                if self._watchers and self._serving:
                    span = StepSpan(name, began, began + seconds, rests, len(outputs), tokens, gauges)
                    for watcher in self._watchers:
                        watcher(span)
                for req_id, seq, end in chunks:  # before the outputs: the last of them may end the request
                    self._tell(ChunkProduced(now, name, Chunk(req_id, seq, end, {})))
                for output in outputs:
                    self._tell(StageProduced(now, name, output))
            case Standing(gauges):
                self._gauges[name] = gauges
            case Refused(req_id, error):
                self._tell(RequestFailed(now, req_id, error.to_error()))

    def revived(self, name: str) -> None:
        """A stage is ready."""
        self._tell(StageRevived(time.monotonic(), name))

    def died(self, name: str, why: str) -> None:
        """A stage's process has ended, and holds nothing any more."""
        self._gauges[name] = Gauges()
        self._tell(StageDied(time.monotonic(), name, why))
        self._finish_strays(StageDiedError(f"{name}: the engine died"))

    # -- the orchestrator ---------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK if self.num_requests else 10 * TICK)
            self._tell(ClockTicked(time.monotonic()))

    def _clock_ended(self, clock: asyncio.Task[None]) -> None:
        """The clock is for good: without it no deadline would be kept, so that nothing may be served any more."""
        log_failure(clock)
        error = None if clock.cancelled() else clock.exception()
        if error is None or self._closing:
            return
        self._finish_strays(self._fleet.break_down("the clock of the deadlines failed", error))

    def _finish_strays(self, error: StagevoxError) -> None:
        """End the streams of requests that the orchestrator has ended, but whose listeners weren't told for an exception."""
        known, now = set(self._orchestrator.req_ids), time.monotonic()
        for req_id in [req_id for req_id in self._streams if req_id not in known]:
            self._streams.pop(req_id).push(FinishRequest(req_id, "error", error, Timing(now, None, now)))

    def _tell(self, event: Event) -> None:
        self._carry_out(self._orchestrator.handle(event))

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case EmitOutput(_, output):
                    self._streams[output.req_id].push(command)
                case AddToStage(name, request):
                    onward = name != self._orchestrator.road(request.req_id)[-1]
                    self._send_add(name, Add(request, onward))
                case ForwardChunk():
                    pass  # it went straight to the next stage
                case AbortAtStage(name, req_ids):
                    self._fleet.send(name, Drop(list(req_ids)))
                case FinishRequest(req_id):
                    self._fleet.send_all(Drop([req_id]))  # what is left on the road
                    self._streams.pop(req_id).push(command)

    def _send_add(self, name: str, message: Add) -> None:
        try:
            self._fleet.send(name, message)
        except (TypeError, ValueError, OverflowError) as error:  # a value that can't leave this process
            self._tell(RequestFailed(time.monotonic(), message.request.req_id, error))
