"""The timeline of one offline call, kept in memory and written with the step log when it is over."""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from stagevox.pipeline.events import ClientEvent, EmitOutput, FinishRequest
from stagevox.pipeline.spans import StepSpan
from stagevox.server.record import RequestRecord

from .figures import RequestFigures
from .timeline import Event, Timeline

MOST_EVENTS = 200_000
"""Beyond it the oldest are dropped."""


class Recording:
    """Give :meth:`stepped` and :meth:`happened` to :meth:`stagevox.omni.Omni.generate`, then ask for the document."""

    def __init__(self, stages: Sequence[str], *, name: str = "stagevox", most: int = MOST_EVENTS) -> None:
        self._timeline = Timeline(stages, time.monotonic(), name=name)
        self._events: deque[Event] = deque(maxlen=most)
        self._figures: dict[str, RequestFigures] = {}

    def stepped(self, span: StepSpan) -> None:
        """A stage has made a step."""
        self._events.extend(self._timeline.step(span))

    def happened(self, event: ClientEvent) -> None:
        """A prompt has an output, or has ended."""
        now = time.monotonic()
        req_id = event.output.req_id if isinstance(event, EmitOutput) else event.req_id
        figures = self._figures.setdefault(req_id, RequestFigures(RequestRecord(req_id, "offline", stream=False)))
        figures.take(event, now)
        if isinstance(event, FinishRequest):
            record, timing = figures.record, event.timing
            record.arrived_at = record.admitted_at = timing.arrived_at
            record.finished_at, record.finish_reason = timing.finished_at, event.finish_reason
            record.error = None if event.error is None else type(event.error).__name__
            self._events.extend([*self._timeline.opened(figures), *self._timeline.closed(figures)])
            del self._figures[req_id]

    def document(self, steps: Mapping[str, Any]) -> bytes:
        """The file: ``stages`` has the step log, ``traceEvents`` what Perfetto shows of it."""
        events = [*itertools.chain(self._timeline.header(), self._events)]
        return json.dumps({"stages": steps, "displayTimeUnit": "ms", "traceEvents": events}).encode()
