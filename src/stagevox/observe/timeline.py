"""Steps, waits and requests as trace events in Chrome's JSON format, which Perfetto opens. No I/O.

Times become whole microseconds since ``origin``, borders first: what follows on another begins where that ended. On a stage's track
every microsecond from its first step on is a step, a wait, or ``between steps``: messages, the road, other stages of the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stagevox.pipeline.spans import StepSpan

from .figures import RequestFigures

Event = dict[str, Any]

REQUESTS = 1
"""The ``pid`` of requests; stages come after it."""
STEPS = 1
"""The ``tid`` of a stage's steps."""
WAITS = {"idle": "idle", "input": "waits for input", "consumer": "waits for the next stage"}
BETWEEN = "between steps"


class Timeline:
    """Makes the events of one pipeline. ``origin`` is time 0, in seconds of ``time.monotonic``."""

    def __init__(self, stages: Sequence[str], origin: float, *, name: str = "stagevox") -> None:
        self._pids = {stage: number for number, stage in enumerate(stages, REQUESTS + 1)}
        self._origin = origin
        self._name = name
        self._until: dict[str, int] = {}
        self._counts: dict[str, Mapping[str, Any]] = {}
        self._open: dict[str, Event] = {}

    def header(self) -> list[Event]:
        """What a file begins with: the tracks' names, and the requests that are open."""
        names = {REQUESTS: f"{self._name}: requests"} | {pid: f"stage: {stage}" for stage, pid in self._pids.items()}
        events = []
        for pid, name in names.items():
            events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
            events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
        for pid in self._pids.values():
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": STEPS, "args": {"name": "steps"}})
        return [*events, *self._open.values()]

    def step(self, span: StepSpan) -> list[Event]:
        """A step, and what was between it and the one before."""
        stage, pid = span.stage, self._pids[span.stage]
        began = max(self._at(span.began), self._until.get(stage, -(1 << 62)))
        ended = max(self._at(span.ended), began)
        events = self._between(span, pid, began) if stage in self._until else []
        self._until[stage] = ended
        gauges = span.gauges
        args = {"requests": span.rows, "tokens": span.tokens, "running": gauges.running, "waiting": gauges.waiting}
        events.append(_slice("step", "step", pid, began, ended, {**args, "parked": gauges.parked}))
        counts = {
            "requests": {"running": gauges.running, "waiting": gauges.waiting, "parked": gauges.parked},
            "kv cache": {"percent": round(100 * gauges.kv_usage, 2)},
        }
        if counts != self._counts.get(stage):  # a counter holds until it is told anew
            self._counts[stage] = counts
            events += [{"ph": "C", "name": name, "pid": pid, "ts": ended, "args": args} for name, args in counts.items()]
        return events

    def _between(self, span: StepSpan, pid: int, began: int) -> list[Event]:
        events: list[Event] = []
        cursor = self._until[span.stage]
        for rest in span.rests:
            start = min(max(self._at(rest.began), cursor), began)
            end = min(max(self._at(rest.ended), start), began)
            if start > cursor:
                events.append(_slice(BETWEEN, "between", pid, cursor, start))
            if end > start:
                events.append(_slice(WAITS.get(rest.reason, rest.reason), "wait", pid, start, end))
            cursor = end
        if began > cursor:
            events.append(_slice(BETWEEN, "between", pid, cursor, began))
        return events

    def opened(self, figures: RequestFigures) -> list[Event]:
        """A request has come."""
        record = figures.record
        begin = self._async("b", record.endpoint, record.req_id, record.arrived_at)
        begin["args"] = {"request_id": record.req_id, "stream": record.stream}
        self._open[record.req_id] = begin
        return [begin]

    def closed(self, figures: RequestFigures) -> list[Event]:
        """A request is over: its phases, what each stage made for it, and its end."""
        record = figures.record
        events: list[Event] = []
        self._open.pop(record.req_id, None)
        finished = record.finished_at if record.finished_at is not None else record.arrived_at
        marks = [
            ("queued", record.arrived_at, record.admitted_at if record.admitted_at is not None else finished),
            ("until the first audio", record.admitted_at, figures.first_audio_at),
            ("speaking", figures.first_audio_at, figures.done_at or finished),
        ]
        for name, began, ended in marks:
            if began is not None and ended is not None:
                events += self._phase(name, record.req_id, began, ended)
        for stage, made in figures.stages.items():
            args = {"outputs": made.outputs, "tokens": made.tokens}
            events += self._phase(stage, f"{record.req_id}/{stage}", made.first_at, made.last_at, args)
        end = self._async("e", record.endpoint, record.req_id, finished)
        end["args"] = figures.as_dict()
        return [*events, end]

    def _phase(
        self, name: str, span_id: str, began: float, ended: float, args: Mapping[str, Any] | None = None
    ) -> tuple[Event, Event]:
        begin = self._async("b", name, span_id, began)
        if args:
            begin["args"] = dict(args)
        return begin, self._async("e", name, span_id, max(began, ended))

    def _async(self, phase: str, name: str, span_id: str, moment: float) -> Event:
        where = {"pid": REQUESTS, "tid": 1, "ts": self._at(moment)}
        return {"ph": phase, "cat": "request", "name": name, "id": span_id, **where}

    def _at(self, moment: float) -> int:
        return round((moment - self._origin) * 1e6)


def _slice(name: str, kind: str, pid: int, began: int, ended: int, args: Mapping[str, Any] | None = None) -> Event:
    event: Event = {"ph": "X", "cat": kind, "name": name, "pid": pid, "tid": STEPS, "ts": began, "dur": ended - began}
    return event if args is None else {**event, "args": dict(args)}
