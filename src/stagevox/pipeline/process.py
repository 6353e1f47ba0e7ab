"""The driver with a process a stage: what ``stagevox serve`` runs.

The orchestrator is the one of the inline driver. What differs is the road: chunks go from one stage's process straight to the next
(:mod:`stagevox.connectors.shm`), and the orchestrator is told that they did.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any

import zmq.asyncio

from stagevox.connectors.base import Chunk
from stagevox.connectors.roadmap import RoadOwner, with_port
from stagevox.errors import ClosedError, DeadlineError, StageDiedError, StagevoxError
from stagevox.stage.messages import (
    Add,
    Answer,
    Ask,
    Died,
    Drop,
    ErrorInfo,
    Gauges,
    Launch,
    Ready,
    Refused,
    Renewed,
    Standing,
    Stepped,
    ToServer,
)
from stagevox.stage.payload import StepRow

from .answers import Answers
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
from .link import StageLink
from .orchestrator import Orchestrator
from .request import OmniRequest, StageStats, Timing
from .spans import StepSpan, Watcher
from .stream import Stream

if TYPE_CHECKING:
    from stagevox.config.blueprint import Blueprint

logger = logging.getLogger("stagevox.pipeline")

TICK = 0.05
"""Longest time, in seconds, between two looks at the deadlines while requests are in flight."""
ANSWER_SECONDS = 30.0
"""Longest wait for what a stage is asked."""

STOP_SECONDS = 5.0
"""Longest wait for a stage to end by itself."""

MOST_LOADS = 4
"""Times that a dead stage is loaded again without success before it is given up."""
PAUSES = (0.0, 1.0, 2.0, 4.0)
"""Seconds before each of these."""


class OnDeath(enum.Enum):
    """What becomes of the pipeline when a stage's process dies while it serves."""

    EXIT = "exit"
    """The stage stays dead; whoever runs the server is told and ends it."""
    RESTART = "restart"
    """The stage is started again; requests that need it are refused meanwhile. One that can't be loaded stays dead in the end."""


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
        self._start_deadline = start_deadline
        self._on_death = on_death
        self._told_of_death = told_of_death
        self._record = record_trace
        self._road = {"deadline": deadline, **(road or {})}
        self._addresses = dict(addresses or {})
        self._stderr = stderr
        self._engine = {} if engine is None else {"engine": engine}
        self._streams: dict[str, Stream] = {}
        self._links: dict[str, StageLink] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._health = dict.fromkeys(blueprint.stages, StageHealth.STARTING)
        self._stats = {name: StageStats(name) for name in blueprint.stages}
        self._gauges = {name: Gauges() for name in blueprint.stages}
        self._answers = Answers()
        self._ready: dict[str, asyncio.Future[None]] = {}
        self._owner: RoadOwner | None = None
        self._context: zmq.asyncio.Context | None = None
        self._clock_task: asyncio.Task[None] | None = None
        self._generation = 0
        self._loads = dict.fromkeys(blueprint.stages, 0)
        self._closing = False
        self._broken: ErrorInfo | None = None
        self._watchers: list[Watcher] = []
        self._serving = False

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all stages side by side; returns when all are ready and have spoken the warm-up text.

        Raises:
            ConfigError: settings that a stage refuses.
            StageDiedError: a stage ended, or was not ready in time.
        """
        self._owner = RoadOwner(self.blueprint.stages, {name: with_port(at) for name, at in self._addresses.items()})
        self._context = zmq.asyncio.Context()
        try:
            for name in self.blueprint.stages:
                self._launch(name)
            await self._all_ready()
            self._clock_task = asyncio.create_task(self._tick(), name="deadlines")
            self._clock_task.add_done_callback(self._clock_ended)
            await self._warm_up()
            self._serving = True
        except BaseException:
            await self.close()
            raise

    def _launch(self, name: str) -> None:
        assert self._owner is not None and self._context is not None
        names = self.blueprint.stages
        number = names.index(name)
        self._generation += 1
        launch = Launch(
            spec=self.blueprint.topology.stages[number],
            overrides=dict(self.blueprint.overrides.get(name, {})),
            roadmap=self._owner.map,
            control=f"ipc://{self._owner.map.folder}/c{self._generation}",
            target=names[number + 1] if number + 1 < len(names) else None,
            record=self._record,
            road=self._road,
            **self._engine,
        )
        link = self._links[name] = StageLink(launch, self._context, self._stderr)
        self._ready[name] = asyncio.get_running_loop().create_future()
        reader = self._readers[name] = asyncio.create_task(self._read(link), name=f"reader of {name}")
        reader.add_done_callback(_log_failure)

    async def _all_ready(self) -> None:
        waiting = [self._ready[name] for name in self.blueprint.stages]
        done, pending = await asyncio.wait(waiting, timeout=self._start_deadline, return_when=asyncio.FIRST_EXCEPTION)
        for future in done:
            future.result()
        if pending:
            late = [name for name in self.blueprint.stages if not self._ready[name].done()]
            raise StageDiedError(f"{late[0]}: not ready in {self._start_deadline:g} s")

    async def _warm_up(self) -> None:
        """Speak a text nobody hears: the first use of every kernel takes longest."""
        text = self.blueprint.topology.warm_up
        if text is None:
            return
        async for event in self.submit(self.blueprint.admit("warm-up", text, None)):
            if isinstance(event, FinishRequest) and event.error is not None:
                raise event.error
        await asyncio.gather(*(self._ask(name, "clear_trace") for name in self.blueprint.stages))
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
        self._answers.fail_all(ClosedError("the pipeline is closed"))
        if self._clock_task is not None:
            self._clock_task.cancel()
        # One that still loads hears nothing yet.
        seconds = {name: STOP_SECONDS if self._ready[name].done() else 0.0 for name in self._links}
        await asyncio.gather(*(link.stop(seconds[name]) for name, link in self._links.items()), return_exceptions=True)
        for task in self._readers.values():
            task.cancel()
        tasks = [*self._readers.values(), *([self._clock_task] if self._clock_task else [])]
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._owner is not None:
            self._owner.close()
        self._health = dict.fromkeys(self._health, StageHealth.DEAD)

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
        return dict(self._health)

    def stats(self) -> list[StageStats]:
        """A copy of what was measured so far, a stage each."""
        return [replace(stats) for stats in self._stats.values()]

    def gauges(self) -> Mapping[str, Gauges]:
        """How each stage stands; one that is gone holds nothing."""
        return dict(self._gauges)

    def pids(self) -> Mapping[str, int]:
        """The process of each stage."""
        return {name: link.pid for name, link in self._links.items()}

    async def trace(self) -> dict[str, list[StepRow]]:
        """The step log of each stage since it was loaded; empty lists without ``record_trace``."""
        answers = await asyncio.gather(*(self._ask(name, "trace") for name in self.blueprint.stages))
        return {name: answer.rows for name, answer in zip(self.blueprint.stages, answers, strict=True)}

    async def held(self) -> dict[str, dict[str, int]]:
        """What each stage holds for requests, by kind; all zero when idle."""
        answers = await asyncio.gather(*(self._ask(name, "held") for name in self.blueprint.stages))
        return {name: answer.held for name, answer in zip(self.blueprint.stages, answers, strict=True)}

    async def _ask(self, name: str, what: str) -> Answer:
        """Raises :class:`ClosedError`, :class:`StageDiedError`, or :class:`DeadlineError` if no answer comes."""
        link = self._links.get(name)
        if self._closing or link is None:
            raise ClosedError("the pipeline is not running")
        if not link.is_alive:
            raise StageDiedError(f"{name}: the engine died")
        future = self._answers.expect(name, what)
        link.send(Ask(what))
        try:
            return await asyncio.wait_for(future, ANSWER_SECONDS)
        except TimeoutError:
            raise DeadlineError(f"{name}: no answer in {ANSWER_SECONDS:g} s") from None

    # -- what stages say ----------------------------------------------------------------------------------------------

    async def _read(self, link: StageLink) -> None:
        """Read what a stage says until its process ends. A stage that can't be heard any more must not run on: it is killed."""
        cause: ErrorInfo | None = None
        try:
            while (message := await link.receive()) is not None:
                if isinstance(message, Died):
                    cause = message.error
                    continue
                self._heard(link.name, message)
        except Exception as error:
            logger.exception("%s: what it said could not be taken", link.name)
            cause = _own_failure("what it said could not be taken", error)
            link.kill()
            await link.ended()
        if not self._closing:
            self._ended(link, cause or self._broken)
            self._finish_strays(StageDiedError(f"{link.name}: the engine died"))

    def _heard(self, name: str, message: ToServer) -> None:
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
            case Ready():
                upstream = self._upstream[name]
                if upstream is not None and self._health[name] is StageHealth.RESTARTING:
                    self._links[upstream].send(Renewed())
                self._health[name] = StageHealth.READY
                self._loads[name] = 0
                self._tell(StageRevived(now, name))
                if not self._ready[name].done():
                    self._ready[name].set_result(None)
            case Answer():
                self._answers.give(name, message)

    def _ended(self, link: StageLink, cause: ErrorInfo | None) -> None:
        """A stage's process has ended, though nobody asked it to."""
        name, ready = link.name, self._ready[link.name]
        starting = self._health[name] is StageHealth.STARTING
        self._health[name] = StageHealth.DEAD
        why = link.cause() if cause is None else cause.message
        link.close()
        assert self._owner is not None
        self._owner.map.sweep(name)
        self._gauges[name] = Gauges()
        self._tell(StageDied(time.monotonic(), name, why))
        self._answers.fail(name, StageDiedError(f"{name}: {why}"))
        if not ready.done():
            error = StageDiedError(f"{name}: {why}") if cause is None else cause.to_error()
            ready.set_exception(error)
            ready.exception()  # seen: start() may have given up already
            if starting:
                return
        self._lost(name, why)

    def _lost(self, name: str, why: str) -> None:
        """Tell that a stage is dead, and start it again if that is wanted."""
        self._health[name] = StageHealth.DEAD
        if self._told_of_death is not None:
            self._told_of_death(name, why)
        if self._on_death is OnDeath.RESTART:
            self._load_again(name)

    def _load_again(self, name: str) -> None:
        """Start a dead stage, after a pause if the last time was no good; it may be killed, or fail, while it loads."""
        loads = self._loads[name]
        if loads == MOST_LOADS or self._broken is not None:
            return
        self._loads[name] = loads + 1
        self._health[name] = StageHealth.RESTARTING
        asyncio.get_running_loop().call_later(PAUSES[loads], self._load, name)

    def _load(self, name: str) -> None:
        if self._closing or self._broken is not None:
            return
        try:
            self._launch(name)
        except (OSError, zmq.ZMQError) as error:  # no memory to fork, no descriptor left
            self._lost(name, f"it can't be started: {error}")
            return
        link, ready = self._links[name], self._ready[name]

        def check() -> None:
            if not ready.done():
                link.kill()

        late = asyncio.get_running_loop().call_later(self._start_deadline, check)
        ready.add_done_callback(lambda _: late.cancel())

    # -- the orchestrator ---------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK if self.num_requests else 10 * TICK)
            self._tell(ClockTicked(time.monotonic()))

    def _clock_ended(self, clock: asyncio.Task[None]) -> None:
        """The clock is for good: without it no deadline would be kept, so that nothing may be served any more."""
        _log_failure(clock)
        error = None if clock.cancelled() else clock.exception()
        if error is None or self._closing:
            return
        self._broken = _own_failure("the clock of the deadlines failed", error)
        self._health = dict.fromkeys(self._health, StageHealth.DEAD)
        for link in self._links.values():
            link.kill()  # its reader goes on from here
        self._finish_strays(self._broken.to_error())

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
                    self._links[name].send(Drop(list(req_ids)))
                case FinishRequest(req_id):
                    for link in self._links.values():  # what is left on the road
                        link.send(Drop([req_id]))
                    self._streams.pop(req_id).push(command)

    def _send_add(self, name: str, message: Add) -> None:
        try:
            self._links[name].send(message)
        except (TypeError, ValueError, OverflowError) as error:  # a value that can't leave this process
            self._tell(RequestFailed(time.monotonic(), message.request.req_id, error))


def _own_failure(what: str, error: BaseException) -> ErrorInfo:
    """A death that is not the stage's doing."""
    return ErrorInfo.of(StageDiedError(f"{what}: {type(error).__name__}: {error}"))


def _log_failure(task: asyncio.Task[None]) -> None:
    """No task may end unheard."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s: failed", task.get_name(), exc_info=error)
