"""The processes of a pipeline's stages: started, listened to, asked, started again, ended."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Mapping
from typing import IO, TYPE_CHECKING, Any, Protocol

import zmq.asyncio

from stagevox.connectors.roadmap import RoadOwner, with_port
from stagevox.errors import ClosedError, DeadlineError, StageDiedError, StagevoxError
from stagevox.stage.messages import Answer, Ask, Died, ErrorInfo, Launch, Ready, Renewed, ToServer, ToStage

from .answers import Answers
from .client import StageHealth
from .link import StageLink

if TYPE_CHECKING:
    from stagevox.config.blueprint import Blueprint

logger = logging.getLogger("stagevox.pipeline")

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


class Listener(Protocol):
    """Who is told what becomes of the stages, in the event loop."""

    def heard(self, name: str, message: ToServer) -> None:
        """A stage said something that is of requests."""
        ...

    def revived(self, name: str) -> None:
        """A stage is ready."""
        ...

    def died(self, name: str, why: str) -> None:
        """A stage's process has ended, and holds nothing any more."""
        ...


class Fleet:
    """A process a stage, and what they share. All of it belongs to one event loop."""

    def __init__(
        self,
        blueprint: Blueprint,
        listener: Listener,
        *,
        start_deadline: float,
        on_death: OnDeath,
        told_of_death: Callable[[str, str], None] | None,
        addresses: Mapping[str, str],
        stderr: IO[bytes] | None,
        **launch: Any,
    ) -> None:
        """``launch`` has fields of :class:`Launch` that are the same for all stages; the others are :class:`.process.ProcessClient`'s."""
        self._blueprint = blueprint
        self._listener = listener
        self._start_deadline = start_deadline
        self._on_death = on_death
        self._told_of_death = told_of_death
        self._addresses = addresses
        self._stderr = stderr
        self._launch_fields = launch
        self.health = dict.fromkeys(blueprint.stages, StageHealth.STARTING)
        self.links: dict[str, StageLink] = {}
        self.owner: RoadOwner | None = None
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._ready: dict[str, asyncio.Future[None]] = {}
        self._answers = Answers()
        self._context: zmq.asyncio.Context | None = None
        self._generation = 0
        self._loads = dict.fromkeys(blueprint.stages, 0)
        self._closing = False
        self._broken: ErrorInfo | None = None

    async def start(self) -> None:
        """Start all stages side by side; returns when all are ready. After an error what was started is still to be closed.

        Raises:
            ConfigError: settings that a stage refuses, or an address where none can listen.
            StageDiedError: a stage ended, or was not ready in time.
        """
        self.owner = RoadOwner(self._blueprint.stages, {name: with_port(at) for name, at in self._addresses.items()})
        self._context = zmq.asyncio.Context()
        for name in self._blueprint.stages:
            self._launch(name)
        await self._all_ready()

    def send(self, name: str, message: ToStage) -> None:
        """Tell a stage; to one that is gone, nothing is said. Raises what a value raises that can't leave this process."""
        self.links[name].send(message)

    def send_all(self, message: ToStage) -> None:
        """Tell every stage."""
        for link in self.links.values():
            link.send(message)

    async def ask(self, name: str, what: str) -> Answer:
        """Ask a stage; raises :class:`ClosedError`, :class:`StageDiedError`, or :class:`DeadlineError` if no answer comes."""
        link = self.links.get(name)
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

    def break_down(self, what: str, error: BaseException) -> StagevoxError:
        """Kill all stages for good, since whoever drives them can't any more; returns that as an error."""
        self._broken = _own_failure(what, error)
        self.health = dict.fromkeys(self.health, StageHealth.DEAD)
        for link in self.links.values():
            link.kill()  # its reader goes on from here
        return self._broken.to_error()

    async def close(self) -> None:
        """End all processes and remove what they shared."""
        self._closing = True
        self._answers.fail_all(ClosedError("the pipeline is closed"))
        # One that still loads hears nothing yet.
        seconds = {name: STOP_SECONDS if self._ready[name].done() else 0.0 for name in self.links}
        await asyncio.gather(*(link.stop(seconds[name]) for name, link in self.links.items()), return_exceptions=True)
        for task in self._readers.values():
            task.cancel()
        await asyncio.gather(*self._readers.values(), return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)
        if self.owner is not None:
            self.owner.close()
        self.health = dict.fromkeys(self.health, StageHealth.DEAD)

    # -- starting -----------------------------------------------------------------------------------------------------

    def _launch(self, name: str) -> None:
        assert self.owner is not None and self._context is not None
        names = self._blueprint.stages
        number = names.index(name)
        self._generation += 1
        launch = Launch(
            spec=self._blueprint.topology.stages[number],
            overrides=dict(self._blueprint.overrides.get(name, {})),
            roadmap=self.owner.map,
            control=f"ipc://{self.owner.map.folder}/c{self._generation}",
            target=names[number + 1] if number + 1 < len(names) else None,
            **self._launch_fields,
        )
        link = self.links[name] = StageLink(launch, self._context, self._stderr)
        self._ready[name] = asyncio.get_running_loop().create_future()
        reader = self._readers[name] = asyncio.create_task(self._read(link), name=f"reader of {name}")
        reader.add_done_callback(log_failure)

    async def _all_ready(self) -> None:
        waiting = [self._ready[name] for name in self._blueprint.stages]
        done, pending = await asyncio.wait(waiting, timeout=self._start_deadline, return_when=asyncio.FIRST_EXCEPTION)
        for future in done:
            future.result()
        if pending:
            late = [name for name in self._blueprint.stages if not self._ready[name].done()]
            raise StageDiedError(f"{late[0]}: not ready in {self._start_deadline:g} s")

    # -- listening ----------------------------------------------------------------------------------------------------

    async def _read(self, link: StageLink) -> None:
        """Read what a stage says until its process ends. A stage that can't be heard any more must not run on: it is killed."""
        cause: ErrorInfo | None = None
        try:
            while (message := await link.receive()) is not None:
                if isinstance(message, Died):
                    cause = message.error
                    continue
                self._take(link.name, message)
        except Exception as error:
            logger.exception("%s: what it said could not be taken", link.name)
            cause = _own_failure("what it said could not be taken", error)
            link.kill()
            await link.ended()
        if not self._closing:
            self._ended(link, cause or self._broken)

    def _take(self, name: str, message: ToServer) -> None:
        match message:
            case Ready():
                self._is_ready(name)
            case Answer():
                self._answers.give(name, message)
            case _:
                self._listener.heard(name, message)

    def _is_ready(self, name: str) -> None:
        place = self._blueprint.stages.index(name)
        if place and self.health[name] is StageHealth.RESTARTING:
            self.send(self._blueprint.stages[place - 1], Renewed())
        self.health[name] = StageHealth.READY
        self._loads[name] = 0
        self._listener.revived(name)
        if not self._ready[name].done():
            self._ready[name].set_result(None)

    # -- death --------------------------------------------------------------------------------------------------------

    def _ended(self, link: StageLink, cause: ErrorInfo | None) -> None:
        """A stage's process has ended, though nobody asked it to."""
        name, ready = link.name, self._ready[link.name]
        starting = self.health[name] is StageHealth.STARTING
        self.health[name] = StageHealth.DEAD
        why = link.cause() if cause is None else cause.message
        link.close()
        assert self.owner is not None
        self.owner.map.sweep(name)
        self._listener.died(name, why)
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
        self.health[name] = StageHealth.DEAD
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
        self.health[name] = StageHealth.RESTARTING
        asyncio.get_running_loop().call_later(PAUSES[loads], self._load, name)

    def _load(self, name: str) -> None:
        if self._closing or self._broken is not None:
            return
        try:
            self._launch(name)
        except (OSError, zmq.ZMQError) as error:  # no memory to fork, no descriptor left
            self._lost(name, f"it can't be started: {error}")
            return
        link, ready = self.links[name], self._ready[name]

        def check() -> None:
            if not ready.done():
                link.kill()

        late = asyncio.get_running_loop().call_later(self._start_deadline, check)
        ready.add_done_callback(lambda _: late.cancel())


def _own_failure(what: str, error: BaseException) -> ErrorInfo:
    """A death that is not the stage's doing."""
    return ErrorInfo.of(StageDiedError(f"{what}: {type(error).__name__}: {error}"))


def log_failure(task: asyncio.Task[None]) -> None:
    """No task may end unheard."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s: failed", task.get_name(), exc_info=error)
