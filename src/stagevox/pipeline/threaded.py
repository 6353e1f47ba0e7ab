"""A pipeline for a server in one process: the inline driver in a thread of its own, which loads, steps and closes the stages.

Requests and aborts go to the thread through an inbox that it reads between rounds; what clients see comes back to the event
loop once a round.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from stagevox.connectors.local import LocalConnector
from stagevox.errors import BadRequestError, ClosedError, StageDiedError, StagevoxError
from stagevox.stage.messages import Gauges

from .client import StageHealth
from .events import ClientEvent, EmitOutput, FinishRequest
from .inline import InlineDriver
from .orchestrator import Orchestrator
from .request import OmniRequest, StageStats, Timing
from .spans import StepSpan, Watcher
from .stage import Stage
from .stream import Stream

CLOSE_SECONDS = 5.0
"""Longest wait for the thread to end: a step that hangs must not keep a server from its own end."""

Command = Callable[[InlineDriver], None]


class ThreadedClient:
    """Runs the stages called ``names`` in one background thread (:class:`.client.OmniClient`).

    ``load`` makes them, in that thread; ``warm_up`` is a request nobody hears, run before any other; ``text_stage`` is the
    orchestrator's.
    """

    def __init__(
        self,
        names: Sequence[str],
        load: Callable[[], Sequence[Stage]],
        *,
        deadline: float = 30.0,
        warm_up: OmniRequest | None = None,
        text_stage: str | None = None,
    ) -> None:
        self._names = tuple(names)
        self._load = load
        self._warm_up = warm_up
        self._orchestrator = Orchestrator(self._names, deadline, text_stage)
        self._streams: dict[str, Stream] = {}
        self._health = dict.fromkeys(self._names, StageHealth.STARTING)
        self._stats = [StageStats(name) for name in self._names]
        self._gauges = {name: Gauges() for name in self._names}
        self._told = dict(self._gauges)
        self._watchers: list[Watcher] = []
        self._spans: list[StepSpan] = []
        self._idle: list[asyncio.Future[None]] = []
        self._inbox: deque[Command] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._alive = self._names
        self._loaded = False
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Event | None = None
        self._ready: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Load the stages; returns when all are ready.

        Raises:
            ConfigError: settings that can't work.
            StageDiedError: a stage ended while it loaded.
            StagevoxError: what the warm-up ended in.
            ClosedError: :meth:`close` was called meanwhile.
        """
        assert self._thread is None, "started before"
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._ready = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="stagevox-stages", daemon=True)
        self._thread.start()
        try:
            await self._ready
        except BaseException:
            self._health = dict.fromkeys(self._names, StageHealth.DEAD)
            raise

    def submit(self, request: OmniRequest) -> Stream:
        """Start a request.

        Raises:
            BadRequestError: its id is in flight.
            ClosedError: before :meth:`start` has returned, or after :meth:`close`.
            StageDiedError: a stage on its road is gone.
        """
        req_id = request.req_id
        if req_id in self._streams:
            raise BadRequestError("req_id", f"{req_id!r} is already in flight")
        if self._stopping or StageHealth.STARTING in self._health.values():
            raise ClosedError("the stages are not running")
        road = self._names if request.last_stage is None else self._names[: self._names.index(request.last_stage) + 1]
        for name in road:
            if self._health[name] is not StageHealth.READY:
                raise StageDiedError(f"{name}: the engine died")
        stream = self._streams[req_id] = Stream(req_id, self._abort)
        self._send(lambda driver: driver.submit(request))
        return stream

    @property
    def num_requests(self) -> int:
        """Requests in flight; an aborted one counts until the stages have dropped it."""
        return len(self._streams)

    def health(self) -> Mapping[str, StageHealth]:
        """Each stage by name, in order."""
        return dict(self._health)

    def stats(self) -> list[StageStats]:
        """What was measured so far, a stage each."""
        return [replace(stats) for stats in self._stats]

    def gauges(self) -> Mapping[str, Gauges]:
        """How each stage stands, by name; one that is gone holds nothing."""
        return dict(self._gauges)

    def watch(self, watcher: Watcher) -> None:
        """Call ``watcher`` after every step of every stage from now on; warm-up isn't told."""
        self._watchers.append(watcher)

    async def drain(self, seconds: float) -> None:
        """Wait for the requests in flight, at most so long; then abort what is left."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._until_idle(), seconds)
        for req_id in list(self._streams):
            self._abort(req_id)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._until_idle(), CLOSE_SECONDS)

    async def close(self) -> None:
        """Stop all stages and free what they held; closing again does nothing. Never waits longer than a few seconds.

        Stages that are being loaded are not waited for: their thread closes them once they are there.
        """
        self._stopping = True
        self._wake.set()
        self._settle(ClosedError("closed while the stages were loaded"))
        if self._ended is not None and self._loaded:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), CLOSE_SECONDS)
                assert self._thread is not None
                self._thread.join(1.0)  # it has said its last

    async def _until_idle(self) -> None:
        while self._streams:
            idle: asyncio.Future[None] = self._loop.create_future()
            self._idle.append(idle)
            await idle

    def _abort(self, req_id: str) -> None:
        self._send(lambda driver: driver.abort(req_id))

    def _send(self, command: Command) -> None:
        self._inbox.append(command)
        self._wake.set()

    def _receive(
        self,
        events: Sequence[ClientEvent],
        alive: Sequence[str],
        stats: list[StageStats],
        gauges: Mapping[str, Gauges],
        spans: Sequence[StepSpan] = (),
    ) -> None:
        """Take what a round has made; in the event loop."""
        self._stats, self._gauges = stats, dict(gauges)
        for span in spans:
            for watcher in self._watchers:
                watcher(span)
        for name in self._names:
            if name not in alive:
                self._health[name] = StageHealth.DEAD
        for event in events:
            match event:
                case EmitOutput(_, output):
                    stream = self._streams.get(output.req_id)
                case FinishRequest(req_id):
                    stream = self._streams.pop(req_id, None)
            if stream is not None:
                stream.push(event)
        if not self._streams:
            idle, self._idle = self._idle, []
            for one in idle:
                if not one.done():
                    one.set_result(None)

    # In the thread.

    def _run(self) -> None:
        stages: list[Stage] = []
        try:
            try:
                stages += self._load()
                self._loaded = True
                driver = InlineDriver(stages, self._orchestrator, LocalConnector(), sleep=self._sleep)
                if self._warm_up is not None:
                    driver.submit(self._warm_up)
                    for event in driver.events(each_round=self._check_stop):
                        if isinstance(event, FinishRequest) and event.error is not None:
                            raise event.error
                    for stage in stages:
                        stage.clear_trace()
                    driver.clear_stats()
            except _Stopped:
                return
            except StagevoxError as error:
                self._tell(self._settle, error)
                return
            except Exception as error:
                died = StageDiedError(f"a stage ended while it loaded: {type(error).__name__}: {error}")
                died.__cause__ = error
                self._tell(self._settle, died)
                return
            self._tell(self._settle, None)
            self._serve(driver)
        except Exception as error:
            self._tell(self._died, error)
        finally:
            for stage in stages:
                with suppress(Exception):  # one engine that fails to stop must not keep the others
                    stage.close()
            self._tell(self._end)

    def _serve(self, driver: InlineDriver) -> None:
        made: list[ClientEvent] = []
        driver.on_step = self._note

        def between_rounds() -> None:
            self._flush(driver, made)
            self._check_stop()
            self._take_in(driver)

        with suppress(_Stopped):
            self._flush(driver, made)  # one may have died while it warmed up
            while True:
                self._wake.wait()
                between_rounds()
                for event in driver.events(each_round=between_rounds):
                    made.append(event)
                    if not driver.num_requests:  # told before the rounds in which engines tidy up
                        self._flush(driver, made)
                self._flush(driver, made)

    def _note(self, span: StepSpan) -> None:
        if self._watchers:
            self._spans.append(span)

    def _take_in(self, driver: InlineDriver) -> None:
        self._wake.clear()
        while self._inbox:
            self._inbox.popleft()(driver)

    def _flush(self, driver: InlineDriver, made: list[ClientEvent]) -> None:
        gauges = driver.gauges()
        if made or self._spans or driver.alive != self._alive or gauges != self._told:
            self._alive, self._told = driver.alive, gauges
            events, spans = [_as_arrays(event) for event in made], list(self._spans)
            made.clear()
            self._spans.clear()
            self._tell(self._receive, events, driver.alive, driver.stats(), gauges, spans)

    def _check_stop(self) -> None:
        if self._stopping:
            raise _Stopped

    def _sleep(self, seconds: float) -> None:
        self._wake.wait(seconds)

    def _tell(self, call: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(call, *args)

    # In the event loop again.

    def _settle(self, error: Exception | None) -> None:
        """End :meth:`start`, unless that has happened."""
        if self._ready is None or self._ready.done():
            return
        if error is None:
            self._health = dict.fromkeys(self._names, StageHealth.READY)  # here, so that a death told next isn't overwritten
            self._ready.set_result(None)
        else:
            self._ready.set_exception(error)

    def _died(self, error: Exception) -> None:
        """The thread ended by an error of the driver's own: nothing runs any more."""
        self._health = dict.fromkeys(self._names, StageHealth.DEAD)
        died = StageDiedError(f"the driver failed: {type(error).__name__}: {error}")
        died.__cause__ = error
        self._finish_all("error", died)

    def _end(self) -> None:
        assert self._ended is not None
        self._stopping = True
        self._settle(ClosedError("the stages ended while they were loaded"))
        self._health = dict.fromkeys(self._names, StageHealth.DEAD)
        self._finish_all("abort", None)
        self._ended.set()

    def _finish_all(self, reason: str, error: StagevoxError | None) -> None:
        now = time.monotonic()
        ends = [FinishRequest(req_id, reason, error, Timing(now, None, now)) for req_id in self._streams]
        self._receive(ends, (), self._stats, {name: Gauges() for name in self._names})


class _Stopped(Exception):
    """The thread is to end."""


def _as_arrays(event: ClientEvent) -> ClientEvent:
    """The event with NumPy arrays instead of tensors, copied: their memory may be the engine's."""
    if not isinstance(event, EmitOutput) or not event.output.multimodal:
        return event
    arrays = {
        key: np.asarray(value).copy() if hasattr(value, "__array__") else value for key, value in event.output.multimodal.items()
    }
    return EmitOutput(event.stage, event.output._replace(multimodal=arrays))
