"""A stage whose steps run in a thread of their own, beside the stages that the driver steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from stagevox.connectors.base import Chunk
from stagevox.stage.payload import StageOutput, StageRequest, StepRow

from .stage import Stage

Step = tuple[list[StageOutput], list[Chunk]]


class BackgroundStage:
    """Looks like any other stage from outside; nobody touches the inner one while its step runs.

    Meant for a stage that samples nothing and spends its time in large kernels, which leave the interpreter to others.
    ``others_busy`` tells whether the driver has other stages to step meanwhile; if not, :meth:`step` waits.
    """

    def __init__(self, stage: Stage, others_busy: Callable[[], bool]) -> None:
        self.name = stage.name
        self.step_seconds = 0.0
        """How long the step took whose outcome :meth:`step` returned last; 0 if it returned none."""
        self._stage = stage
        self._others_busy = others_busy
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"stage-{stage.name}")
        self._running: Future[tuple[Step, float]] | None = None
        self._inbox: list[Chunk] = []

    def add(self, request: StageRequest) -> None:
        """Register a request; waits for the step that runs."""
        self._rest()
        self._stage.add(request)

    def deliver(self, chunk: Chunk) -> None:
        """Take a chunk; it is handed on between two steps."""
        self._inbox.append(chunk)

    def abort(self, req_ids: Sequence[str]) -> None:
        """Free the requests; waits for the step that runs."""
        self._rest()
        self._inbox = [chunk for chunk in self._inbox if chunk.req_id not in req_ids]
        self._stage.abort(req_ids)

    def has_work(self) -> bool:
        """True if there is an outcome to fetch, or a step to start, or nothing better to do than wait for one."""
        if self._running is not None:
            return self._running.done() or not self._others_busy()
        return bool(self._inbox) or self._stage.has_work()

    def step(self) -> Step:
        """Return what the last step made, and start the next one."""
        outcome: Step = [], []
        self.step_seconds = 0.0
        if self._running is not None:
            running, self._running = self._running, None
            outcome, self.step_seconds = running.result()
        for chunk in self._inbox:
            self._stage.deliver(chunk)
        self._inbox = []
        if self._stage.has_work():
            self._running = self._pool.submit(self._timed_step)
        return outcome

    def trace(self) -> list[StepRow]:
        """The inner stage's step log."""
        self._rest()
        return self._stage.trace()

    def clear_trace(self) -> None:
        """Forget the inner stage's step log."""
        self._rest()
        self._stage.clear_trace()

    @property
    def num_requests(self) -> int:
        """Requests held by the inner stage."""
        self._rest()
        return self._stage.num_requests

    def close(self) -> None:
        """Wait for the step that runs, then stop the inner stage."""
        self._pool.shutdown(wait=True)
        self._stage.close()

    def _rest(self) -> None:
        """Wait until the inner stage stands between two steps; the outcome stays to be fetched."""
        if self._running is not None:
            self._running.exception()

    def _timed_step(self) -> tuple[Step, float]:
        begin = time.perf_counter()
        outcome = self._stage.step()
        return outcome, time.perf_counter() - begin
